"""Trees of guesses: their order, their weights, what is kept of them, and which guesses were right."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.draft.tree import DraftTree, grow
from bbquic.draft.verify import verify

Model = dict[tuple[int, ...], list[tuple[int, float]]]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """What a draft model with three tokens says behind each path of up to four."""
    found: Model = {}
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 12))):
        path = draw(st.sampled_from(paths))
        if path in found or len(path) > 3:
            continue
        shares = draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3))
        total = max(1.0, sum(shares))
        found[path] = [(token, share / total) for token, share in enumerate(shares)]
        paths += [(*path, token) for token, _ in found[path]]
    return found


def all_paths(model: Model, depth: int) -> dict[tuple[int, ...], float]:
    """Every path and its probability."""
    weights: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(depth):
        for path in [one for one in weights if len(one) == length]:
            for token, share in model.get(path, []):
                weights[(*path, token)] = weights[path] * share
    return weights


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


@given(model=models(), guesses=st.integers(0, 10), depth=st.integers(0, 4))
def test_a_tree_grows_by_the_most_probable_paths(model: Model, guesses: int, depth: int) -> None:
    tree = grow(7, lambda path: model.get(path, []), guesses, depth)
    paths, every = paths_of(tree), all_paths(model, depth)
    assert tree.tokens[0] == 7
    assert len(tree.tokens) == min(guesses, len(every) - 1) + 1
    assert tree.weights == pytest.approx([every[path] for path in paths])
    best = sorted(every.values(), reverse=True)[: len(paths)]
    assert sorted(tree.weights, reverse=True) == pytest.approx(best)
    assert tree.depths == tuple(len(path) for path in paths)


@given(model=models(), guesses=st.integers(0, 10), keep=st.integers(0, 10))
def test_what_is_kept_of_a_tree_is_a_tree_of_its_heaviest_nodes(
    model: Model, guesses: int, keep: int
) -> None:
    tree = grow(7, lambda path: model.get(path, []), guesses, 4)
    nodes = tree.heaviest(keep)
    assert nodes == tuple(sorted(set(nodes)))
    assert len(nodes) == min(keep, tree.guesses) + 1
    assert all(tree.parents[node] in nodes for node in nodes)
    others = [weight for node, weight in enumerate(tree.weights) if node not in nodes]
    assert max(others, default=0.0) <= min(tree.weights[node] for node in nodes)


@given(model=models(), said=st.lists(st.integers(0, 3), min_size=5, max_size=5), data=st.data())
def test_guesses_are_accepted_as_far_as_they_are_what_is_said(
    model: Model, said: list[int], data: st.DataObject
) -> None:
    """Whatever is pruned: `tokens` are what is said, and the path is the longest that the tree has of it."""
    tree = grow(7, lambda path: model.get(path, []), 10, 4)
    nodes = tree.heaviest(data.draw(st.integers(0, 10)))
    depths, asked = tree.depths, []

    def chosen(place: int) -> int:
        asked.append(nodes[place])
        return said[depths[nodes[place]]]

    verdict = verify(nodes, [tree.parents[n] for n in nodes], [tree.tokens[n] for n in nodes], chosen)
    assert verdict.tokens == tuple(said[: len(verdict.path)])
    assert tuple(asked) == verdict.path
    assert all(tree.parents[child] == parent for parent, child in pairwise(verdict.path))
    held = {paths_of(tree)[node] for node in nodes}
    assert tuple(said[: len(verdict.path) - 1]) in held
    assert verdict.tokens not in held


@pytest.mark.parametrize(
    ("tokens", "parents", "weights"),
    [
        pytest.param((), (), (), id="without a root"),
        pytest.param((1, 2), (0,), (1.0, 0.5), id="without a parent"),
        pytest.param((1, 2), (0, 1), (1.0, 0.5), id="its own parent"),
        pytest.param((1, 2), (0, 0), (1.0, 1.5), id="heavier than its parent"),
        pytest.param((1, 2, 2), (0, 0, 0), (1.0, 0.5, 0.5), id="twins"),
    ],
)
def test_what_is_no_tree_cannot_be_made(
    tokens: tuple[int, ...], parents: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=r"node|root"):
        DraftTree(tokens, parents, weights)
