"""Trees whose levels come one by one attend as trees that come whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.kv.attention import PackedAttention
from bbquic.kv.frontier import Frontier, FrontierAttention
from bbquic.kv.ranges import SlotRange, Tiers
from bbquic.kv.rows import Layout, RowSpan, depths
from bbquic.kv.slab import Arena

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
CAPACITY = 32
CPU = torch.device("cpu")
TREES = st.integers(1, 6).flatmap(
    lambda count: st.tuples(*(st.integers(0, max(0, node - 1)) for node in range(count)))
)


def arena_with(where: SlotRange, seed: int) -> Arena:
    """One whose cells hold what the same seed always puts there."""
    arena = Arena(
        blocks=range(1),
        tiers=Tiers((where.span(0).stop,)),
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=CPU,
    )
    generator = torch.Generator().manual_seed(seed)
    for store in arena.view(0, where):
        store.copy_(torch.randn(store.shape, generator=generator))
    return arena


def path_to(node: int, parents: Sequence[int], cell: dict[int, int]) -> tuple[int, ...]:
    path = [cell[node]]
    while node:
        node = parents[node]
        path.append(cell[node])
    return tuple(reversed(path))


@settings(max_examples=40)
@given(
    rows=st.dictionaries(st.integers(0, 4), st.tuples(st.integers(1, 9), TREES), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 12),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_levels_one_by_one_attend_as_the_whole_tree(
    rows: dict[int, tuple[int, tuple[int, ...]]], window: int | None, seed: int, data: st.DataObject
) -> None:
    where = SlotRange.of(0, 5, CAPACITY)
    rows = dict(sorted(rows.items()))
    spans = [RowSpan(s, n, len(tree), Layout(n, n, (), tree)) for s, (n, tree) in rows.items()]
    total = sum(span.count for span in spans)
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(1, HEADS, total, HEAD_DIM, generator=generator)
    k, v = (torch.randn(1, KV_HEADS, total, HEAD_DIM, generator=generator) for _ in "kv")
    whole = PackedAttention(spans, where, arena_with(where, seed), device=CPU)
    expected = whole.attend(0, q, k, v, scale=None, window=window)[0]

    arena = arena_with(where, seed)
    first = dict(
        zip(rows, torch.tensor([0, *(span.count for span in spans)]).cumsum(0).tolist(), strict=False)
    )
    cells = {
        s: dict(enumerate(data.draw(st.permutations(range(n, n + len(tree))))))  # in any free cells
        for s, (n, tree) in rows.items()
    }
    for depth in range(6):
        level = {s: [i for i, d in enumerate(depths(tree)) if d == depth] for s, (_, tree) in rows.items()}
        level = {s: nodes for s, nodes in level.items() if nodes}
        if not level:
            break
        frontiers = [
            Frontier(s, rows[s][0], tuple(path_to(i, rows[s][1], cells[s]) for i in nodes))
            for s, nodes in level.items()
        ]
        places = [first[s] + i for s, nodes in level.items() for i in nodes]
        attention = FrontierAttention(frontiers, where, arena)
        found = attention.attend(
            0, q[:, :, places], k[:, :, places], v[:, :, places], scale=None, window=window
        )[0]
        torch.testing.assert_close(found, expected[places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "row",
    [
        Frontier(9, 3, ((3,),)),
        Frontier(0, 3, ()),
        Frontier(0, 3, ((),)),
        Frontier(0, 3, ((2,),)),
        Frontier(0, 3, ((3, 3),)),
        Frontier(0, 3, ((3, CAPACITY),)),
    ],
)
def test_a_path_outside_its_slots_free_cells_is_refused(row: Frontier) -> None:
    where = SlotRange.of(0, 2, CAPACITY)
    with pytest.raises(ValueError, match="is not"):
        FrontierAttention([row], where, arena_with(where, 0))


def test_two_frontiers_of_one_slot_are_refused() -> None:
    where = SlotRange.of(0, 2, CAPACITY)
    with pytest.raises(ValueError, match="rising slots"):
        FrontierAttention([Frontier(0, 3, ((3,),)), Frontier(0, 3, ((4,),))], where, arena_with(where, 0))
