"""A drafter that knows what comes next and lies at random, for rows of `pipeline_simulation`."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise

from bbquic.draft.drafter import Ask
from bbquic.draft.tree import DraftTree

NextToken = Callable[[Ask, tuple[int, ...]], int | None]  # behind what is asked for and a path; None: unknown


@dataclass
class RandomDrafter:
    """Trees of any shape: a node goes on with the right path with probability `right`, or is wrong."""

    rng: random.Random
    following: NextToken
    vocabulary: range
    right: float = 0.6
    is_instant: bool = True
    is_chain: bool = False
    name: str = "random drafter"
    fails: float = 0.0  # how often it fails
    accepted: int = 0  # guesses
    made: int = 0
    forgotten: set[int] = field(default_factory=set)

    def draft(self, asks: Items[Ask]) -> list[DraftTree]:
        if self.rng.random() < self.fails:
            raise RuntimeError("the drafter broke")
        return [self._tree(ask) for ask in asks]

    def learn(self, key: int, tree: DraftTree, path: Items[int]) -> None:
        assert all(tree.parents[node] == before for before, node in pairwise(path))
        self.accepted += len(path) - 1
        self.made += tree.guesses

    def forget(self, key: int) -> None:
        self.forgotten.add(key)

    def _tree(self, ask: Ask) -> DraftTree:
        assert ask.key not in self.forgotten
        tokens, parents, weights, depths = [ask.tokens[-1]], [0], [1.0], [0]
        path, end = (), 0  # type: tuple[int, ...], int
        is_right = True
        for _ in range(self.rng.randint(0, ask.guesses)):
            token = self.following(ask, path) if self.rng.random() < self.right and is_right else None
            if token is not None and depths[end] < ask.depth:
                parent = end
            else:
                parent = len(tokens) - 1 if self.is_chain else self.rng.randrange(len(tokens))
                token = self.rng.choice(self.vocabulary)
                is_right = not self.is_chain
            siblings = [tokens[node] for node in range(1, len(tokens)) if parents[node] == parent]
            if depths[parent] >= ask.depth or token in siblings:
                continue
            tokens.append(token)
            parents.append(parent)
            weights.append(weights[parent] * self.rng.random())
            depths.append(depths[parent] + 1)
            if parent == end and token == self.following(ask, path):
                path, end = (*path, token), len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents), tuple(weights))


@dataclass
class RandomSpeculation:
    """Anything from no guess to `most`, and it is told of every pack."""

    rng: random.Random
    most: int
    rows: int = 0
    committed: int = 0

    def guesses(self, micro_batch: int, rows: int) -> int:
        assert rows > 0
        return self.rng.randint(0, self.most)

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None:
        assert rows <= committed <= rows * (guesses + 1)
        self.rows += rows
        self.committed += committed

    def decisions(self) -> tuple[str, ...]:
        return ()
