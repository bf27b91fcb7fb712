"""How many of its guesses a drafter gets right, learnt from passes: E[a | N] for any number of guesses N. Pure.

A tree's nodes have ranks by weight, and the tree of N guesses is the first N of a larger one. So a node of
rank r is right with the same probability in every tree that has it, E[a | N] = 1 + Σ_{r ≤ N} P(r is right),
and a pass with many guesses tells of all smaller numbers too. In a chain, rank is depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 256.0  # rows that count: an average of so many is off by a few per cent
LEAST_PASSES = 30.0  # or so many passes, where they have many rows
FADING = 8.0  # times as long last ranks that are not asked for
BELIEF = 6.0  # rows that the prior is worth
FOLLOWS = 0.6  # before anything is known: so often a guess is right where the one before it was


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of a pass: guesses asked of the drafter, given by it, kept behind the first stage, and the ranks
    (from 1 on) of those that were right."""

    asked: int
    given: int
    kept: int
    right: tuple[int, ...]

    @classmethod
    def of_chain(cls, guesses: int, committed: int) -> Outcome:
        """Of a chain that committed so many tokens, the new one with them."""
        return cls(guesses, guesses, guesses, tuple(range(1, committed)))


class Acceptance:
    """One drafter's. What `general` knows (all micro-batches', say) is the prior of one that is particular."""

    def __init__(self, most: int, general: Acceptance | None = None) -> None:
        self.most = most
        self.rows = 0.0  # that count
        self._general = general
        self._asked = [0.0] * most  # rows, by rank
        self._given = [0.0] * most
        self._right = [0.0] * most
        self._kept, self._sent = BELIEF, BELIEF  # guesses behind the first stage, and on it

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """The rows of one pass; those that nothing was asked for tell nothing."""
        outcomes = [one for one in outcomes if one.asked]
        if not outcomes:
            return
        share = len(outcomes) / max(MEMORY, LEAST_PASSES * len(outcomes))
        self._fade(max(one.asked for one in outcomes), share)
        self.rows = self.rows * (1 - share) + len(outcomes)
        for one in outcomes:
            for rank in range(min(one.asked, self.most)):
                self._asked[rank] += 1
                self._given[rank] += rank < one.given
            for rank in one.right:
                if rank <= self.most:
                    self._right[rank - 1] += 1
            self._kept += one.kept
            self._sent += one.given

    def _fade(self, asked: int, share: float) -> None:
        seen, unseen = 1 - share, 1 - share / FADING
        for rank in range(self.most):
            keep = seen if rank < asked else unseen
            self._asked[rank] *= keep
            self._given[rank] *= keep
            self._right[rank] *= keep
        self._kept *= seen
        self._sent *= seen

    def right(self) -> list[float]:
        """P(the guess of a rank is right), by rank."""
        prior = None if self._general is None else self._general.right()
        follows = self._follows()
        found: list[float] = []
        before = 1.0
        for rank, (asked, right) in enumerate(zip(self._asked, self._right, strict=True)):
            expected = before * follows if prior is None else prior[rank]
            before = (BELIEF * expected + right) / (BELIEF + asked)
            found.append(before)
        return found

    def _follows(self) -> float:
        """How often a rank is right for each time that the one before is, over all that were asked for."""
        right, before = BELIEF * FOLLOWS, BELIEF
        last = 1.0
        for asked, found in zip(self._asked, self._right, strict=True):
            if asked <= 0:
                break
            right += found
            before += asked * last
            last = found / asked
        return min(right / before, 0.99)

    def given(self) -> list[float]:
        """P(the drafter gives a guess of a rank when it is asked for it), by rank."""
        prior = None if self._general is None else self._general.given()
        found: list[float] = []
        before = 1.0
        for rank, (asked, given) in enumerate(zip(self._asked, self._given, strict=True)):
            expected = before if prior is None else prior[rank]
            before = (BELIEF * expected + given) / (BELIEF + asked)
            found.append(before)
        return found

    @property
    def kept(self) -> float:
        """The share of guesses that go on behind the first stage."""
        return self._kept / self._sent if self._sent > 0 else 1.0

    def committed(self, guesses: int) -> float:
        """E[a | N]. Raises: ValueError for more guesses than it was made for."""
        self._check(guesses)
        return 1 + sum(self.right()[:guesses])

    def size(self, guesses: int) -> float:
        """E[guesses given] where N are asked for. Raises: ValueError as `committed`."""
        self._check(guesses)
        return sum(self.given()[:guesses])

    def _check(self, guesses: int) -> None:
        if not 0 <= guesses <= self.most:
            raise ValueError(f"{guesses} guesses, of {self.most} at most")
