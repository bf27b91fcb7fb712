"""Attention of rows whose keys and values lie in host memory, beside the device's own.

Decode and tree rows: their q and their new k and v go down, a thread of the host stores and attends, and
the output goes up again, while the device attends to its own rows. A prompt's chunk is attended to on the
device, over its own keys and, from its second chunk on, over the earlier ones, brought up into a scratch of
one slot; its k and v go down to be stored.

What keeps this right is an order:

* Of the arena's host tiers only the host's thread reads and writes while a pack is computed, in the order in
  which it was asked. So a read sees every write before it, whichever block or pack that was of.
* It begins a block when the rows of that block have arrived: when an event has passed that is recorded
  behind their copy. The copy stream waits for the compute stream, so then the compute stream has passed
  everything before it too, the uploads of the block before among them. Hence one buffer for answers does.
* A block is asked for only when the one before is done with (`settle`), so one buffer for rows does.
* `Arena.copy` waits for the device where one end is in host memory, and comes between packs, when no work
  is asked for: a pack is settled at its end.
* Compaction moves a block's cells behind its attention, and the next pack waits for that before it asks for
  the block. What may be stored meanwhile, a chunk, lies behind all cells that are moved or moved to.

Where the device is a CPU, host memory is the device's own: such rows are computed like all others, in line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from bbquic.kv.ranges import SlotRange
from bbquic.kv.runs import Run
from bbquic.kv.slab import Arena

Told = Callable[[float, float], None]


class Arrival(Protocol):
    """Tensors on their way to host memory."""

    def wait(self) -> list[torch.Tensor]:
        """Them, once they are there; from any thread, which sleeps."""


class Sent(Protocol):
    """A tensor on its way to the device."""

    tensor: torch.Tensor  # there, for whatever is asked of the compute stream from now on

    def wait(self) -> None:
        """Until what it was sent from may be written again; from any thread, which sleeps."""


class Bus(Protocol):
    """Between the device and host memory. All but the waits are called by the thread that computes."""

    def down(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        """Copy tensors of the device, as the compute stream will have made them, to the buffer of rows."""

    def answers(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Room in the buffer of answers; what it had before is given up."""

    def up(self, tensor: torch.Tensor) -> Sent:
        """Copy a tensor of the buffer of answers to the device."""


@dataclass(frozen=True, slots=True)
class OffloadedChunk:
    """A row of a prompt in a slot that lies in host memory."""

    host: Run  # stores there
    near: Run  # stores and attends on the device, in a strip of one slot
    earlier: int  # cells from 0 on that hold all it sees but itself

    @classmethod
    def of(cls, run: Run, capacity: int, device: torch.device) -> OffloadedChunk:
        (row,) = run.rows
        near = Run([replace(row, slot=0)], run.tokens, SlotRange.of(0, 1, capacity), device)
        return cls(run, near, max(row.compact, *(cell + 1 for cell in row.tail), 0))


@dataclass(frozen=True, slots=True)
class OffloadedRows:
    """The rows of a pack that lie in host memory: those the host attends to, and chunks."""

    where: SlotRange
    runs: tuple[Run, ...]
    chunks: tuple[OffloadedChunk, ...]

    @classmethod
    def of(cls, runs: Sequence[Run], where: SlotRange, device: torch.device) -> OffloadedRows:
        """`runs` have their tensors in host memory."""
        attending = tuple(run for run in runs if not _is_chunk(run))
        chunks = (OffloadedChunk.of(run, where.capacity, device) for run in runs if _is_chunk(run))
        return cls(where, attending, tuple(chunks))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is held on the device."""
        return [tensor for chunk in self.chunks for tensor in chunk.near.tensors]

    def prepare(self) -> None:
        """Make the masks without a window, so that no block has to."""
        for run in (*self.runs, *(chunk.near for chunk in self.chunks)):
            run.prepare()


def _is_chunk(run: Run) -> bool:
    return len(run.rows) == 1 and run.width > 1 and run.rows[0].parents is None


class HostAttention:
    """A stage's: one thread, which ends with `close` or with the object.

    A failure in the thread is raised where its work is waited for: in the pack it belongs to.
    """

    def __init__(self, arena: Arena, bus: Bus, told: Told | None = None) -> None:
        """`told` hears, in the host's thread, when attention of a block began and ended (time.monotonic)."""
        self._arena = arena
        self._bus = bus
        self._told = told
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-attention")
        self._asked: Future[None] | None = None  # nobody has waited for it yet
        self._scratch: torch.Tensor | None = None  # values on the device, as many as the largest slot so far

    def begin(
        self,
        block: int,
        rows: OffloadedRows,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> Answer:
        """Have the host begin with a block's rows: q `[T, heads, head_dim]` of those rows, k and v likewise.

        Raises: MemoryError or RuntimeError, naming the block, where the one before failed.
        """
        self.settle()
        tensors = [each[run.tokens] for run in rows.runs for each in (q, k, v)]
        tensors += [each[chunk.host.tokens] for chunk in rows.chunks for each in (k, v)]
        room = self._bus.answers([q[run.tokens].shape for run in rows.runs], q.dtype)
        work = _Work(self._arena, block, rows, self._bus.down(tensors), room, scale, window)
        self._ask(block, lambda: work.do(self._told))
        return Answer(self, work, q, k, v)

    def settle(self) -> None:
        """Wait until the host has done all it was asked for. Raises: as `begin`."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.result()

    def __enter__(self) -> Self:
        """Around a pack's blocks: at their end the pack is settled, whatever became of it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    def close(self) -> None:
        """End the thread. What it was asked for and has not begun is not done."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self, block: int, work: Callable[[], None]) -> None:
        self._asked = self._thread.submit(_named, block, work)

    def _earlier(self, work: _Work, chunk: OffloadedChunk, after: Sent | None) -> tuple[Sent, Sent]:
        """A chunk's earlier keys and values `[kv_heads, earlier, head_dim]`, on the device; the buffer of
        answers may be written once `after` has been sent."""
        keys, values = self._arena.view(work.block, work.rows.where, chunk.host.tier)
        pair = [store[chunk.host.slots.start, :, : chunk.earlier] for store in (keys, values)]
        room = self._bus.answers([each.shape for each in pair], keys.dtype)

        def fetch() -> None:
            if after is not None:
                after.wait()
            for target, source in zip(room, pair, strict=True):
                target.copy_(source)

        self.settle()
        self._ask(work.block, fetch)
        self.settle()
        return self._bus.up(room[0]), self._bus.up(room[1])

    def _strip(self, k: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scratch as a strip of one slot, `[1, kv_heads, capacity, head_dim]` of keys and of values.
        What is in it nobody needs any more, and it is finite."""
        shape = (2, 1, k.shape[1], capacity, k.shape[2])
        count = torch.Size(shape).numel()
        if self._scratch is None or self._scratch.numel() < count:
            self._scratch = torch.zeros(count, dtype=k.dtype, device=k.device)
        keys, values = self._scratch[:count].view(shape)
        return keys, values


@dataclass(slots=True)
class Answer:
    """A block's attention of offloaded rows, under way."""

    _host: HostAttention
    _work: _Work
    _q: torch.Tensor
    _k: torch.Tensor
    _v: torch.Tensor

    def get(self) -> torch.Tensor:
        """It, `[T, heads, head_dim]` as q was; to be called when the device has been asked for its own rows.

        The thread sleeps until the host is done where the host attends or has earlier keys; chunks alone
        are stored while this one goes on. Raises: as `begin`.
        """
        rows, last = self._work.rows, None
        out = torch.empty_like(self._q, memory_format=torch.contiguous_format)
        if rows.runs:
            self._host.settle()
        for run, answer in zip(rows.runs, self._work.answers, strict=True):
            last = self._host._bus.up(answer)
            out[run.tokens] = last.tensor
        for chunk in rows.chunks:
            last = self._chunk(chunk, out, last)
        return out

    def _chunk(self, chunk: OffloadedChunk, out: torch.Tensor, last: Sent | None) -> Sent | None:
        q, k, v = (each[chunk.near.tokens] for each in (self._q, self._k, self._v))
        keys, values = self._host._strip(k, self._work.rows.where.capacity)
        if chunk.earlier:
            above, last = self._host._earlier(self._work, chunk, last)
            keys[0, :, : chunk.earlier] = above.tensor
            values[0, :, : chunk.earlier] = last.tensor
        chunk.near.store(k, v, keys, values)
        work = self._work
        out[chunk.near.tokens] = chunk.near.attend(q, keys, values, scale=work.scale, window=work.window)
        return last


@dataclass(slots=True)
class _Work:
    """What the host does of a block."""

    arena: Arena
    block: int
    rows: OffloadedRows
    arrival: Arrival
    answers: list[torch.Tensor]  # of each run, to be filled: [tokens, heads, head_dim]
    scale: float | None
    window: int | None

    def do(self, told: Told | None) -> None:
        parts = self.arrival.wait()
        began = time.monotonic()
        place = 0
        for run, answer in zip(self.rows.runs, self.answers, strict=True):
            q, k, v = parts[place : place + 3]
            keys, values = self.arena.view(self.block, self.rows.where, run.tier)
            run.store(k, v, keys, values)
            answer.copy_(run.attend(q, keys, values, scale=self.scale, window=self.window))
            place += 3
        if told is not None and self.rows.runs:
            told(began, time.monotonic())
        for chunk in self.rows.chunks:
            keys, values = self.arena.view(self.block, self.rows.where, chunk.host.tier)
            k, v = parts[place : place + 2]
            chunk.host.store(k, v, keys, values)
            place += 2


def _named(block: int, work: Callable[[], None]) -> None:
    """In the host's thread: do it, with the block's name on what goes wrong."""
    try:
        with torch.inference_mode():
            work()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryError(f"attention in host memory of block {block}: {error}") from error
    except Exception as error:
        message = f"attention in host memory of block {block}: {type(error).__name__}: {error}"
        raise RuntimeError(message) from error


def host_attention(arena: Arena, told: Told | None = None) -> HostAttention | None:
    """What computes an arena's rows in host memory; None where there are none, or it is the device's own."""
    if arena.device.type != "cuda" or not arena.host_bytes:
        return None
    return HostAttention(arena, CudaBus(arena.device), told)


class CudaBus:
    """A copy stream down and the compute stream up, through two pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self._copies: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._rows, self._answers = _Pinned(), _Pinned()

    def down(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        made = _event()
        room = self._rows.take(flat.numel(), flat.dtype)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(made)
            room.copy_(flat, non_blocking=True)
            flat.record_stream(self._copies)
            return _CudaArrival(_event(), _split(room, [tensor.shape for tensor in tensors]))

    def answers(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        return _split(self._answers.take(sum(map(_values, shapes)), dtype), shapes)

    def up(self, tensor: torch.Tensor) -> Sent:
        device = self._copies.device
        return _CudaSent(tensor.to(device, non_blocking=True), _event())


@dataclass(frozen=True, slots=True)
class _CudaArrival:
    event: torch.cuda.Event
    tensors: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        self.event.synchronize()
        return self.tensors


@dataclass(slots=True)
class _CudaSent:
    tensor: torch.Tensor
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


class _Pinned:
    """A buffer of pinned memory that grows. What still reads an outgrown one keeps it: torch's own pool of
    pinned memory knows which copies are under way."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, values: int, dtype: torch.dtype) -> torch.Tensor:
        size = values * dtype.itemsize
        if size > self._bytes.numel():
            room = 1 << (size - 1).bit_length()
            self._bytes = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        return self._bytes[:size].view(dtype)


def _values(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _split(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of a flat tensor, one behind the other."""
    parts = torch.split(flat, [_values(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _event() -> torch.cuda.Event:
    """Recorded on the current stream. A thread that waits for it sleeps in place of spinning."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
