"""Clocks and packs in simulated time, where the truth is known."""

from __future__ import annotations

from dataclasses import dataclass

from bbquic.runtime.clocks import ClockMeter
from bbquic.runtime.timing import StageTiming
from bbquic.units import Seconds


@dataclass(frozen=True)
class Clock:
    """A clock that shows `offset` at our time 0 and runs (1 + drift) times as fast as ours."""

    offset: float
    drift: float = 0.0

    def at(self, now: float) -> Seconds:
        return Seconds(now + self.true_offset(now))

    def true_offset(self, now: float) -> float:
        return self.offset + self.drift * now


def exchange(meter: ClockMeter, clock: Clock, now: float, there: float, held: float, back: float) -> float:
    """A PING and its PONG with these legs; gives when it was over."""
    came = now + there + held + back
    assert meter.add(Seconds(now), clock.at(now + there), clock.at(now + there + held), Seconds(came))
    return came


def timing(
    node: str,
    clock: Clock,
    arrived: float,
    lanes: tuple[float, ...],
    *,
    raw: int = 1000,
    sent: int = 500,
    to_wire: float = 0.0,
) -> StageTiming:
    """What a stage notes of a pack that arrived at `arrived` (our time) and spent `lanes`: 9 durations
    of its own clock, in seconds, between one mark and the next; it is delivered as it arrives."""
    marks, at = [], 0.0
    for lane in (0.0, *lanes):
        at += lane
        marks.append(round(at * 1e6))
    return StageTiming(node, clock.at(arrived), tuple(marks), raw, sent, to_wire)  # type: ignore[arg-type]
