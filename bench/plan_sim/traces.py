"""The controller in simulation under link rates that change, beside every setting that stays.

`stepping` and `evening` give figures; both are plain functions, exact from run to run.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from bbquic.plan.breakeven import CodecSample, CodecSwitch, HopConditions, Way
from bbquic.plan.cluster import Cluster, JobShape, Layout, LinkProfile, ModelSizes, PlannedStage
from bbquic.plan.controller import Grouping, Line, Measured, StageFigures
from bbquic.plan.cost import WIRE, codec_of, load_of
from bbquic.plan.decider import Decision, HopSeen, Seen
from bbquic.plan.simulate import StepsResult, simulate_steps
from bbquic.plan.varying import Conditions, Varying
from bbquic.runtime.costs import KEEP_CODED, LATENCIES, LinearFit
from bbquic.units import Bytes, BytesPerSecond, Seconds
from bench.plan_sim.clusters import GB, MBIT, profile

WAYS = (Way.RAW, Way.H8, Way.REC)
MOST = 8  # micro-batches
NOISE = 0.1  # of every figure that is measured, evenly to both sides
MODEL = ModelSizes(
    name="8b",
    blocks=32,
    hidden=4096,
    intermediate=14336,
    vocabulary=128_256,
    value_bytes=2,
    block_weights=Bytes(436_000_000),
    embed_weights=Bytes(1_050_000_000),
    head_weights=Bytes(1_050_000_000),
    kv_bytes=Bytes(4096),
)
JOB = JobShape(sequences=100_000, prompt=64, output=256, longest=256, slot=512)
BATCH = 128
STAGES = (("cloud", 18, 900e9), ("home", 8, 400e9), ("desk", 6, 300e9))  # node, blocks, bytes/s of its memory
SLOW_CODEC = {"cloud": 1.0, "home": 0.4, "desk": 0.6}  # of a usual processor


@dataclass(frozen=True, slots=True)
class Trace:
    """Rates of the links between stages, Mbit/s from times on, and the bounds of its phases, seconds."""

    name: str
    links: tuple[tuple[tuple[float, float], ...], ...]  # a hop: (seconds, Mbit/s) ...
    phases: tuple[float, ...]  # their bounds


def stepping_trace(phase: float = 120.0) -> Trace:
    """500, 20 and 125 Mbit/s out of the cloud, one after the other; the home's own line stays."""
    steps = tuple((number * phase, rate) for number, rate in enumerate((500.0, 20.0, 125.0)))
    return Trace("500 -> 20 -> 125 Mbit/s", (steps, ((0.0, 200.0),)), tuple(n * phase for n in range(4)))


def evening_trace(hour: float = 60.0, seed: int = 1) -> Trace:
    """A day from noon to noon, each hour in `hour` seconds: a home's way up falls from 100 to 15 Mbit/s in
    the evening and comes back, with noise of some 15 % every tenth of an hour; its way down falls by half."""
    source = random.Random(seed)
    up, down = [], []
    for tenth in range(240):
        clock = (12 + tenth / 10) % 24
        evening = max(0.0, 1 - abs(clock - 20.5) / 3.5)  # 17 to 24 o'clock
        noise = math.exp(source.gauss(0, 0.15))
        up.append((tenth * hour / 10, 100 * (0.15 ** min(1.0, 1.4 * evening)) * noise))
        down.append((tenth * hour / 10, 300 * (0.5**evening) * noise))
    return Trace("a day", (tuple(down), tuple(up)), tuple(n * 2 * hour for n in range(13)))


def cluster_of() -> Cluster:
    nodes = tuple(profile(name, MODEL, speed, 80 * GB, SLOW_CODEC[name]) for name, _, speed in STAGES)
    names = ("command", *(name for name, _, _ in STAGES))
    link = LinkProfile(BytesPerSecond(200 * MBIT), Seconds(0.012))
    return Cluster(nodes, {(a, b): link for a in names for b in names if a != b})


def layout_of(count: int, ways: tuple[Way, ...]) -> Layout:
    ends = [sum(blocks for _, blocks, _ in STAGES[:place]) for place in range(len(STAGES) + 1)]
    held = zip(STAGES, pairwise(ends), strict=True)
    stages = tuple(PlannedStage(name, first, stop) for (name, _, _), (first, stop) in held)
    return Layout(stages, BATCH, count, ways)


class LiveDecider:
    """The controller's Grouping and each hop's CodecSwitch as a job runs them, over fits of what packs took,
    with noise on every figure. Rates are means over the newest messages, so they lag.
    Distance is what a job sees of it: its stages tell how long packs waited in them.

    A hop's messages count as overlapped where it is the bottleneck of a full pipeline: there its slowest part
    is what it takes; elsewhere all its parts are in the loop. A sender at work knows less: it takes them for
    overlapped while other packs are in its stage's lanes (`runtime.hop`); what that costs, emulated links
    show.
    """

    def __init__(self, cluster: Cluster, ways: tuple[Way, ...], start: int, seed: int = 0) -> None:
        self.grouping = Grouping(start)
        hops = pairwise(("command", *(name for name, _, _ in STAGES), "command"))
        self._distance = sum(cluster.links[hop].delay for hop in hops)
        self._nodes = [cluster.node(name) for name, _, _ in STAGES]
        self._noise = random.Random(seed)
        self._switches = [CodecSwitch() for _ in ways]
        self._overlap = [0.0 for _ in ways]
        self._compute = [LinearFit() for _ in STAGES]
        self._out = [LinearFit(KEEP_CODED) for _ in ways]
        self._into = [LinearFit(KEEP_CODED) for _ in ways]
        self._sent = [LinearFit(KEEP_CODED) for _ in ways]
        self._rates: list[BytesPerSecond | None] = [None for _ in ways]
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._look_at = 0

    def _noisy(self, value: float) -> float:
        return value * self._noise.uniform(1 - NOISE, 1 + NOISE)

    def decide(self, seen: Seen) -> Decision:
        ways = tuple(hop.way for hop in seen.hops)
        if not seen.compute:
            return Decision(ways, self.grouping.target)
        tokens = seen.hops[0].payload / (MODEL.hidden * MODEL.value_bytes)
        for fit, took in zip(self._compute, seen.compute, strict=True):
            fit.add(tokens, self._noisy(took))
        for number, hop in enumerate(seen.hops):
            self._learn(number, hop, tokens)
        self._latencies.append(self._distance * self._noise.uniform(1, 1 + NOISE))  # jitter only adds
        measured = self._measured()
        if seen.step >= self._look_at:
            self._look_at = seen.step + seen.micro_batches
            whole = load_of(JOB, BATCH, 1).tokens
            self.grouping.look(measured, round(whole), MOST)
        cycle = measured.cycle(tokens)
        full = seen.micro_batches * cycle > measured.loop(tokens)
        for number in range(len(ways)):
            stage, next_stage = measured.stages[number : number + 2]
            rate = self._rates[number]
            assert rate is not None
            parts = (stage.outbound(tokens), stage.sent(tokens) / rate, next_stage.inbound(tokens))
            limits = full and max(parts) >= cycle
            self._overlap[number] += 0.1 * (limits - self._overlap[number])
        chosen = (self._choose(number, hop) for number, hop in enumerate(seen.hops))
        return Decision(tuple(chosen), self.grouping.target)

    def _learn(self, number: int, hop: HopSeen, tokens: float) -> None:
        """Fits of a hop."""
        assert hop.rate is not None
        codec = codec_of(self._nodes[number], hop.way)
        assert codec is not None
        self._rates[number] = BytesPerSecond(self._noisy(hop.rate))
        sent = hop.payload * codec.ratio * WIRE
        self._out[number].add(tokens, self._noisy(hop.out))
        self._into[number].add(tokens, self._noisy(hop.into))
        self._sent[number].add(tokens, sent)

    def _measured(self) -> Measured:
        stages = []
        for place, (name, _, _) in enumerate(STAGES):
            has_hop = place < len(self._out)
            stages.append(
                StageFigures(
                    name,
                    Line(*self._into[place - 1].line) if place else Line(),
                    Line(*self._compute[place].line),
                    Line(*self._out[place].line) if has_hop else Line(),
                    Line(*self._sent[place].line) if has_hop else Line(),
                    self._rates[place] if has_hop else None,
                )
            )
        return Measured(tuple(stages), Seconds(min(self._latencies)))

    def _choose(self, number: int, hop: HopSeen) -> Way:
        """As `runtime.hop` does; each codec is probed, so to say, with every message."""
        switch, raw = self._switches[number], Bytes(round(hop.payload))
        sender, receiver = self._nodes[number], self._nodes[number + 1]
        for way in (Way.H8, Way.REC):
            here, there = codec_of(sender, way), codec_of(receiver, way)
            if here is not None and there is not None:
                times = (Seconds(self._noisy(raw * speed)) for speed in (here.encode, there.decode))
                switch.note(way, CodecSample(raw, Bytes(round(raw * here.ratio)), *times))
        return switch.choose(HopConditions(self._rates[number], raw, self._overlap[number] > 0.5)).way


def stepping(phase: float = 120.0) -> dict[str, Any]:
    return compare(stepping_trace(phase))


def evening(hour: float = 60.0) -> dict[str, Any]:
    return compare(evening_trace(hour))


def compare(trace: Trace, *, most: int = MOST, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Tokens of the controller over a trace, beside every number of micro-batches with every way of each hop.

    `of_phases`: over the sum of what the best setting of each phase has in it; `of_best`: over the setting
    that is best over the whole trace.
    """
    cluster = cluster_of()
    conditions = _conditions(trace)
    start = layout_of(4, (Way.RAW,) * (len(STAGES) - 1))
    live = LiveDecider(cluster, start.ways, start.micro_batches)
    end = Seconds(trace.phases[-1])
    result = simulate_steps(cluster, MODEL, JOB, start, until=end, conditions=conditions, decider=live)
    ours = _tokens(result, trace)
    settings = {}
    for count, ways in product(range(1, most + 1), product(WAYS, repeat=len(STAGES) - 1)):
        layout = layout_of(count, ways)
        ran = simulate_steps(cluster, MODEL, JOB, layout, until=end, conditions=conditions)
        settings[f"{count} x {','.join(ways)}"] = _tokens(ran, trace)
    best = max(settings, key=lambda name: sum(settings[name]))
    by_phase = [max(settings, key=lambda name: settings[name][place]) for place in range(len(ours))]
    most_of_phases = [settings[name][place] for place, name in enumerate(by_phase)]
    figures = {
        "trace": trace.name,
        "seconds": float(end),
        "settings": len(settings),
        "tokens": sum(ours),
        "of_phases": sum(ours) / sum(most_of_phases),
        "worst_phase": min(mine / other for mine, other in zip(ours, most_of_phases, strict=True)),
        "of_best": sum(ours) / sum(settings[best]),
        "best": best,
        "best_by_phase": by_phase,
        "changes_of_micro_batches": len(live.grouping.reasons),
        "decisions": [
            (round(time, 2), decision.micro_batches, ",".join(decision.ways))
            for time, decision in result.decisions
        ],
        "reasons": list(live.grouping.reasons),
    }
    if say is not None:
        say(summary(figures))
    return figures


def summary(figures: dict[str, Any]) -> str:
    return (
        f"{figures['trace']}: {figures['of_phases']:.3f} of the best of each phase, {figures['of_best']:.3f} "
        f"of the best of {figures['settings']} settings ({figures['best']}), "
        f"{len(figures['decisions']) - 1} changes"
    )


def _conditions(trace: Trace) -> Conditions:
    names = [name for name, _, _ in STAGES]
    return Conditions(
        rates={
            pair: Varying(tuple((time, rate * MBIT) for time, rate in points))
            for pair, points in zip(pairwise(names), trace.links, strict=True)
        }
    )


def _tokens(result: StepsResult, trace: Trace) -> list[float]:
    return [result.tokens_between(start, stop) for start, stop in pairwise(trace.phases)]


if __name__ == "__main__":
    for found in (stepping(), evening()):
        print(summary(found))
        print({key: value for key, value in found.items() if key != "decisions"})
        print(found["decisions"][:60])
