"""Attention of rows in host memory is that of rows on the device, in line and by the host's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.kv.attention import PackedAttention
from bbquic.kv.offload import Arrival, HostAttention, Sent
from bbquic.kv.ranges import SlotRange, Strip, Tiers
from bbquic.kv.rows import Layout, RowSpan
from bbquic.kv.slab import Arena

HEADS, HEAD_DIM, CAPACITY = 6, 8, 32
CPU = torch.device("cpu")
BLOCKS = range(3, 5)


class LateBus:
    """A bus between two parts of the CPU's memory that copies down as late as it may, with one buffer each
    way as on CUDA: what is in a buffer too early or for too short is wrong."""

    def __init__(self) -> None:
        self.arrives = threading.Event()  # nothing does before
        self.arrives.set()
        self._rows, self._answers = torch.empty(0), torch.empty(0)
        self.sent: list[PlainSent] = []

    def down(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._rows = _room(self._rows, flat.numel())
        return LateArrival(self, flat, self._rows, [tensor.shape for tensor in tensors])

    def answers(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        self._answers = _room(self._answers, sum(torch.Size(shape).numel() for shape in shapes))
        self._answers.fill_(torch.nan)
        return _split(self._answers, shapes)

    def up(self, tensor: torch.Tensor) -> Sent:
        self.sent.append(PlainSent(tensor.clone()))
        return self.sent[-1]


@dataclass
class LateArrival:
    bus: LateBus
    flat: torch.Tensor
    room: torch.Tensor
    shapes: list[torch.Size]

    def wait(self) -> list[torch.Tensor]:
        self.bus.arrives.wait()
        self.room[: self.flat.numel()] = self.flat
        return _split(self.room, self.shapes)


@dataclass
class PlainSent:
    tensor: torch.Tensor
    was_waited_for: bool = False

    def wait(self) -> None:
        self.was_waited_for = True


class BrokenBus(LateBus):
    """One whose copies fail while `error` is set."""

    error: BaseException | None = None

    def down(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        arrival, error = super().down(tensors), self.error

        class Broken:
            def wait(self) -> list[torch.Tensor]:
                if error is not None:
                    raise error
                return arrival.wait()

        return Broken()


def _room(buffer: torch.Tensor, values: int) -> torch.Tensor:
    return buffer if buffer.numel() >= values else torch.empty(2 * values)


def _split(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    counts = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split(flat[: sum(counts)], counts)
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def make_range(strips: Sequence[int]) -> tuple[SlotRange, Tiers]:
    """Strips of so many slots, each at the end of a tier with a slot's room before it."""
    sizes = [(slots + 1) * CAPACITY for slots in strips]
    starts = [sum(sizes[:tier]) + CAPACITY for tier in range(len(sizes))]
    where = SlotRange(tuple(map(Strip, starts, strips)), CAPACITY)
    return where, Tiers(tuple(sizes))


def make_arena(tiers: Tiers, on_host: int, kv_heads: int) -> Arena:
    return Arena(
        blocks=BLOCKS,
        tiers=tiers,
        on_host=on_host,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=CPU,
    )


@contextmanager
def hosting(arena: Arena, bus: LateBus) -> Iterator[HostAttention]:
    host = HostAttention(arena, bus)
    try:
        yield host
    finally:
        host.close()


def tokens_of(rows: Sequence[RowSpan], kv_heads: int, generator: torch.Generator) -> list[torch.Tensor]:
    """q, k and v of a pack."""
    total = sum(row.count for row in rows)
    return [torch.randn(1, n, total, HEAD_DIM, generator=generator) for n in (HEADS, kv_heads, kv_heads)]


@st.composite
def row_in(draw: st.DrawFn, slot: int) -> RowSpan:
    """A decode row, a chunk or a tree, plain or behind holes, anywhere in its slot."""
    count = draw(st.integers(1, 5))
    compact = draw(st.integers(0, CAPACITY - count))
    if draw(st.booleans()):
        return RowSpan(slot, compact, count)
    start = draw(st.integers(compact, CAPACITY - count))
    free = [cell for cell in range(compact, CAPACITY) if not start <= cell < start + count]
    tail = tuple(draw(st.lists(st.sampled_from(free), unique=True, max_size=4))) if free else ()
    parents = (0, *(draw(st.integers(0, node - 1)) for node in range(1, count)))
    layout = Layout(compact, start, tail, draw(st.sampled_from([None, parents])))
    return RowSpan(slot, compact + len(tail), count, layout)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    strips=st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any),
    kv_heads=st.sampled_from([1, 2, HEADS]),
    window=st.sampled_from([None, None, 4]),
    seed=st.integers(0, 2**31),
)
def test_rows_in_host_memory_attend_as_on_the_device(
    data: st.DataObject, strips: list[int], kv_heads: int, window: int | None, seed: int
) -> None:
    where, tiers = make_range(strips)
    on_host = data.draw(st.integers(0, len(strips)))
    near, inline, far = (make_arena(tiers, count, kv_heads) for count in (0, on_host, on_host))
    for arena in (near, inline, far):
        fill(arena, where, seed)
    generator = torch.Generator().manual_seed(seed)
    with hosting(far, LateBus()) as host:
        for _ in range(2):
            slots = data.draw(st.lists(st.sampled_from(list(where.slots())), min_size=1, unique=True))
            rows = [data.draw(row_in(slot)) for slot in slots]
            packs = [PackedAttention(rows, where, arena, device=CPU) for arena in (near, inline)]
            packs.append(PackedAttention(rows, where, far, device=CPU, host=host))
            with host:
                for block in BLOCKS:
                    tensors = tokens_of(rows, kv_heads, generator)
                    wanted, *got = (one.attend(block, *tensors, scale=None, window=window) for one in packs)
                    for one in got:
                        torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-5)
    for block, tier in product(BLOCKS, range(where.tiers)):
        for wanted, *got in zip(
            *(arena.view(block, where, tier) for arena in (near, inline, far)), strict=True
        ):
            assert all(torch.equal(one, wanted) for one in got)


def fill(arena: Arena, where: SlotRange, seed: int) -> None:
    """With what earlier packs might have left, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for block, tier in product(BLOCKS, range(where.tiers)):
        for store in arena.view(block, where, tier):
            store.normal_(generator=generator)


class EarlyArrival(LateArrival):
    def wait(self) -> list[torch.Tensor]:
        self.bus.arrives.wait()
        return _split(self.room, self.shapes)


class EarlyBus(LateBus):
    """One that copies down at once, and says so when nobody can put it off any longer."""

    def down(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        self.arrives.clear()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._rows = _room(self._rows, flat.numel())
        self._rows[: flat.numel()] = flat
        return EarlyArrival(self, flat, self._rows, [tensor.shape for tensor in tensors])


class LateHost(HostAttention):
    """Whose thread begins only when it is waited for."""

    def __init__(self, arena: Arena, bus: LateBus) -> None:
        super().__init__(arena, bus)
        self.arrives = bus.arrives

    def settle(self) -> None:
        self.arrives.set()
        super().settle()


def test_the_buffer_of_rows_is_written_again_only_once_they_are_stored() -> None:
    rows, where, arena = a_pack(2, rows=[RowSpan(0, 0, 3), RowSpan(1, 0, 3)])  # of which nobody waits for
    near = make_arena(arena.tiers, 0, 2)
    with LateHost(arena, EarlyBus()) as host:
        packs = [PackedAttention(rows, where, near, device=CPU)]
        packs.append(PackedAttention(rows, where, arena, device=CPU, host=host))
        for block in BLOCKS:
            tensors = tokens_of(rows, 2, torch.Generator().manual_seed(block))
            for pack in packs:
                pack.attend(block, *tensors, scale=None)
    for block, tier in product(BLOCKS, range(where.tiers)):
        for one, wanted in zip(*(each.view(block, where, tier) for each in (arena, near)), strict=True):
            assert torch.equal(one, wanted)
    host.close()


def test_the_buffer_of_answers_is_written_again_only_once_it_was_sent() -> None:
    rows, where, arena = a_pack(2, rows=[RowSpan(0, 5, 1), RowSpan(1, 4, 3), RowSpan(3, 7, 2)])
    bus = LateBus()
    with hosting(arena, bus) as host, host:
        pack = PackedAttention(rows, where, arena, device=CPU, host=host)
        pack.attend(3, *tokens_of(rows, 2, torch.Generator()), scale=None)
    # of the decode row; of the one chunk's earlier keys, values; and of the other's, which nothing follows
    assert [sent.was_waited_for for sent in bus.sent] == [True, False, True, False, False]


def a_pack(
    on_host: int = 1, *, rows: Sequence[RowSpan] = (RowSpan(0, 0, 1), RowSpan(1, 0, 1))
) -> tuple[Sequence[RowSpan], SlotRange, Arena]:
    where, tiers = make_range([1, 2])
    return rows, where, make_arena(tiers, on_host, 2)


def test_the_device_goes_on_while_the_host_attends() -> None:
    rows, where, arena = a_pack(2)
    bus = LateBus()
    bus.arrives.clear()
    with hosting(arena, bus) as host:
        pack = PackedAttention(rows, where, arena, device=CPU, host=host)
        assert pack.offloaded is not None
        q, k, v = (each[0].transpose(0, 1) for each in tokens_of(rows, 2, torch.Generator()))
        answer = host.begin(3, pack.offloaded, q, k, v, scale=None, window=None)
        assert not arena.view(3, where, 0)[0].any()  # this thread was not held up: nothing has arrived
        bus.arrives.set()
        torch.testing.assert_close(answer.get()[:, 0], v[:, 0])  # a first token sees itself alone
        assert arena.view(3, where, 0)[0].any()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("no"), RuntimeError, "in host memory of block 4: ValueError: no"),
        (MemoryError("full"), MemoryError, "in host memory of block 4: full"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_failure_on_the_host_is_one_of_its_pack_by_block_and_of_no_other(
    error: Exception, kind: type[Exception], words: str, count: int
) -> None:
    rows, where, arena = a_pack(rows=[RowSpan(0, 0, count), RowSpan(1, 0, count)])
    bus = BrokenBus()
    with hosting(arena, bus) as host:
        pack = PackedAttention(rows, where, arena, device=CPU, host=host)
        tensors = tokens_of(rows, 2, torch.Generator())
        pack.attend(3, *tensors, scale=None)
        bus.error = error
        with pytest.raises(kind, match=words), host:  # chunks alone are stored while the pack goes on
            pack.attend(4, *tensors, scale=None)
        bus.error = None
        whole = PackedAttention(rows, where, make_arena(arena.tiers, 0, 2), device=CPU)
        got, wanted = (one.attend(4, *tensors, scale=None) for one in (pack, whole))
        torch.testing.assert_close(got, wanted)


def test_the_host_s_thread_ends_with_its_owner() -> None:
    rows, where, arena = a_pack()

    def names() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("host-attention")]

    host = HostAttention(arena, LateBus())
    PackedAttention(rows, where, arena, device=CPU, host=host).attend(
        3, *tokens_of(rows, 2, torch.Generator()), scale=None
    )
    (thread,) = (one for one in threading.enumerate() if one.name.startswith("host-attention"))
    del host
    thread.join(10)
    assert not names()
