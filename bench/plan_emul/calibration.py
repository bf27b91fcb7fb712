"""The constant overheads of a pack, from runs that predict nothing: a row of like stages, of 1 to 4."""

from __future__ import annotations

from collections.abc import Mapping

from bbquic.plan.cluster import JobShape
from bbquic.units import Seconds
from bench.plan_emul.emulation import emulated
from bench.plan_emul.figures import Figures, Overhead, codec_speeds
from bench.plan_emul.predict import layout_of, predict
from bench.plan_emul.scene import DTYPE, Scene, joined, machine, model

NAMES = ("a", "b", "c", "d")
STAGES = (1, 2, 3, 4)  # a loop of n > 1 stages has n - 1 hops and the way back
CIRCULATING = 4  # micro-batches that keep one stage busy
BLOCKS = 12  # one, two, three or four stages of equal length
BATCH = 32
JOB = JobShape(sequences=BATCH, prompt=0, output=64, longest=64, slot=64)
HIDDEN = 4096


def scene(nodes: int) -> Scene:
    """Like nodes on like links."""
    names = NAMES[:nodes]
    links = joined(*((one, other, 80, 10) for one in names for other in names if one < other))
    sizes = model("calibration", BLOCKS, HIDDEN)
    return Scene("calibration", sizes, tuple(machine(name, 2.0) for name in names), links, JOB)


def calibrate(counted: int = 12) -> Figures:
    """Overheads and codec speeds of this machine."""
    busy = layout_of((("a", BLOCKS),), BATCH, CIRCULATING)
    rows = [layout_of(tuple((name, BLOCKS // n) for name in NAMES[:n]), BATCH, 1) for n in STAGES]
    like = scene(max(STAGES))
    rest = []
    with emulated(like, [busy, *rows]) as emulation:
        for layout in (busy, *rows):
            step = emulation.run(layout, "raw", counted=counted).step
            rest.append(step - predict(like, Figures(), layout).step)
    return Figures(overhead(rest[0], dict(zip(STAGES, rest[1:], strict=True))), codecs_alone().codecs)


def codecs_alone() -> Figures:
    """Codec speeds in this process, and no overheads."""
    return Figures(codecs=codec_speeds(DTYPE, HIDDEN, BATCH))


def overhead(busy: float, rows: Mapping[int, float]) -> Overhead:
    """Overheads from what steps took beyond their predictions without any: `busy` of one stage that is never
    without a pack, `rows` of one pack going round so many stages. None of them is negative.
    """
    stage = max(0.0, busy / CIRCULATING)
    coordinator = max(0.0, rows[1] - stage)
    hops = [(rest - count * stage - coordinator) / count for count, rest in rows.items() if count > 1]
    return Overhead(Seconds(stage), Seconds(max(0.0, sum(hops) / len(hops))), Seconds(coordinator))
