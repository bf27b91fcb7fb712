"""A draft tree that grows level by level, its nodes' keys in a bounded number of cells. Pure."""

from __future__ import annotations

from collections.abc import Callable

from bbquic.draft.tree import DraftTree, Guesses


class Growth:
    """The most probable `guesses` paths of at most `depth` tokens, found a level at a time.

    It finds what `tree.grow` finds: a node whose path is not among the best so far has no better one below
    it. Nodes that are expanded have a cell each, of `guesses` cells: those of nodes that fell out of the best
    are used again.
    """

    def __init__(self, token: int, guesses: int, depth: int, cells: range) -> None:
        """`cells` are where keys may go, one for each guess at least."""
        assert min(guesses, depth) >= 1, (guesses, depth)
        assert len(cells) >= guesses, cells
        self._guesses = guesses
        self._depth = depth
        self._free = list(cells)
        self._tokens, self._parents, self._weights = [token], [0], [1.0]
        self._depths = [0]
        self._chances = [1.0]
        self._cells: dict[int, int] = {}  # by node that was expanded
        self._best: list[int] = []  # others than the root, the heaviest first

    def add(self, parent: int, guesses: Guesses, calibrated: Callable[[float], float] = float) -> None:
        """What may follow a node, the likeliest first: tokens and their probabilities, as the draft has them;
        `calibrated` gives what counts."""
        depth, weight = self._depths[parent] + 1, self._weights[parent]
        for token, chance in guesses:
            if chance > 0:
                self._best.append(len(self._tokens))
                self._tokens.append(token)
                self._parents.append(parent)
                self._weights.append(weight * min(1.0, calibrated(chance)))
                self._depths.append(depth)
                self._chances.append(chance)

    def expand(self) -> list[int]:
        """The nodes whose guesses are asked for next: the best of the newest level; empty: the tree is grown.

        Each has a cell from now on.
        """
        self._best.sort(key=lambda node: (-self._weights[node], node))
        for node in self._best[self._guesses :]:
            if node in self._cells:
                self._free.append(self._cells.pop(node))
        del self._best[self._guesses :]
        is_full = len(self._best) == self._guesses
        least = self._weights[self._best[-1]] if is_full else 0.0
        level = self._depths[-1]
        if level == self._depth:
            return []
        found = sorted(n for n in self._best if self._depths[n] == level and self._weights[n] > least)
        new = [node for node in found if node not in self._cells]
        for node in new:
            self._cells[node] = self._free.pop(0)
        return new

    def depth(self, node: int) -> int:
        return self._depths[node]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def token(self, node: int) -> int:
        return self._tokens[node]

    def path(self, node: int) -> tuple[int, ...]:
        """Cells of a node and its ancestors but the root, from the top."""
        cells: list[int] = []
        while node:
            cells.append(self._cells[node])
            node = self._parents[node]
        return tuple(reversed(cells))

    def tree(self) -> tuple[DraftTree, tuple[float, ...]]:
        """The best nodes, and of each node the probability that `add` was given."""
        kept = [0, *sorted(self._best)]
        number = {node: place for place, node in enumerate(kept)}
        tree = DraftTree(
            tuple(self._tokens[node] for node in kept),
            tuple(number[self._parents[node]] for node in kept),
            tuple(self._weights[node] for node in kept),
        )
        return tree, tuple(self._chances[node] for node in kept)
