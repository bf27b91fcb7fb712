"""Trees that grow level by level are those of the most probable paths."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from bbquic.draft.growth import Growth
from bbquic.draft.tree import DraftTree, grow


def guesses_at(path: tuple[int, ...], seed: int, width: int) -> list[tuple[int, float]]:
    """Some probabilities, the same for the same path, no two of them equal; the likeliest first."""
    source = random.Random(f"{seed} {path}")
    drawn = sorted((source.random() for _ in range(width)), reverse=True)
    return [(token, chance / (sum(drawn) or 1.0)) for token, chance in enumerate(drawn)]


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Each node's tokens from the root, and its weight."""
    found: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        found.append((*found[parent], token))
    return dict(zip(found, tree.weights, strict=True))


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    guesses=st.integers(1, 20),
    depth=st.integers(1, 6),
)
def test_a_tree_grown_by_levels_has_the_most_probable_paths_and_never_lacks_a_cell(
    seed: int, width: int, guesses: int, depth: int
) -> None:
    growth = Growth(7, guesses, depth, range(50, 50 + guesses))
    known: dict[int, tuple[int, ...]] = {0: ()}
    nodes = [0]
    while nodes:
        for node in nodes:
            growth.add(node, guesses_at(known[node], seed, width)[:guesses])
        nodes = growth.expand()
        for node in nodes:
            cells = growth.path(node)
            assert len(set(cells)) == len(cells) == growth.depth(node)
            assert all(50 <= cell < 50 + guesses for cell in cells)
            known[node] = (*known[growth.parent(node)], growth.token(node))
    tree, chances = growth.tree()
    expected = grow(7, lambda path: guesses_at(path, seed, width), guesses, depth)
    assert paths(tree) == paths(expected)
    for node in range(1, len(tree.tokens)):
        assert tree.weights[node] == tree.weights[tree.parents[node]] * min(1.0, chances[node])
