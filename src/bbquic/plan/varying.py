"""Rates and speeds that change while a job runs: piecewise constant. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from bbquic.units import Seconds


@dataclass(frozen=True, slots=True)
class Varying:
    """A value from each of `points`' times on, until the next; the first one's also before.

    Raises: ValueError without points, unless times rise, or for a value that is not above 0.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("what varies has a value at least")
        for (before, _), (after, _) in pairwise(self.points):
            if not before < after:
                raise ValueError(f"times rise, and {before}, {after} do not")
        for time, value in self.points:
            if not 0 < value < float("inf"):
                raise ValueError(f"{value} from {time} s on: values are above 0 and finite")

    def at(self, time: float) -> float:
        return self.points[self._place(time)][1]

    def ends(self, start: float, amount: float) -> Seconds:
        """When `amount` is done that begins at `start` and is done at the value a second."""
        place, now = self._place(start), start
        while place + 1 < len(self.points):
            change, value = self.points[place + 1][0], self.points[place][1]
            if now + amount / value <= change:
                break
            amount -= value * (change - now)
            place, now = place + 1, change
        return Seconds(now + max(0.0, amount) / self.points[place][1])

    def _place(self, time: float) -> int:
        return max(0, bisect_right(self.points, time, key=lambda point: point[0]) - 1)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What differs from the cluster's figures: bytes/s of links by (from, to), and how many times as fast as
    its profile a node is."""

    rates: Mapping[tuple[str, str], Varying] = field(default_factory=dict)
    speeds: Mapping[str, Varying] = field(default_factory=dict)
