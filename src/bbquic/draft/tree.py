"""Draft trees: what may come after a sequence's newest token, each guess with the probability of its path."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

Guesses = Sequence[tuple[int, float]]  # tokens and their probabilities, given the path that leads there


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in an order in which a parent comes before its children.

    tokens: [n], node 0 is the root: the newest committed token, which is no guess.
    parents: [n], of each node; the root is its own.
    weights: [n], the draft's probability of each node's path; 1 at the root, never larger than the parent's.
    Raises: ValueError when they make no such tree, or when siblings are of one token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if not count or len(self.parents) != count or len(self.weights) != count or self.parents[0] != 0:
            raise ValueError("a tree has a root, and a token, a parent and a weight for each node")
        for node in range(1, count):
            parent = self.parents[node]
            if not 0 <= parent < node or not 0 <= self.weights[node] <= self.weights[parent]:
                raise ValueError(f"node {node} of a tree comes before its parent or outweighs it")
        if len({(p, t) for p, t in zip(self.parents[1:], self.tokens[1:], strict=True)}) < count - 1:
            raise ValueError("two children of a node are the same token")

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """No guess at all."""
        return cls((token,), (0,), (1.0,))

    @property
    def guesses(self) -> int:
        """Nodes beside the root."""
        return len(self.tokens) - 1

    @property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root, by node: a node's position is the root's and its depth."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        return self.parents[1:] == tuple(range(self.guesses))

    def heaviest(self, guesses: int) -> tuple[int, ...]:
        """Ids of the root and the `guesses` heaviest others, ascending; with a node its ancestors.

        Of equal weights the earlier node is kept, which is never a child of a later one.
        """
        others = sorted(range(1, len(self.tokens)), key=lambda node: (-self.weights[node], node))
        return tuple(sorted([0, *others[:guesses]]))

    def above(self, weight: float) -> tuple[int, ...]:
        """Ids of the root and of the nodes of at least this weight, ascending; with a node its ancestors."""
        return tuple(node for node, own in enumerate(self.weights) if node == 0 or own >= weight)

    def only(self, nodes: Collection[int]) -> DraftTree:
        """The tree of these nodes, numbered anew. Raises: ValueError where one's parent is missing."""
        kept = sorted(nodes)
        number = {node: place for place, node in enumerate(kept)}
        if any(self.parents[node] not in number for node in kept):
            raise ValueError("a node is kept without its parent")
        return DraftTree(
            tuple(self.tokens[node] for node in kept),
            tuple(number[self.parents[node]] for node in kept),
            tuple(self.weights[node] for node in kept),
        )


def grow(token: int, guess: Callable[[tuple[int, ...]], Guesses], guesses: int, depth: int) -> DraftTree:
    """The tree of the `guesses` most probable paths of at most `depth` tokens behind `token`.

    `guess` is asked, best path first, for what may come after a path (its tokens, the root's not among them).
    """
    tokens, parents, weights = [token], [0], [1.0]
    paths: list[tuple[int, ...]] = [()]
    open_: list[tuple[float, int, int, int]] = []  # -weight, order, parent, token
    order = 0

    def ask(node: int) -> None:
        nonlocal order
        if len(paths[node]) < depth and len(tokens) <= guesses:
            for child, probability in guess(paths[node]):
                order += 1
                heapq.heappush(open_, (-weights[node] * min(1.0, probability), order, node, child))

    ask(0)
    while open_ and len(tokens) <= guesses:
        weight, _, parent, child = heapq.heappop(open_)
        tokens.append(child)
        parents.append(parent)
        weights.append(-weight)
        paths.append((*paths[parent], child))
        ask(len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(weights))


def chain(token: int, guesses: Iterable[tuple[int, float]]) -> DraftTree:
    """A tree without branches: each guess, with its probability, follows the one before."""
    tokens, weights = [token], [1.0]
    for guess, probability in guesses:
        tokens.append(guess)
        weights.append(weights[-1] * min(1.0, probability))
    return DraftTree(tuple(tokens), (0, *range(len(tokens) - 1)), tuple(weights))
