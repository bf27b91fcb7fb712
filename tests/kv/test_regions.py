"""Where a slot's tokens lie, and that room for them is found."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.kv.regions import Drafts, Regions

FAN = Drafts(8, (0, 2, 3, 7), (0, 0, 2, 0))  # 0 has the children 2 and 7, 2 has 3


def test_what_is_accepted_joins_the_tokens_and_the_rest_is_a_hole() -> None:
    regions = Regions(5, (6,), FAN).accepted((0, 2, 3))
    assert regions == Regions(5, (6, 8, 9, 10))
    assert (regions.length, regions.end) == (9, 11)
    assert Regions(8, (), FAN).accepted((0, 7)) == Regions(9, (11,)), "what is in its place is compact"
    assert Regions(8, (), FAN).accepted((0, 2, 3)) == Regions(11)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        pytest.param((), "root", id="nothing"),
        pytest.param((2, 3), "root", id="not from the root"),
        pytest.param((0, 1), "node 1 is not held", id="a node that was pruned"),
        pytest.param((0, 3), "node 3 is not a child of node 0", id="a node left out"),
        pytest.param((0, 2, 7), "node 7 is not a child of node 2", id="a brother"),
    ],
)
def test_what_is_no_path_of_the_tree_is_not_accepted(path: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Regions(5, (6,), FAN).accepted(path)
    with pytest.raises(ValueError, match="no tree"):
        Regions(5, (6,)).accepted(path)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int], bool]]]:
    """Rows of at most so many tokens: how many, which nodes are accepted, and whether it is a tree."""
    most = draw(st.integers(1, 6))
    made = []
    for _ in range(draw(st.integers(1, 12))):
        count = draw(st.integers(1, most))
        further = draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
        made.append((count, [0, *sorted(further)], draw(st.booleans())))
    return most, made


@given(rounds(), st.booleans(), st.integers(0, 20))
def test_cells_are_never_shared_and_three_times_the_largest_row_is_room_enough(
    given_rounds: tuple[int, list[tuple[int, list[int], bool]]], compacts: bool, begun: int
) -> None:
    most, rows = given_rounds
    regions = Regions(begun)
    content = dict(enumerate(range(begun)))  # cell: which token lies there
    for count, accepted, is_tree in rows:
        first = regions.length
        start = regions.place(count, first + 3 * most if compacts else 10_000)
        assert start is not None, "a place is lacking"
        cells = range(start, start + count)
        assert min(cells) >= first, "what the tail would be moved to is free"
        assert not set(cells) & {*range(regions.compact), *regions.tail}
        if is_tree:
            nodes, parents = tuple(range(count)), [0] * count
            for parent, node in pairwise(accepted):
                parents[node] = parent
            regions = regions.drafted(start, nodes, tuple(parents))
        else:
            regions = regions.appended(start, count)
            content |= {cell: first + place for place, cell in enumerate(cells)}
        if compacts:
            regions, sources, target = regions.compacted()
            content |= {target + place: content[cell] for place, cell in enumerate(sources)}
        if is_tree:
            assert regions.drafts is not None
            squeezed, sources, target = regions.squeezed()
            assert squeezed.end == squeezed.length + count
            assert len(sources) in (0, squeezed.end - target)
            content |= {cells[node]: first + depth for depth, node in enumerate(accepted)}
            regions = regions.accepted(accepted)
        held = [content[cell] for cell in (*range(regions.compact), *regions.tail)]
        assert held == list(range(regions.length))
        assert regions.end > max(held, default=0) - 1
