"""What guesses, and what says how many guesses there are to be: the interfaces that the scheduler uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bbquic.draft.tree import DraftTree
from bbquic.model.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence that is about to decode, and how large its tree may be.

    tokens: all that are committed, of prompt and answer; the newest one is to be the tree's root.
    guesses: nodes beside the root at most, and depth: steps from it at most; both are 1 or more.
    """

    key: int  # the sequence's, as long as the job lasts
    tokens: Sequence[int]
    sampling: Sampling
    guesses: int
    depth: int


class Drafter(Protocol):
    """Guesses what may come next. It is never called in two threads at once.

    Whatever it raises turns it off, and the job goes on without.
    """

    @property
    def name(self) -> str:
        """For people."""

    @property
    def is_instant(self) -> bool:
        """Whether `draft` takes less time than a change of threads."""

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """A tree for each ask, within its bounds; one of the root alone where there is nothing to guess."""

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        """What was accepted of a tree of that sequence: ids of its nodes, the root's first."""

    def forget(self, key: int) -> None:
        """The sequence is over. It may never have been asked about."""


class Speculation(Protocol):
    """How many guesses pay just now, by micro-batch."""

    def guesses(self, micro_batch: int, rows: int) -> int:
        """For each of the `rows` that decode in the micro-batch's next pack; 0: none."""

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None:
        """What came of such a pack: with that many `guesses` asked for (0 too), its rows had `committed`
        tokens together."""

    def decisions(self) -> tuple[str, ...]:
        """What was decided of late, and why, in words; the newest last."""


@dataclass(frozen=True, slots=True)
class AlwaysGuesses:
    """The same number of guesses for everybody, whether it pays or not."""

    count: int

    def guesses(self, micro_batch: int, rows: int) -> int:
        return self.count

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None:
        """It makes no difference."""

    def decisions(self) -> tuple[str, ...]:
        return ()
