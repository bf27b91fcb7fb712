"""What a pack of T tokens costs each resource of the pipeline, learnt from the timings that come back. Pure.

The terms are the architecture's: a resource (a lane of a stage, a link) is busy with a pack for
t(T) = a + b T; `cycle` is the longest of these, `loop` their sum and the time that is nothing but distance.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from bbquic.plan.controller import Line, Measured, StageFigures
from bbquic.runtime.timing import StageTiming
from bbquic.units import BytesPerSecond, Seconds

KEEP = 0.995  # weight of a sample after the next one came: the last few hundred packs count
KEEP_CODED = 0.95  # the same of what a hop's codec decides, which may change from one pack to the next
FEW = 3.0  # samples before a slope is believed
NARROW = 0.1  # spread of T, over its mean, below which samples say nothing about a slope
LATENCIES = 64  # the least of so many latencies is taken for that without queueing


@dataclass(slots=True)
class LinearFit:
    """A running least-squares line t(T) = a + b T with exponential forgetting; a and b are never negative.

    While all samples are of one size, the line keeps the shape that it had when they were not, at the height
    of the new ones: what a pack costs by itself is not forgotten because all packs are alike for a while.
    """

    keep: float = KEEP
    weight: float = 0.0
    _x: float = 0.0  # weighted means, and sums of squares about them
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _shape: tuple[float, float] | None = None  # the line while sizes differed

    def add(self, x: float, y: float) -> None:
        before = self.keep * self.weight
        self.weight = before + 1
        dx, dy = x - self._x, y - self._y
        share = before / self.weight
        self._xx = self.keep * self._xx + share * dx * dx
        self._xy = self.keep * self._xy + share * dx * dy
        self._x += dx / self.weight
        self._y += dy / self.weight
        if self._differs:
            self._shape = self._fitted()

    @property
    def _differs(self) -> bool:
        """Whether there are enough samples of sizes that differ enough for a slope."""
        return self.weight >= FEW and self._xx > self.weight * (NARROW * self._x) ** 2

    @property
    def line(self) -> tuple[float, float]:
        """(a, b). Through the origin while the samples are few or were always of one size: then a larger pack
        is thought to cost in proportion, which errs on the side of smaller ones."""
        a, b = self._shape or (0.0, 1.0)
        expected = a + b * self._x
        if self._differs or expected <= 0:
            return self._fitted()
        return a * self._y / expected, b * self._y / expected

    def _fitted(self) -> tuple[float, float]:
        proportional = self._y / self._x if self._x > 0 else 0.0
        if self._xx <= 0:
            return 0.0, proportional
        slope = self._xy / self._xx
        if slope >= proportional:
            return 0.0, proportional
        slope = max(slope, 0.0)
        return self._y - slope * self._x, slope

    def at(self, x: float) -> float:
        a, b = self.line
        return a + b * x


@dataclass(slots=True)
class _StageCosts:
    """A stage's three lanes in seconds and the tensor it sends in bytes, each by tokens; its link's rate."""

    inbound: LinearFit = field(default_factory=lambda: LinearFit(KEEP_CODED))
    compute: LinearFit = field(default_factory=LinearFit)
    outbound: LinearFit = field(default_factory=lambda: LinearFit(KEEP_CODED))
    sent: LinearFit = field(default_factory=lambda: LinearFit(KEEP_CODED))
    rate: BytesPerSecond | None = None
    name: str = ""

    def resources(self) -> list[tuple[float, float]]:
        """(a, b) of each lane, and of the link where its rate is known."""
        lines = [self.inbound.line, self.compute.line, self.outbound.line]
        if self.rate:
            a, b = self.sent.line
            lines.append((a / self.rate, b / self.rate))
        return lines

    def figures(self) -> StageFigures:
        lines = [Line(*fit.line) for fit in (self.inbound, self.compute, self.outbound, self.sent)]
        return StageFigures(self.name, lines[0], lines[1], lines[2], lines[3], self.rate)


class StepCosts:
    """The pipeline as a pack meets it. None for what is not known yet."""

    def __init__(self) -> None:
        self._stages: list[_StageCosts] = []
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._tokens: float | None = None
        self._is_warm = False

    @property
    def typical(self) -> float:
        """Tokens of a pack lately."""
        return self._tokens or 0.0

    def record(
        self, tokens: int, elapsed: Seconds, timings: Items[StageTiming], onward: int | None = None
    ) -> None:
        """A pack of `tokens` came back after `elapsed` seconds; `timings` in the order of the stages. Behind
        the first stage it had `onward` tokens, None: all."""
        if not self._is_warm:
            self._is_warm = True
            return  # the first pack also warms everything up: it says nothing of those to come
        while len(self._stages) < len(timings):
            self._stages.append(_StageCosts())
        latency, sent = float(elapsed), tokens if onward is None else onward
        for place, (stage, timing) in enumerate(zip(self._stages, timings, strict=False)):
            parts, came = timing.parts, sent if place else tokens
            stage.name = timing.node
            stage.inbound.add(came, parts.decode + parts.to_device)
            stage.compute.add(came, parts.compute)
            stage.outbound.add(sent, parts.to_host + parts.encode)
            stage.sent.add(sent, timing.sent)
            latency -= parts.total - parts.from_wire
            latency -= timing.sent / stage.rate if stage.rate else 0.0
        self._latencies.append(max(latency, 0.0))
        self._tokens = tokens if self._tokens is None else self._tokens + (tokens - self._tokens) / 16

    def link_rate(self, place: int, rate: BytesPerSecond) -> None:
        """What the link from stage `place` to the next carries."""
        if place < len(self._stages) and rate > 0:
            self._stages[place].rate = rate

    def cycle(self, tokens: float) -> Seconds | None:
        """How long a pack keeps the slowest resource."""
        lines = self._lines()
        return Seconds(max(a + b * tokens for a, b in lines)) if lines else None

    def loop(self, tokens: float) -> Seconds | None:
        """How long a pack is on its way when it waits for no other."""
        lines = self._lines()
        return Seconds(sum(a + b * tokens for a, b in lines) + min(self._latencies)) if lines else None

    def tokens_within(self, limit: Seconds) -> float:
        """The largest pack that keeps no resource for longer; inf where none minds."""
        return min(((limit - a) / b for a, b in self._lines() if b > 0), default=math.inf)

    def measured(self) -> Measured | None:
        """The same as the controller takes it; None while nothing is known."""
        if not self._stages:
            return None
        return Measured(tuple(stage.figures() for stage in self._stages), Seconds(min(self._latencies)))

    def _lines(self) -> list[tuple[float, float]]:
        return [line for stage in self._stages for line in stage.resources()]
