"""When guessing ahead pays: the paper's equations 5 to 8, and the same for circulating micro-batches. Pure.

Symbols (the paper's table 2): B sequences in flight, N guesses of a tree, D bytes of a hidden state, S
bandwidth, t_rtt the fixed latency of a transfer, t_comp a stage's compute a step, n stages, m the compute of
a pass with trees over one without, c drafting a pass, a tokens committed a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bbquic.plan.controller import NOTHING, Line, Measured, StageFigures
from bbquic.units import Bytes, BytesPerSecond, Seconds

TREE_TOKENS = 512  # guesses in a pack at most, so that what they take has a bound


@dataclass(frozen=True, slots=True)
class Passes:
    """What equations 5 to 8 ask for. Raises: ValueError for what cannot be."""

    batch: float  # B
    stages: int  # n
    hidden: Bytes  # D
    compute: Seconds  # t_comp
    latency: Seconds  # t_rtt
    guesses: float  # N
    committed: float  # a
    ratio: float  # m
    drafting: Seconds  # c

    def __post_init__(self) -> None:
        if min(self.batch, self.stages, self.hidden, self.ratio) <= 0:
            raise ValueError("sequences, stages, bytes and the ratio of compute are above 0")
        if min(self.compute, self.latency, self.drafting) < 0:
            raise ValueError("times are not below 0")
        if not 1 <= self.committed <= max(1.0, self.guesses):
            raise ValueError(f"{self.committed} tokens a pass are not what {self.guesses} guesses can give")


def autoregressive_time(of: Passes, bandwidth: BytesPerSecond, tokens: float) -> Seconds:
    """Equation 5: L · (n · t_comp + n · B · D / S + n · t_rtt)."""
    hop = of.batch * of.hidden / bandwidth
    return Seconds(tokens * of.stages * (of.compute + hop + of.latency))


def speculative_time(of: Passes, bandwidth: BytesPerSecond, tokens: float) -> Seconds:
    """Equation 6: L / a · (c + n · m · t_comp + n · B · N · D / S + n · t_rtt)."""
    hop = of.batch * of.guesses * of.hidden / bandwidth
    stages = of.stages * (of.ratio * of.compute + hop + of.latency)
    return Seconds(tokens / of.committed * (of.drafting + stages))


def break_even_bandwidth(of: Passes) -> BytesPerSecond | None:
    """Equation 8: speculation pays above S* = B (N - a) D / ((a - 1) t_rtt + (a - m) t_comp - c / n).

    None where the denominator is not above 0: then no bandwidth helps. (The paper prints c / (n · a) in
    places; the derivation gives c / n.) It is the case of one micro-batch: a full pipeline saves no trip.
    """
    saved = (of.committed - 1) * of.latency + (of.committed - of.ratio) * of.compute - of.drafting / of.stages
    if saved <= 0:
        return None
    return BytesPerSecond(of.batch * (of.guesses - of.committed) * of.hidden / saved)


def tree_room(guesses: int) -> int:
    """Cells beyond its tokens of a sequence whose trees have so many guesses, for them and their holes."""
    return 3 * (guesses + 1) if guesses else 0


def pays(committed: float, with_trees: Seconds, without: Seconds) -> bool:
    """Architecture §4: whether E[a] / step_spec > 1 / step_auto."""
    return committed * without > with_trees


@dataclass(frozen=True, slots=True)
class Trees:
    """What speculation adds to a row: `guesses` beside its token on the first stage, `kept` of them behind
    it, and `committed` tokens a pass. `drafting` is the drafter's time for a micro-batch, by rows.

    Raises: ValueError for fewer guesses than are kept, or fewer than one token a pass.
    """

    guesses: float = 0.0
    kept: float = 0.0
    committed: float = 1.0
    drafting: Line = NOTHING

    def __post_init__(self) -> None:
        if not 0 <= self.kept <= self.guesses:
            raise ValueError(f"{self.kept} guesses are kept of {self.guesses}")
        if self.committed < 1:
            raise ValueError("a pass commits a token at least")


PLAIN = Trees()


def with_trees(measured: Measured, trees: Trees) -> Measured:
    """The pipeline for rows that are trees: T = rows · (1 + N) in the first stage's compute, rows · (1 + N')
    in what it sends and behind it. The drafter is in the loop, and a resource of its own cycle."""
    if not measured.stages:
        return measured
    first, *others = (_widened(stage, 1 + trees.kept) for stage in measured.stages)
    whole = measured.stages[0]
    wide = 1 + trees.guesses
    first = replace(first, inbound=whole.inbound.by(wide), compute=whole.compute.by(wide))
    return Measured((first, *others), measured.latency, trees.drafting)


def _widened(stage: StageFigures, tokens: float) -> StageFigures:
    return replace(
        stage,
        inbound=stage.inbound.by(tokens),
        compute=stage.compute.by(tokens),
        outbound=stage.outbound.by(tokens),
        sent=stage.sent.by(tokens),
    )


def times_with_trees(measured: Measured, rows: float, trees: Trees) -> list[float]:
    """Seconds that a micro-batch of so many rows keeps the drafter and each resource of the pipeline."""
    whole, kept = rows * (1 + trees.guesses), rows * (1 + trees.kept)
    times = [trees.drafting(rows)]
    for place, stage in enumerate(measured.stages):
        times += stage.times(kept) if place else stage.times(whole, kept)
    return times


def step_with_trees(measured: Measured, rows: int, count: int, trees: Trees) -> Seconds:
    """step = max(M · cycle, loop) of `rows` sequences in `count` micro-batches, all with such trees."""
    times = times_with_trees(measured, rows / count, trees)
    return Seconds(max(count * max(times), sum(times) + measured.latency))


def row_rate(measured: Measured, rows: int, count: int, trees: Trees) -> float:
    """E[a] / step: tokens a second of a sequence. Speculation is used iff it is above that of `PLAIN`."""
    return trees.committed / step_with_trees(measured, rows, count, trees)
