"""Guessing as much as pays by what is measured: `plan.speculator` with a job's pace and its drafter."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from bbquic.draft.drafter import AlwaysGuesses, Ask, Drafter
from bbquic.draft.tree import DraftTree
from bbquic.plan.acceptance import Outcome
from bbquic.plan.controller import Line
from bbquic.plan.speculator import Situation, Speculator
from bbquic.runtime.costs import LinearFit
from bbquic.runtime.drafters import TimedDrafter
from bbquic.runtime.pace import MeasuredPace
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions


def scheduler_of(options: SchedulerOptions, drafter: Drafter | None) -> Scheduler:
    """A scheduler whose rows have as many guesses by the drafter as pay, or always as many as may be; none
    without a drafter."""
    if drafter is None or not options.most_guesses:
        return Scheduler(options)
    if options.always_guesses:
        return Scheduler(options, drafter=drafter, speculation=AlwaysGuesses(options.most_guesses))
    pace = MeasuredPace(
        micro_batches=options.micro_batches,
        depth=options.depth,
        prefill_tokens=options.prefill_tokens,
        start=options.start,
    )
    speculation = MeasuredSpeculation(pace, drafter, options.most_guesses)
    return Scheduler(options, pace, speculation.drafter, speculation)


class MeasuredSpeculation:
    """`draft.drafter.Speculation`, for the drafter that `drafter` is and the pace that the scheduler has."""

    def __init__(self, pace: MeasuredPace, drafter: Drafter, most: int) -> None:
        self.drafter = WatchedDrafter(drafter)
        self._pace = pace
        self._speculator = Speculator(self._situation, most)

    def guesses(self, micro_batch: int, rows: int) -> int:
        return self._speculator.guesses(micro_batch, rows)

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None:
        for outcome in self.drafter.outcomes():
            self._speculator.saw(outcome)
        self._speculator.noted(micro_batch, rows, guesses, committed)
        self._pace.trees = replace(self._speculator.typical, drafting=Line())

    def decisions(self) -> tuple[str, ...]:
        """What was decided of late, and why; the newest last."""
        return self._speculator.decisions()

    def _situation(self) -> Situation | None:
        measured = self._pace.measured()
        return None if measured is None else Situation(measured, self._pace.present, self.drafter.time)


class WatchedDrafter(TimedDrafter):
    """A drafter, and what its guesses cost and came to. It may be asked in another thread than it is read."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._kept: dict[int, int] = {}  # of the tree that is learnt next, by key
        self._fit = LinearFit()
        self._asked: dict[int, int] = {}  # guesses, by key
        self._seen: deque[Outcome] = deque()

    @property
    def time(self) -> Line:
        """Seconds by guesses that are asked for together."""
        return Line(*self._fit.line)

    def outcomes(self) -> list[Outcome]:
        """Those that came since the last call."""
        return [self._seen.popleft() for _ in range(len(self._seen))]

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """See `Drafter.draft`."""
        before = self.spent
        trees = super().draft(asks)
        self._fit.add(sum(ask.guesses for ask in asks), self.spent - before)
        for ask, tree in zip(asks, trees, strict=False):
            if tree.guesses:
                self._asked[ask.key] = ask.guesses
            else:
                self._seen.append(Outcome(ask.guesses, 0, 0, {}))
        return trees

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        """See `Drafter.learn`."""
        asked = max(self._asked.get(key, 0), tree.guesses)
        kept = min(self._kept.pop(key, tree.guesses), tree.guesses)
        rank = {node: place for place, node in enumerate(_by_weight(tree))}
        self._seen.append(Outcome.of_path(asked, tree.guesses, kept, [rank[node] for node in path]))
        super().learn(key, tree, path)

    def forget(self, key: int) -> None:
        """See `Drafter.forget`."""
        self._asked.pop(key, None)
        self._kept.pop(key, None)
        super().forget(key)

    def passed(self, key: int, kept: int) -> None:
        """See `TimedDrafter.passed`."""
        self._kept[key] = kept


def _by_weight(tree: DraftTree) -> list[int]:
    """Its nodes, the root first, as `DraftTree.heaviest` takes them."""
    return sorted(range(len(tree.tokens)), key=lambda node: (node > 0, -tree.weights[node], node))
