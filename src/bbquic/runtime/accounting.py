"""Where a step's time went, all around the loop: coordinator, stages, the hops between them, and back.

Times within a machine are exact. A message's way from one machine to another is as good as the two clocks'
offset is known; around the loop the offsets cancel, so that sums need no clocks: decisions rest on those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

from bbquic.runtime.clocks import ClockEstimate
from bbquic.runtime.timing import Hop, Mark, Parts, StageTiming
from bbquic.units import Bytes, BytesPerSecond, Seconds

_NO_TIME = Seconds(0.0)


@dataclass(frozen=True, slots=True)
class Loop:
    """One pack's way. `hops` has one more than `stages`: coordinator to the first, ..., the last back.

    A hop's flight is raw here: a clock that is a little off makes it too long or too short, below 0 even, and
    that of the next hop by as much the other way. Its uncertainty is infinite where a clock is not known yet.
    """

    measured: Seconds  # launch to TOKENS, on the coordinator's own clock
    stages: tuple[Parts, ...]
    hops: tuple[Hop, ...]

    @property
    def total(self) -> Seconds:
        """The sum of all parts that are known."""
        stages = sum(parts.total for parts in self.stages)
        hops = sum(hop.to_wire + (hop.flight if is_known(hop) else 0.0) for hop in self.hops)
        return Seconds(stages + hops)

    @property
    def unexplained(self) -> Seconds:
        return Seconds(self.measured - self.total)


def is_known(hop: Hop) -> bool:
    """Whether both clocks are, so that the flight means something."""
    return math.isfinite(hop.uncertainty)


def account(
    launched: Seconds,
    timings: Sequence[StageTiming],
    clocks: Sequence[ClockEstimate | None],
    came: Seconds,
    *,
    rows: Bytes = Bytes(0),
    tokens: Bytes = Bytes(0),
    to_wire: Seconds = _NO_TIME,
) -> Loop:
    """A pack's loop from the moments it left and came back (ours) and what each stage noted (its own).

    `clocks` has one for each stage. `rows` and `tokens` are the sizes of the first and the last message,
    `to_wire` is how long the ROWS took to the network card.
    Raises: ValueError when clocks and timings are not as many.
    """
    left, slack = launched, _NO_TIME
    waited, raw, sent = to_wire, rows, rows
    hops: list[Hop] = []
    for timing, clock in zip(timings, clocks, strict=True):
        arrived = _ours(clock, Seconds(timing.arrived))
        unsure = slack + (math.inf if clock is None else clock.uncertainty_at(arrived))
        hops.append(Hop(waited, Seconds(arrived - left - waited), Seconds(unsure), raw, sent, None))
        left = _ours(clock, timing.at(Mark.HANDED))
        slack = Seconds(math.inf) if clock is None else clock.uncertainty_at(left)
        waited, raw, sent = Seconds(timing.to_wire), Bytes(timing.raw), Bytes(timing.sent)
    hops.append(Hop(waited, Seconds(came - left - waited), slack, tokens, tokens, None))
    return Loop(Seconds(came - launched), tuple(timing.parts for timing in timings), tuple(hops))


def _ours(clock: ClockEstimate | None, moment: Seconds) -> Seconds:
    return moment if clock is None else clock.ours(moment)


class HopSums(NamedTuple):
    """Of all messages of a hop so far. Flight and its uncertainty are of `flights` messages only."""

    messages: int = 0
    to_wire: float = 0.0  # seconds
    flights: int = 0
    flight: float = 0.0  # raw, seconds
    uncertainty: float = 0.0
    raw: int = 0  # bytes
    sent: int = 0


class LoopSums(NamedTuple):
    """Of all packs so far: sums, from which a reader takes differences; as small after days as at first."""

    steps: int
    measured: float  # seconds from launch to TOKENS
    unexplained: float
    stages: tuple[Parts, ...]
    hops: tuple[HopSums, ...]

    @classmethod
    def none(cls, stages: int) -> LoopSums:
        parts = Parts(*(_NO_TIME for _ in Parts._fields))
        return cls(0, 0.0, 0.0, (parts,) * stages, (HopSums(),) * (stages + 1))

    def plus(self, loop: Loop) -> LoopSums:
        return LoopSums(
            self.steps + 1,
            self.measured + loop.measured,
            self.unexplained + loop.unexplained,
            tuple(Parts(*map(add, mine, new)) for mine, new in zip(self.stages, loop.stages, strict=True)),
            tuple(_plus_hop(mine, new) for mine, new in zip(self.hops, loop.hops, strict=True)),
        )

    def since(self, before: LoopSums) -> LoopSums:
        """What came to it after `before`."""
        return LoopSums(
            self.steps - before.steps,
            self.measured - before.measured,
            self.unexplained - before.unexplained,
            tuple(Parts(*map(sub, mine, old)) for mine, old in zip(self.stages, before.stages, strict=True)),
            tuple(HopSums(*map(sub, mine, old)) for mine, old in zip(self.hops, before.hops, strict=True)),
        )

    def mean(self, rates: Sequence[BytesPerSecond | None] = ()) -> Loop | None:
        """The average pack; None without one. Flights that are not known have an infinite uncertainty."""
        if not self.steps:
            return None
        count = self.steps
        return Loop(
            Seconds(self.measured / count),
            tuple(Parts(*(Seconds(value / count) for value in parts)) for parts in self.stages),
            tuple(
                _mean_hop(hop, rates[place] if place < len(rates) else None)
                for place, hop in enumerate(self.hops)
            ),
        )


def _plus_hop(sums: HopSums, hop: Hop) -> HopSums:
    known = is_known(hop)
    return HopSums(
        sums.messages + 1,
        sums.to_wire + hop.to_wire,
        sums.flights + known,
        sums.flight + (hop.flight if known else 0.0),
        sums.uncertainty + (hop.uncertainty if known else 0.0),
        sums.raw + hop.raw,
        sums.sent + hop.sent,
    )


def _mean_hop(sums: HopSums, rate: BytesPerSecond | None) -> Hop:
    count = max(sums.messages, 1)
    return Hop(
        to_wire=Seconds(sums.to_wire / count),
        flight=Seconds(sums.flight / sums.flights) if sums.flights else _NO_TIME,
        uncertainty=Seconds(sums.uncertainty / sums.flights if sums.flights else math.inf),
        raw=Bytes(round(sums.raw / count)),
        sent=Bytes(round(sums.sent / count)),
        rate=rate,
    )
