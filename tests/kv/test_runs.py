"""Attention over holes, trees, windows and tiers, against every token alone over what its ancestors are."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.kv.attention import PackedAttention
from bbquic.kv.ranges import SlotRange, Strip, Tiers
from bbquic.kv.rows import Layout, RowSpan, positions
from bbquic.kv.slab import Arena

HEAD_DIM, CAPACITY = 4, 32
CPU = torch.device("cpu")

Token = tuple[torch.Tensor, torch.Tensor, int]  # its key and value [kv_heads, HEAD_DIM], its position


def alone(q: torch.Tensor, position: int, seen: list[Token], window: int | None) -> torch.Tensor:
    """The oracle: attention of one query [heads, HEAD_DIM], head by head, over the tokens it may see."""
    kept = [token for token in seen if window is None or token[2] > position - window]
    keys, values = torch.stack([k for k, _, _ in kept], 1), torch.stack([v for _, v, _ in kept], 1)
    group = len(q) // len(keys)
    weights = [torch.softmax(keys[h // group] @ q[h] / math.sqrt(HEAD_DIM), 0) for h in range(len(q))]
    return torch.stack([weights[h] @ values[h // group] for h in range(len(q))])


@st.composite
def row_in(draw: st.DrawFn, slot: int) -> RowSpan:
    """A row anywhere in its slot: its tokens, and those of before, in cells that are drawn."""
    count = draw(st.integers(1, 6))
    compact = draw(st.integers(0, CAPACITY - count))
    if draw(st.booleans()):
        return RowSpan(slot, compact, count)
    start = draw(st.integers(compact, CAPACITY - count))
    free = [cell for cell in range(compact, CAPACITY) if not start <= cell < start + count]
    tail = tuple(draw(st.lists(st.sampled_from(free), unique=True, max_size=5))) if free else ()
    parents = None
    if draw(st.booleans()):
        parents = (0, *(draw(st.integers(0, node - 1)) for node in range(1, count)))
    return RowSpan(slot, compact + len(tail), count, Layout(compact, start, tail, parents))


@settings(max_examples=100)
@given(
    data=st.data(),
    strips=st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)]),
    window=st.sampled_from([None, None, 1, 3, 17]),
    seed=st.integers(0, 2**31),
)
def test_each_token_attends_to_its_ancestors_within_the_window_wherever_they_lie(
    data: st.DataObject, strips: list[int], heads: tuple[int, int], window: int | None, seed: int
) -> None:
    sizes = [CAPACITY * slots for slots in strips]
    where = SlotRange(tuple(Strip(sum(sizes[:tier]), slots) for tier, slots in enumerate(strips)), CAPACITY)
    arena = Arena(
        blocks=range(2, 3),
        tiers=Tiers(tuple(sizes)),
        on_host=data.draw(st.integers(0, len(strips))),
        kv_heads=heads[1],
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=CPU,
    )
    torch.manual_seed(seed)
    for tier in range(len(strips)):
        for store in arena.view(2, where, tier):
            store.normal_()  # what lies in holes must not be seen
    slots = data.draw(st.lists(st.sampled_from(list(where.slots())), min_size=1, unique=True))
    rows = [data.draw(row_in(slot)) for slot in slots]
    total = sum(row.count for row in rows)
    q = torch.randn(1, heads[0], total, HEAD_DIM)
    k, v = torch.randn(2, 1, heads[1], total, HEAD_DIM)
    before = {
        row.slot: [
            (keys[where.place(row.slot), :, cell].clone(), values[where.place(row.slot), :, cell].clone(), at)
            for at, cell in enumerate([*range(row.compact), *row.tail])
        ]
        for row in rows
        for keys, values in [arena.view(2, where, where.tier(row.slot))]
    }
    attention = PackedAttention(rows, where, arena, device=CPU)
    got = attention.attend(2, q, k, v, scale=None, window=window)[0]
    place, at = 0, positions(rows).tolist()
    for row in rows:
        for token in range(row.count):
            line = [token]
            while line[-1] != 0:
                line.append(line[-1] - 1 if row.parents is None else row.parents[line[-1]])
            assert at[place + token] == row.first + len(line) - 1
            own = [(k[0, :, place + one], v[0, :, place + one], at[place + one]) for one in line]
            expected = alone(q[0, :, place + token], at[place + token], before[row.slot] + own, window)
            torch.testing.assert_close(got[place + token], expected, atol=1e-5, rtol=1e-5)
        place += row.count
