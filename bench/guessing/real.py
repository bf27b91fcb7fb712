"""Break-even points of a real model: measured speed-ups beside those that architecture §4 predicts.

Costs are learnt on a link without limit or delay, of the same rows with and without trees; the prediction
adds the link's nominal rate and round trip, and takes from the run itself only what the drafter gave, what of
it was right, and the drafter's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bbquic.model.directory import ModelDirectory
from bbquic.plan.controller import Line, Measured
from bbquic.plan.cost import WIRE
from bbquic.plan.speculation import PLAIN, Trees, row_rate
from bbquic.runtime.costs import StepCosts
from bbquic.runtime.hop import CodecMode
from bbquic.units import BytesPerSecond, Seconds
from bench.common import median
from bench.guessing.home import Mode, Pass, Told, Work
from bench.guessing.jobs import Kind, check_equal, prompts
from bench.guessing.nodes import RealNodes

ROUNDS = 3
ANSWERS: Mapping[Mode, int] = {"off": 40, "always": 112}  # tokens, end tokens or not: of about as many passes


@dataclass(frozen=True, slots=True)
class Point:
    """A link, a batch in one micro-batch, and always so many guesses a row."""

    rate_mbps: float
    rtt_ms: float
    batch: int
    guesses: int
    kind: Kind
    answers: Mapping[Mode, int] = field(default_factory=lambda: ANSWERS, compare=False)

    def work(self, directory: ModelDirectory, mode: Mode) -> Work:
        """End tokens end nothing: rows are there until the first of them has its whole answer."""
        return Work(
            prompts=prompts(directory, self.kind)[: self.batch],
            answer=self.answers[mode],
            batch=self.batch,
            mode=mode,
            guesses=self.guesses,
            micro_batches=1,
            ends=False,
            codec=CodecMode.RAW,
        )


POINTS = (  # on either side of the break-even, and near it
    Point(20, 10, 8, 31, "quoting"),
    Point(50, 50, 8, 16, "ordinary"),
    Point(125, 100, 8, 8, "quoting"),
)
QUICK = (Point(125, 10, 2, 2, "quoting", {"off": 6, "always": 12}),)


@dataclass(frozen=True, slots=True)
class Steady:
    """Passes of a run with all of its rows, behind the prompts; not the first, which warms up."""

    rows: int
    passes: Sequence[Pass]
    drafting: Seconds  # the drafter's of a pass

    @classmethod
    def of(cls, work: Work, told: Told) -> Steady:
        behind = max(place for place, one in enumerate(told.passes) if one.reads) + 2
        whole = [one for one in told.passes[behind:] if one.rows == work.batch and not one.reads]
        assert len(whole) > 1, f"of {len(told.passes)} passes {len(whole)} have all {work.batch} rows"
        drafting = told.drafts.seconds / len(told.passes)
        return cls(work.batch, whole, Seconds(drafting))

    @property
    def committed(self) -> float:
        """Tokens of a row and pass."""
        return sum(one.committed for one in self.passes) / len(self.passes) / self.rows

    @property
    def given(self) -> float:
        """Guesses of a row and pass."""
        return sum(one.tokens for one in self.passes) / len(self.passes) / self.rows - 1

    @property
    def rate(self) -> float:
        """Tokens a second of all rows. A step lasts from a pack's leaving to the next one's, so that the turn
        at the coordinator is in it."""
        steps = [
            after.sent - before.sent for before, after in zip(self.passes, self.passes[1:], strict=False)
        ]
        return self.rows * self.committed * len(steps) / sum(steps)


def calibrated(runs: Sequence[Steady]) -> Measured:
    """What a pack costs, as a coordinator learns it, from runs without any link."""
    costs = StepCosts()
    for steady in runs:
        for one in steady.passes:
            costs.record(one.tokens, Seconds(one.came - one.sent), one.timings)
    measured = costs.measured()
    assert measured is not None, "no pass tells what it cost"
    return measured


def on_link(measured: Measured, point: Point) -> Measured:
    """The same with the link between the stages, and the way back."""
    first, *others = measured.stages
    rate = BytesPerSecond(point.rate_mbps * 1e6 / 8 / WIRE)
    latency = Seconds(measured.latency + point.rtt_ms / 1e3)
    return replace(measured, stages=(replace(first, rate=rate), *others), latency=latency)


@dataclass(frozen=True, slots=True)
class Found:
    """A point's speed-up as measured, median of its rounds, and as predicted; and what went into it."""

    point: Point
    measured: float
    rounds: tuple[float, ...]
    predicted: float
    committed: float
    given: float
    tokens_per_second: float  # without guesses

    @property
    def error(self) -> float:
        return abs(self.measured / self.predicted - 1)

    def __str__(self) -> str:
        at = self.point
        return (
            f"{at.rate_mbps:.0f} Mbit/s {at.rtt_ms:.0f} ms B={at.batch} N={at.guesses} {at.kind}: "
            f"x{self.measured:.3f} ({min(self.rounds):.3f} to {max(self.rounds):.3f}), predicted "
            f"x{self.predicted:.3f}, off by {self.error:.0%}; a={self.committed:.2f} of {self.given:.1f} "
            f"guesses, {self.tokens_per_second:.1f} tok/s without"
        )


def find(nodes: RealNodes, directory: ModelDirectory, point: Point, rounds: int) -> Found:
    """Without and with guesses, near and on the link, in turn. Raises: AssertionError where tokens differ."""
    near: list[Steady] = []
    pairs: list[tuple[Steady, Steady]] = []
    for _ in range(rounds):
        near += _pair(nodes.at(None, 0), directory, point)
        pairs.append(_pair(nodes.at(point.rate_mbps, point.rtt_ms), directory, point))
    ratios = tuple(on.rate / off.rate for off, on in pairs)
    committed = median([on.committed for _, on in pairs])
    given = median([on.given for _, on in pairs])
    trees = Trees(given, given, committed, Line(median([on.drafting for _, on in pairs])))
    costs = on_link(calibrated(near), point)
    predicted = row_rate(costs, point.batch, 1, trees) / row_rate(costs, point.batch, 1, PLAIN)
    plain = median([off.rate for off, _ in pairs])
    return Found(point, median(ratios), ratios, predicted, committed, given, plain)


def _pair(nodes: RealNodes, directory: ModelDirectory, point: Point) -> tuple[Steady, Steady]:
    """Without guesses and with them, on the link as it is."""
    works = [point.work(directory, mode) for mode in ("off", "always")]
    plain, guessed = (nodes.run(work) for work in works)
    check_equal(plain, guessed)
    return Steady.of(works[0], plain), Steady.of(works[1], guessed)


def break_even_points(nodes: RealNodes, directory: ModelDirectory, *, quick: bool) -> Iterator[Found]:
    """All of them, each printed as it is found."""
    for point in QUICK if quick else POINTS:
        found = find(nodes, directory, point, 1 if quick else ROUNDS)
        print(found, flush=True)
        yield found
