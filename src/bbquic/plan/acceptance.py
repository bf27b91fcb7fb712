"""How many of its guesses a drafter gets right, learnt from passes: E[a | N] for any number N of them. Pure.

A tree's nodes have ranks by weight, and the tree of N guesses is the first N of a larger one. So a node of
rank r is right with the same probability in every tree that has it, E[a | N] = 1 + Σ_{r ≤ N} P(r is right),
and a pass with many guesses tells of all smaller numbers too. In a chain, rank is depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

MEMORY = 2048.0  # rows that count: an average of so many is off by a per cent or two
LEAST_PASSES = 100.0  # or so many passes, where they have many rows
FADING = 8.0  # times as long last ranks that are not asked for
RECENT = 32  # rows by which a change is seen
SURE = 4.5  # standard deviations of their mean: then it is one
LEFT = 0.1  # of what was known, behind a change
BELIEF = 6.0  # rows that the prior is worth
SHARED = 64.0  # rows that what is known in general is worth
FOLLOWS = 0.6  # before anything is known: so often a guess is right where the one before it was


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of a pass: guesses asked of the drafter, given by it, kept behind the first stage, and the
    ranks (from 1 on) of those that were right, each with the number of times."""

    asked: int
    given: int
    kept: int
    right: Mapping[int, float]

    @classmethod
    def of_path(cls, asked: int, given: int, kept: int, path: Sequence[int]) -> Outcome:
        """Of a tree whose nodes are numbered by weight, and the ids that were accepted, root first."""
        return cls(asked, given, kept, dict.fromkeys(path[1:], 1.0))


class Acceptance:
    """One drafter's. What `general` knows (of all micro-batches, say) is the prior of a particular one."""

    def __init__(self, most: int, general: Acceptance | None = None) -> None:
        self.most = most
        self.rows = 0.0  # that count
        self._general = general
        self._asked = [0.0] * most  # rows, by rank
        self._given = [0.0] * most
        self._right = [0.0] * most
        self._missed = 0.0  # tokens of the newest rows that were not expected, mean and mean square
        self._spread = 1.0
        self._kept, self._sent = BELIEF, BELIEF  # guesses behind the first stage, and on it

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """The rows of one pass; those that nothing was asked for tell nothing."""
        outcomes = [one for one in outcomes if one.asked]
        if not outcomes:
            return
        share = len(outcomes) / max(MEMORY, LEAST_PASSES * len(outcomes))
        if self._has_changed(outcomes):
            self._fade(self.most, 1 - LEFT)
        self._fade(max(one.asked for one in outcomes), share)
        self.rows = self.rows * (1 - share) + len(outcomes)
        _add_below(self._asked, (one.asked for one in outcomes))
        _add_below(self._given, (round(min(one.given, one.asked)) for one in outcomes))
        for one in outcomes:
            for rank, times in one.right.items():
                if rank <= self.most:
                    self._right[rank - 1] += times
            self._kept += one.kept
            self._sent += one.given

    def _has_changed(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the newest rows differ from what they were expected to commit by more than chance."""
        if self.rows < RECENT:
            return False
        expected = self.committed()
        for one in outcomes:
            missed = 1 + sum(one.right.values()) - expected[min(one.asked, self.most)]
            self._missed += (missed - self._missed) / RECENT
            self._spread += (missed**2 - self._spread) / RECENT
        if self._missed**2 * (2 * RECENT - 1) <= SURE**2 * self._spread:
            return False
        self._missed = 0.0
        return True

    def _fade(self, asked: int, share: float) -> None:
        seen, unseen = 1 - share, 1 - share / FADING
        for sums in (self._asked, self._given, self._right):
            sums[:] = [each * seen for each in sums[:asked]] + [each * unseen for each in sums[asked:]]
        self._kept *= seen
        self._sent *= seen

    def right(self) -> list[float]:
        """P(the guess of a rank is right), by rank."""
        if self._general is not None:
            return _blended(self._general.right(), self._right, self._asked)
        follows = self._follows()
        found: list[float] = []
        before = 1.0
        for asked, right in zip(self._asked, self._right, strict=True):
            before = (BELIEF * before * follows + right) / (BELIEF + asked)
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
        if self._general is not None:
            return _blended(self._general.given(), self._given, self._asked)
        found: list[float] = []
        before = 1.0
        for asked, given in zip(self._asked, self._given, strict=True):
            before = (BELIEF * before + given) / (BELIEF + asked)
            found.append(before)
        return found

    @property
    def kept(self) -> float:
        """The share of guesses that go on behind the first stage."""
        return min(1.0, self._kept / self._sent)

    def committed(self) -> list[float]:
        """E[a | N] for N = 0, 1, ... `most`."""
        return list(accumulate(self.right(), initial=1.0))

    def sizes(self) -> list[float]:
        """E[guesses given] where 0, 1, ... `most` are asked for."""
        return list(accumulate(self.given(), initial=0.0))


def _add_below(sums: list[float], counts: Iterable[int]) -> None:
    """Add 1 to the first so many sums, for each of the counts."""
    ends = [0] * (len(sums) + 1)
    for count in counts:
        ends[min(count, len(sums))] += 1
    more = 0
    for place in range(len(sums) - 1, -1, -1):
        more += ends[place + 1]
        sums[place] += more


def _blended(prior: Sequence[float], times: Sequence[float], asked: Sequence[float]) -> list[float]:
    return [
        (SHARED * expected + own) / (SHARED + of)
        for expected, own, of in zip(prior, times, asked, strict=True)
    ]
