"""Attention over packed rows against attention for each sequence alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.kv.attention import PackedAttention, packed_attention
from bbquic.kv.ranges import SlotCopy, SlotRange, Tiers
from bbquic.kv.rows import RowSpan
from bbquic.kv.slab import Arena, bytes_per_cell

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
CPU = torch.device("cpu")


def make_arena(cells: int) -> Arena:
    return Arena(
        blocks=range(3, 5),
        tiers=Tiers((cells,)),
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=CPU,
    )


class Alone:
    """The oracle: every sequence keeps all its tokens, and attention is written out for one at a time."""

    def __init__(self) -> None:
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.values: dict[int, list[torch.Tensor]] = {}

    def attend(self, slot: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [heads, HEAD_DIM], k and v [kv_heads, HEAD_DIM] of one new token; gives [heads, HEAD_DIM]."""
        self.keys.setdefault(slot, []).append(k)
        self.values.setdefault(slot, []).append(v)
        keys, values = torch.stack(self.keys[slot], 1), torch.stack(self.values[slot], 1)
        group = HEADS // KV_HEADS
        out = []
        for head in range(HEADS):
            weights = torch.softmax(keys[head // group] @ q[head] / math.sqrt(HEAD_DIM), 0)
            out.append(weights @ values[head // group])
        return torch.stack(out)


@settings(max_examples=40)
@given(data=st.data(), slots=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_packed_rows_attend_as_each_sequence_alone(data: st.DataObject, slots: int, seed: int) -> None:
    capacity = 32
    where = SlotRange.of(16, slots, capacity)
    arena, alone = make_arena(where.span(0).stop), Alone()
    generator = torch.Generator().manual_seed(seed)
    lengths = [0] * slots
    for _ in range(4):
        rows = []
        for slot in data.draw(st.permutations(range(slots))):
            count = data.draw(st.integers(0, min(5, capacity - lengths[slot])))
            if count:
                rows.append(RowSpan(slot, lengths[slot], count))
                lengths[slot] += count
        if not rows:
            continue
        total = sum(row.count for row in rows)
        q = torch.randn(1, HEADS, total, HEAD_DIM, generator=generator)
        k = torch.randn(1, KV_HEADS, total, HEAD_DIM, generator=generator)
        v = torch.randn(1, KV_HEADS, total, HEAD_DIM, generator=generator)
        got = PackedAttention(rows, where, arena, device=CPU).attend(4, q, k, v, scale=None)
        place = 0
        for row in rows:
            for _ in range(row.count):
                expected = alone.attend(row.slot, q[0, :, place], k[0, :, place], v[0, :, place])
                torch.testing.assert_close(got[0, place], expected, atol=1e-5, rtol=1e-5)
                place += 1


def test_blocks_and_ranges_do_not_share_cells() -> None:
    arena = make_arena(64)
    keys, _ = arena.view(3, SlotRange.of(0, 2, 16))
    keys.fill_(1.0)
    assert arena.view(4, SlotRange.of(0, 2, 16))[0].count_nonzero() == 0
    assert arena.view(3, SlotRange.of(32, 2, 16))[0].count_nonzero() == 0
    assert arena.view(3, SlotRange.of(0, 1, 32))[0].count_nonzero() == 32 * KV_HEADS * HEAD_DIM


def test_an_arena_weighs_what_its_cells_weigh() -> None:
    cell = bytes_per_cell(kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    assert make_arena(100).nbytes == 100 * 2 * cell


@pytest.mark.parametrize(
    "row", [RowSpan(2, 0, 1), RowSpan(0, 15, 2), RowSpan(0, -1, 1), RowSpan(0, 0, 0), RowSpan(0, 16, 1)]
)
def test_a_row_outside_its_slot_is_refused(row: RowSpan) -> None:
    with pytest.raises(ValueError, match="RowSpan"):
        PackedAttention([row], SlotRange.of(0, 2, 16), make_arena(64), device=CPU)


def test_a_range_behind_the_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="cells"):
        make_arena(64).view(3, SlotRange.of(48, 2, 16))


@pytest.mark.parametrize("asked", ["s_aux", "softcap"])
def test_attention_of_another_kind_is_refused_rather_than_ignored(asked: str) -> None:
    tensor = torch.zeros(1, 1, 1, 4)
    rows = PackedAttention([RowSpan(0, 0, 1)], SlotRange.of(0, 1, 16), make_arena(16), device=CPU)
    more: dict[str, Any] = {asked: 30.0}
    with pytest.raises(ValueError, match=asked):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, None, rows=rows, **more)


def test_a_copied_slot_is_the_slot_in_every_block_and_nothing_else_changes() -> None:
    source, target = SlotRange.of(16, 3, 20), SlotRange.of(80, 2, 48)
    arena = make_arena(target.span(0).stop)
    generator = torch.Generator().manual_seed(1)
    for block in arena.blocks:
        for where in (source, target):
            for store in arena.view(block, where):
                store.copy_(torch.randn(store.shape, generator=generator))
    before = [[store.clone() for store in arena.view(block, target)] for block in arena.blocks]
    arena.copy(SlotCopy(source, 2, target, 1, 17))
    for block, held in zip(arena.blocks, before, strict=True):
        for old, now, origin in zip(held, arena.view(block, target), arena.view(block, source), strict=True):
            assert torch.equal(now[1, :, :17], origin[2, :, :17])
            assert torch.equal(now[1, :, 17:], old[1, :, 17:])
            assert torch.equal(now[0], old[0])
    with pytest.raises(ValueError, match="not within the arena"):
        arena.copy(SlotCopy(source, 0, SlotRange.of(80, 3, 48), 0, 1))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((SlotRange.of(0, 2, 16), 2, SlotRange.of(32, 2, 16), 0, 1), id="no such source"),
        pytest.param((SlotRange.of(0, 2, 16), 0, SlotRange.of(32, 2, 16), 2, 1), id="no such target"),
        pytest.param((SlotRange.of(0, 2, 16), 0, SlotRange.of(32, 2, 8), 0, 9), id="longer than the target"),
        pytest.param((SlotRange.of(0, 2, 16), 0, SlotRange.of(32, 2, 16), 0, 0), id="nothing"),
        pytest.param((SlotRange.of(0, 2, 16), 1, SlotRange.of(16, 2, 16), 0, 1), id="to where it is"),
        pytest.param((SlotRange.of(0, 2, 16), 1, SlotRange.of(24, 2, 16), 0, 1), id="slots that overlap"),
    ],
)
def test_a_copy_that_is_none_cannot_be_made(wrong: tuple[SlotRange, int, SlotRange, int, int]) -> None:
    with pytest.raises(ValueError, match="not a copy"):
        SlotCopy(*wrong)
