"""What a running job should change, decided by what it measures: how many micro-batches, and whether another
layout would repay the move. Pure: measurements in, decisions and their reasons out.

How a hop compresses is its sender's own decision (`breakeven`): that end has the newest figures of link and
codec, and knows by its lanes whether messages overlap. A word from here would come a loop later and would
need a message of its own, so the controller only says which hop it matters for (`hop_roles`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from bbquic.units import BytesPerSecond, Seconds

# Evidence for a change is what a step would gain (as a logarithm) over `least`, summed over looks: it is
# enough at `enough`. A tenth is acted on after 20 looks, a twentieth after 53, a fortieth after 240. Noise of
# ±10 % of every figure, new at each look, gets there once in some 20,000 looks.
LARGEST_GAIN = 0.4  # that one look may count for: a change takes four looks at least
KEPT = 8  # reasons for changes
REPAYS = 0.9  # of the time left as it is: a new layout that is thought to save less stays a thought


@dataclass(frozen=True, slots=True)
class Line:
    """t(T) = fixed + each · T, in seconds or bytes, of a pack of T tokens."""

    fixed: float = 0.0
    each: float = 0.0

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.each * tokens

    def by(self, factor: float) -> Line:
        """The same by something of which each is so many tokens."""
        return Line(self.fixed, self.each * factor)


NOTHING = Line()


@dataclass(frozen=True, slots=True)
class StageFigures:
    """A stage's lanes in seconds, what it sends in bytes, and its link's rate, None where not believed."""

    name: str
    inbound: Line
    compute: Line
    outbound: Line
    sent: Line
    rate: BytesPerSecond | None = None

    def times(self, tokens: float, onward: float | None = None) -> tuple[float, ...]:
        """Seconds that a pack keeps each resource: lanes, and the link where its rate is believed. `onward`
        tokens go on where these are not all."""
        sent = tokens if onward is None else onward
        lanes = self.inbound(tokens), self.compute(tokens), self.outbound(sent)
        return (*lanes, self.sent(sent) / self.rate) if self.rate else lanes

    def names(self) -> tuple[str, ...]:
        """The same resources in words."""
        link = f"link of {(self.rate or 0.0) * 8 / 1e6:.0f} Mbit/s"
        return tuple(f"{self.name}'s {one}" for one in ("inbound lane", "compute", "outbound lane", link))


@dataclass(frozen=True, slots=True)
class Measured:
    """The pipeline as packs meet it: stages in order, and the part of a loop that is nothing but distance.

    `drafting` is what guessing for a pack keeps the drafter, which serves all micro-batches.
    """

    stages: tuple[StageFigures, ...]
    latency: Seconds
    drafting: Line = NOTHING

    def bottleneck(self, tokens: float) -> tuple[str, Seconds]:
        """The resource that a pack keeps longest, and how long."""
        found = [
            one for stage in self.stages for one in zip(stage.names(), stage.times(tokens), strict=False)
        ]
        found.append(("the drafter", self.drafting(tokens)))
        name, longest = max(found, key=lambda one: one[1])
        return name, Seconds(longest)

    def times(self, tokens: float) -> list[float]:
        """Seconds that a pack keeps each resource of the pipeline."""
        lanes = [took for stage in self.stages for took in stage.times(tokens)]
        return [self.drafting(tokens), *lanes] if self.drafting != NOTHING else lanes

    def cycle(self, tokens: float) -> Seconds:
        return Seconds(max(self.times(tokens)))

    def loop(self, tokens: float) -> Seconds:
        return Seconds(sum(self.times(tokens)) + self.latency)

    def step(self, rows: int, count: int) -> Seconds:
        """`rows` sequences in `count` equal micro-batches: max(M · cycle(R / M), loop(R / M))."""
        times = self.times(rows / count)
        return Seconds(max(count * max(times), sum(times) + self.latency))


def steps_by_count(measured: Measured, rows: int, most: int) -> dict[int, Seconds]:
    """The step for each number of micro-batches that is possible; none has no rows."""
    return {count: measured.step(rows, count) for count in range(1, min(most, max(rows, 1)) + 1)}


@dataclass(slots=True)
class Evidence:
    """Cumulative sums of gains over `least` (Page's test): a steady gain adds up, noise does not."""

    least: float
    enough: float
    sums: dict[int, float] = field(default_factory=dict)

    def add(self, count: int, gain: float) -> bool:
        """Whether it is enough for this number now."""
        added = min(gain - self.least, LARGEST_GAIN)
        self.sums[count] = max(0.0, self.sums.get(count, 0.0) + added)
        return self.sums[count] >= self.enough


def _tests() -> tuple[Evidence, ...]:
    """One that is quick with large gains, one that is sure of small ones."""
    return Evidence(0.02, 1.6), Evidence(0.0075, 4.2)


@dataclass(slots=True)
class Grouping:
    """How many micro-batches a job's rows should be in, `target`: looked at about once a step.

    What was decided is compared from then on, whether or not it could be carried out yet.
    """

    target: int
    reasons: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    _evidence: tuple[Evidence, ...] = field(default_factory=_tests)

    def look(self, measured: Measured, rows: int, most: int) -> str | None:
        """`rows` live sequences, in `most` micro-batches at most; the reason where that changes `target`.

        Without rows nothing changes.
        """
        if rows < 1 or not measured.stages:
            return None
        steps = steps_by_count(measured, rows, most)
        present = min(self.target, len(steps))
        now = steps[present]
        proven = []
        for count, step in steps.items():
            gain = math.log(now / step) if step > 0 and now > 0 else 0.0
            found = [evidence.add(count, gain) for evidence in self._evidence]
            if any(found) and step < now:
                proven.append(count)
        if not proven:
            return None
        best = min(proven, key=lambda count: steps[count])
        change = f"{_counted(best)} in place of {present}, {seconds(steps[best])} a step in place of "
        reason = f"{change}{seconds(now)}: {_limit(measured, rows, best)}"
        self.target = best
        self._evidence = _tests()
        self.reasons.append(reason)
        return reason

    def state(self, measured: Measured, rows: int, most: int) -> str:
        """How it is now, in words with figures, and what the best other number would be."""
        if rows < 1 or not measured.stages:
            return "nothing measured yet"
        steps = steps_by_count(measured, rows, most)
        return _words(measured, rows, min(self.target, len(steps)), steps)


def _words(measured: Measured, rows: int, present: int, steps: dict[int, Seconds]) -> str:
    others = [count for count in steps if count != present]
    words = f"{_counted(present)}, {seconds(steps[present])} a step: {_limit(measured, rows, present)}"
    if others:
        best = min(others, key=lambda count: steps[count])
        words += f"; {best} would take {seconds(steps[best])}"
    return words


def _limit(measured: Measured, rows: int, count: int) -> str:
    """What such a step is made of."""
    each = rows / count
    name, cycle = measured.bottleneck(each)
    loop = measured.loop(each)
    if count * cycle > loop:
        return f"{count} x {seconds(cycle)} of {name}, over a loop of {seconds(loop)}"
    return f"a loop of {seconds(loop)}, {count} x {seconds(cycle)} of {name}"


def _counted(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def seconds(value: float) -> str:
    """A time as people read it: 12.3 ms, 345 ms, 6.7 s, 8 min."""
    if value >= 120:
        return f"{value / 60:.0f} min"
    if value >= 1:
        return f"{value:.1f} s"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value * 1000:.0f} ms"


def hop_roles(measured: Measured, rows: int, count: int) -> tuple[str, ...]:
    """For the link behind each stage but the last: what its compression is good for, with figures."""
    each = rows / count
    cycle, loop = measured.cycle(each), measured.loop(each)
    is_full = count * cycle > loop
    return tuple(_role(stage, each, cycle, loop, is_full) for stage in measured.stages[:-1])


def _role(stage: StageFigures, tokens: float, cycle: float, loop: float, is_full: bool) -> str:
    if not stage.rate:
        return f"{stage.name}'s link was never seen full"
    busy = stage.sent(tokens) / stage.rate
    if not is_full:
        return f"{stage.name}'s link is {busy / loop:.0%} of the loop: each byte less shortens it"
    if busy >= cycle:
        return (
            f"{stage.name}'s link is the bottleneck, {seconds(busy)} a pack: each byte less shortens a step"
        )
    return f"{stage.name}'s link is busy for {busy / cycle:.0%} of a cycle: fewer bytes change nothing"


@dataclass(frozen=True, slots=True)
class Load:
    """What one node would have to fetch for another layout: bytes from its disk and over the network, and the
    rates of both."""

    node: str
    from_disk: float = 0.0
    from_network: float = 0.0
    disk_rate: float = math.inf
    network_rate: float = math.inf

    @property
    def time(self) -> Seconds:
        return Seconds(self.from_disk / self.disk_rate + self.from_network / self.network_rate)


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Of another layout: what nodes load, side by side; tokens whose KV is computed anew, at so many a second
    as the new layout reads prompts; and what a plan costs by itself (dials, READY)."""

    loads: tuple[Load, ...]
    live_tokens: int
    prefill_rate: float  # tokens a second
    fixed: Seconds = Seconds(2.0)

    @property
    def loading(self) -> Seconds:
        return max((load.time for load in self.loads), default=Seconds(0.0))

    @property
    def recomputing(self) -> Seconds:
        if not self.live_tokens:
            return Seconds(0.0)
        return Seconds(self.live_tokens / self.prefill_rate if self.prefill_rate > 0 else math.inf)

    @property
    def time(self) -> Seconds:
        return Seconds(self.fixed + self.loading + self.recomputing)


@dataclass(frozen=True, slots=True)
class Prospect:
    """A layout as it runs and another that a search found for the newest measurements.

    `measured` is the present one's seconds a step, `predicted` what the model of costs says of it, `other`
    what it says of the new layout; batches are sequences a step.
    """

    measured: Seconds
    predicted: Seconds
    batch: int
    other: Seconds
    other_batch: int


@dataclass(frozen=True, slots=True)
class Relayout:
    """Whether to move, the job's seconds left if it stays and if it moves, and why."""

    repays: bool
    stays: Seconds
    moves: Seconds
    reason: str


def relayout(prospect: Prospect, cost: MoveCost, tokens_left: float) -> Relayout:
    """Whether another layout repays its cost over the `tokens_left` that the job is yet to generate.

    What the model errs by in the present layout, it is taken to err by in the other one too. Raises:
    ValueError for a step or a batch that is not above 0.
    """
    figures = (prospect.measured, prospect.predicted, prospect.other, prospect.batch, prospect.other_batch)
    if min(figures) <= 0 or tokens_left < 0:
        raise ValueError("steps and batches are above 0, and tokens that are left never below")
    error = prospect.measured / prospect.predicted
    other = prospect.other * error
    stays = Seconds(tokens_left / prospect.batch * prospect.measured)
    moves = Seconds(cost.time + tokens_left / prospect.other_batch * other)
    repays = moves < REPAYS * stays
    verb = "a new layout repays" if repays else "a new layout would not repay"
    rates = (prospect.batch / prospect.measured, prospect.other_batch / other)
    reason = (
        f"{verb}: {rates[1]:.1f} tokens/s in place of {rates[0]:.1f}, for {seconds(cost.time)} "
        f"({seconds(cost.loading)} to load, {seconds(cost.recomputing)} to read {cost.live_tokens} tokens "
        f"again); the rest would take {seconds(moves)} in place of {seconds(stays)}"
    )
    return Relayout(repays, stays, moves, reason)
