"""Cells of the break-even: stand-ins on two hosts, what they cost, and the speed-up that follows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bbquic.plan.controller import Line, Measured, StageFigures
from bbquic.plan.cost import WIRE
from bbquic.plan.simulate_speculation import chain
from bbquic.plan.speculation import PLAIN, Trees, row_rate
from bbquic.units import BytesPerSecond, Seconds
from bench.stand_in.bounds import BYTES_PER_VALUE
from bench.stand_in.cell import TAIL, Cell
from bench.stand_in.cost import CostTable, StandIn
from bench.stand_in.observed import Passed

RATES = (20.0, 50.0, 125.0, 250.0)  # Mbit/s
ROUND_TRIPS = (10.0, 50.0, 100.0)  # ms
GUESSES = {4: 8, 32: 4}  # by batch: so that the break-even lies within the rates
HIDDEN = 8192
ACCEPTS = 0.5
COST = CostTable(((0, 0.018), (64, 0.022)))  # s by rows, of each stage
STAGES = 2


@dataclass(frozen=True, slots=True)
class Place:
    """A link of that rate and round trip, and a batch in one micro-batch."""

    rate_mbps: float
    rtt_ms: float
    batch: int

    @property
    def guesses(self) -> int:
        return GUESSES[self.batch]

    @property
    def measured(self) -> Measured:
        """What stages and link cost, by what the stand-ins are told."""
        slope = (COST(64) - COST(0)) / 64
        compute = Line(COST(0), slope)
        rate = BytesPerSecond(self.rate_mbps * 1e6 / 8 / WIRE)
        sent = Line(0.0, HIDDEN * BYTES_PER_VALUE)
        first = StageFigures("first", Line(), compute, Line(), sent, rate)
        last = StageFigures("last", Line(), compute, Line(), Line())
        return Measured((first, last), Seconds(self.rtt_ms / 1e3))  # there, and back to the coordinator

    def speed_up(self, committed: float, guesses: int | None = None) -> float:
        """Tokens/s with trees over those without, predicted."""
        count = self.guesses if guesses is None else guesses
        trees = Trees(count, count, committed)
        return row_rate(self.measured, self.batch, 1, trees) / row_rate(self.measured, self.batch, 1, PLAIN)

    def cell(
        self, guesses: int, *, adapts: bool = False, warm_up: int = 3, counted: int = 10, seed: int = 0
    ) -> Cell:
        most = self.batch * (1 + guesses)
        committed = 1 + sum(chain(ACCEPTS, guesses))
        return Cell(
            blocks=(1,) * STAGES,
            stand_in=StandIn(HIDDEN, COST, most, ACCEPTS, seed),
            dtype="float16",
            batch=self.batch,
            micro_batches=1,
            warm_up=warm_up,
            counted=counted,
            guesses=guesses,
            adapts=adapts,
            # rows differ in how far they are: the first is to end when all passes are counted
            answer=math.ceil((warm_up + counted + TAIL) * committed + 4 * math.sqrt(2 * (warm_up + counted))),
        )


def places() -> Iterator[Place]:
    for rtt_ms in ROUND_TRIPS:
        for rate_mbps in RATES:
            for batch in GUESSES:
                yield Place(rate_mbps, rtt_ms, batch)


@dataclass(frozen=True, slots=True)
class Ran:
    """Tokens a second of a run, and tokens committed by a row and pass."""

    tokens_per_second: float
    committed: float


def ran(cell: Cell, passes: Sequence[Passed]) -> Ran:
    """Of the counted passes of its one micro-batch."""
    following = sorted(passes, key=lambda one: one.step)
    counted = following[cell.warm_up : cell.warm_up + cell.counted]
    took = counted[-1].received - following[cell.warm_up - 1].received
    tokens = sum(one.tokens for one in counted)
    return Ran(tokens / took, tokens / len(counted) / cell.batch)


def crossing(rates: Sequence[float], speed_ups: Sequence[float]) -> float:
    """The rate at which a speed-up is 1, between rates by straight lines over their logarithms; 0 where it is
    above 1 at all of them, inf where at none."""
    if speed_ups[0] >= 1:
        return 0.0
    for low, high, below, above in zip(rates, rates[1:], speed_ups, speed_ups[1:], strict=False):
        if below < 1 <= above:
            share = (1 - below) / (above - below)
            return math.exp(math.log(low) + share * math.log(high / low))
    return math.inf


def predicted_crossing(rtt_ms: float, batch: int, committed: float) -> float:
    """The same of the prediction, exactly; 0 and inf where it is beyond what can be emulated."""
    low, high = RATES[0] / 100, RATES[-1] * 100
    if Place(low, rtt_ms, batch).speed_up(committed) >= 1:
        return 0.0
    if Place(high, rtt_ms, batch).speed_up(committed) < 1:
        return math.inf
    for _ in range(60):
        middle = math.sqrt(low * high)
        if Place(middle, rtt_ms, batch).speed_up(committed) < 1:
            low = middle
        else:
            high = middle
    return high


def disagreement(measured: float, predicted: float) -> float:
    """How far two crossings are apart, as a share; nothing where both are on the same side of all rates."""
    within = [RATES[0] <= one <= RATES[-1] for one in (measured, predicted)]
    if not any(within):
        return 0.0 if (measured < RATES[0]) == (predicted < RATES[0]) else math.inf
    low, high = (min(max(one, RATES[0]), RATES[-1]) for one in sorted((measured, predicted)))
    return high / low - 1
