"""Timing work within a budget: medians of a few repeats, and what would take too long is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from bbquic.errors import BBQuicError
from bbquic.units import Seconds

REPEATS = 7  # of what is short: a median of fewer still moves with one odd run

Work = Callable[[], None]


class Abandoned(BBQuicError):
    """Nobody waits for the measurement any more."""


class Stopwatch:
    """A budget of seconds from now on. `clock` is in seconds; `stop` says whether to give up."""

    def __init__(
        self,
        budget: Seconds,
        *,
        clock: Callable[[], float] = time.perf_counter,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock = clock
        self._stop = stop
        self._deadline = clock() + budget

    @property
    def left(self) -> Seconds:
        return Seconds(max(0.0, self._deadline - self._clock()))

    def share(self, part: float) -> Stopwatch:
        """A budget of its own from a part of what is left."""
        return Stopwatch(Seconds(part * self.left), clock=self._clock, stop=self._stop)

    def median(self, work: Work, *, before: Work | None = None, repeats: int = REPEATS) -> Seconds:
        """Seconds that `work` takes, once warm: once at least, and no more once the budget is spent.

        `before` runs before each, and is not counted. Raises: Abandoned.
        """
        warm = self._once(work, before)
        if warm >= self.left:
            return Seconds(warm)  # with what the first run costs in it, and better than nothing
        taken: list[float] = []
        while len(taken) < repeats and (not taken or max(taken) < self.left):
            taken.append(self._once(work, before))
        return Seconds(median(taken))

    def _once(self, work: Work, before: Work | None) -> float:
        if self._stop():
            raise Abandoned("the measurement was given up")
        if before is not None:
            before()
        began = self._clock()
        work()
        return self._clock() - began

    def curve(
        self, sizes: Sequence[int], prepare: Callable[[int], Work], *, before: Work | None = None
    ) -> list[tuple[float, float]]:
        """(size, seconds) for rising sizes; the first at least, then those that there is time for."""
        points: list[tuple[float, float]] = []
        for place, size in enumerate(sizes):
            if points and 2 * points[-1][1] * size / points[-1][0] > self.left:
                break
            part = self.share(1 / (len(sizes) - place))
            points.append((float(size), part.median(prepare(size), before=before)))
        return points
