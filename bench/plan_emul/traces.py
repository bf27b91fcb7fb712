"""Links that change under way: what is chosen live against every setting that stays as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bbquic.plan.cluster import JobShape, Layout
from bench.common import median
from bench.plan_emul.emulation import Emulation, emulated
from bench.plan_emul.predict import layout_of
from bench.plan_emul.scene import Pair, Scene, joined, machine, model
from bench.stand_in.cell import CodecName, tokens_between
from bench.stand_in.observed import Passed

START_S = 3.0  # a run is on its way by then: what comes before does not count
MICRO_BATCHES = (1, 2, 4, 8)
MOST = 8
CODECS: tuple[CodecName, ...] = ("raw", "REC")
BATCH = 32
LIVE = "live"
NEAR_BEST = 0.9  # of the best: a setting that is not, is not run again
LAST_S = 2.0  # of a phase: which micro-batches came back in them


@dataclass(frozen=True)
class Trace:
    """Rates in Mbit/s, each for some seconds, of some of a scene's links."""

    name: str
    scene: Scene
    phases: tuple[tuple[float, float], ...]  # Mbit/s, seconds
    links: tuple[Pair, ...]

    @property
    def seconds(self) -> float:
        return sum(lasts for _, lasts in self.phases)


@dataclass
class Traced:
    """Tokens a second of each setting, over the whole trace and by phases, in every round."""

    trace: str
    whole: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The setting that stays as it is and does best over all of the trace."""
        return max((name for name in self.whole if name != LIVE), key=lambda name: median(self.whole[name]))

    @property
    def ratio(self) -> float:
        """Live over the best one that stays as it is."""
        return median(self.whole[LIVE]) / median(self.whole[self.best])

    def may_be_best(self, name: str) -> bool:
        """Whether its first round was near the best one's, over all or in one phase; and the live one."""
        firsts = {one: [self.whole[one][0], *self.phases[one][0]] for one in self.whole if one != LIVE}
        best = [max(rates) for rates in zip(*firsts.values(), strict=True)]
        own = firsts.get(name, best)
        return any(rate >= NEAR_BEST * most for rate, most in zip(own, best, strict=True))

    def phase_ratios(self) -> list[float]:
        """Of each phase: live over the setting that does best in it."""
        middles = {
            name: [median(part) for part in zip(*rounds, strict=True)] for name, rounds in self.phases.items()
        }
        best = [max(parts) for parts in zip(*(m for name, m in middles.items() if name != LIVE), strict=True)]
        return [ours / other for ours, other in zip(middles[LIVE], best, strict=True)]


BLOCKS = (("a", 10), ("b", 10), ("c", 10))
JOB = JobShape(sequences=BATCH, prompt=0, output=64, longest=64, slot=64)
NAMES = ("a", "b", "c")


def _scene(name: str, *links: tuple[str, str, float, float]) -> Scene:
    return Scene(
        name, model(name, 30, 6656), tuple(machine(host, 2.0) for host in NAMES), joined(*links), JOB
    )


STEPPED_SCENE = _scene("stepped", ("a", "b", 500, 20), ("b", "c", 500, 20), ("a", "c", 500, 20))
STEPPED = Trace(
    "stepped",
    STEPPED_SCENE,
    ((500, 6), (20, 12), (125, 8)),
    tuple((a, b) for a in NAMES for b in NAMES if a != b),
)
# A home's line in the evening: 60 Mbit/s go down to 12 and up again; what is sent to it is not affected.
CONGESTED = Trace(
    "congested",
    _scene("congested", ("a", "b", 60, 15), ("b", "c", 200, 20), ("a", "c", 60, 15)),
    ((60, 6), (25, 6), (12, 10), (60, 6)),
    (("a", "b"), ("a", "c")),
)
TRACES = (STEPPED, CONGESTED)


@dataclass(frozen=True)
class Setting:
    """What a run begins with; a live one goes on from there with up to MOST micro-batches, as it sees fit."""

    micro_batches: int
    codec: CodecName
    live: bool = False

    @property
    def name(self) -> str:
        return LIVE if self.live else f"M={self.micro_batches} {self.codec}"

    @property
    def layout(self) -> Layout:
        return layout_of(BLOCKS, BATCH, self.micro_batches)


SETTINGS = (
    *(Setting(count, codec) for count in MICRO_BATCHES for codec in CODECS),
    Setting(4, "auto", live=True),
)


def compare(trace: Trace, tried: Sequence[Setting], rounds: int, report: Callable[[str], None]) -> Traced:
    """Run the settings through the trace, in turn; after the first round only those that may be best."""
    names = [setting.name for setting in tried]
    found = Traced(trace.name, {name: [] for name in names}, {name: [] for name in names})
    weights = [lasts for _, lasts in trace.phases]
    with emulated(trace.scene, [setting.layout for setting in tried]) as emulation:
        for number in range(rounds):
            for setting in [one for one in tried if not number or found.may_be_best(one.name)]:
                ran = run(emulation, trace, setting)
                whole = sum(a * b for a, b in zip(ran.rates, weights, strict=True)) / trace.seconds
                found.whole[setting.name].append(whole)
                found.phases[setting.name].append(ran.rates)
                report(f"{trace.name} {number} {setting.name}: {whole:.1f} tok/s, by phases {ran}")
    return found


@dataclass(frozen=True)
class ByPhase:
    """Tokens a second in each phase, and how many micro-batches there were at its end."""

    rates: list[float]
    micro_batches: list[int]

    def __str__(self) -> str:
        both = zip(self.rates, self.micro_batches, strict=True)
        return ", ".join(f"{rate:.0f} (M={count})" for rate, count in both)


def run(emulation: Emulation, trace: Trace, setting: Setting) -> ByPhase:
    """One run through the trace."""
    seconds, most = START_S + trace.seconds, MOST if setting.live else None
    with _changing(emulation, trace) as moments:
        passes = emulation.run_for(setting.layout, setting.codec, seconds, most)
    phases = list(pairwise(moments))
    return ByPhase(
        [tokens_between(passes, began, ended) for began, ended in phases],
        [_in_use(passes, max(began, ended - LAST_S), ended) for began, ended in phases],
    )


def _in_use(passes: Sequence[Passed], began: float, ended: float) -> int:
    return len({one.micro_batch for one in passes if began <= one.received < ended})


@contextmanager
def _changing(emulation: Emulation, trace: Trace) -> Iterator[list[float]]:
    """Change the links at the trace's moments; gives those, the last one's end too, on the hosts' clock."""

    def change(rate: float) -> None:
        for pair in trace.links:
            emulation.processes.wan.set(*pair, rate_mbps=rate)

    change(trace.phases[0][0])
    moments = [time.monotonic() + START_S]
    for _, lasts in trace.phases:
        moments.append(moments[-1] + lasts)
    timers: list[Any] = [
        threading.Timer(at - time.monotonic(), change, (rate,))
        for at, (rate, _) in zip(moments[1:-1], trace.phases[1:], strict=True)
    ]
    for timer in timers:
        timer.start()
    try:
        yield moments
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
