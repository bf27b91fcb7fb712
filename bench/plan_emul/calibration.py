"""The constant overheads of a pack, from runs that predict nothing: a row of like stages, of 1 to 4."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bbquic.plan.cluster import JobShape
from bbquic.units import Seconds
from bench.plan_emul.emulation import emulated
from bench.plan_emul.figures import Figures, Overhead, codec_speeds
from bench.plan_emul.predict import layout_of, predict
from bench.plan_emul.scene import DTYPE, Scene, joined, machine, model

NAMES = ("a", "b", "c", "d")
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


def calibrate(counted: int = 12, stages: Sequence[int] = (1, 2, 3, 4)) -> Figures:
    """Overheads and codec speeds of this machine."""
    layouts = [
        layout_of(tuple((name, BLOCKS // count) for name in NAMES[:count]), BATCH, 1) for count in stages
    ]
    row = scene(max(stages))
    with emulated(row, layouts) as emulation:
        steps = [emulation.run(layout, "raw", counted=counted).step for layout in layouts]
    free = [predict(row, Figures(), layout).step for layout in layouts]
    rest = [step - predicted for step, predicted in zip(steps, free, strict=True)]
    return Figures(overhead(stages, rest), codecs_alone().codecs)


def codecs_alone() -> Figures:
    """Codec speeds in this process, and no overheads."""
    return Figures(codecs=codec_speeds(DTYPE, HIDDEN, BATCH))


def overhead(stages: Sequence[int], rest: Sequence[float]) -> Overhead:
    """Of what steps of so many stages took beyond their prediction: a part for each stage, and one for all.

    Neither is negative.
    """
    counts = np.array(stages, dtype=float)
    each, once = np.polyfit(counts, np.array(rest), 1) if len(stages) > 1 else (0.0, rest[0])
    if once < 0:
        each, once = float(np.sum(counts * rest) / np.sum(counts * counts)), 0.0
    elif each < 0:
        each, once = 0.0, float(np.mean(rest))
    return Overhead(Seconds(max(0.0, float(each))), Seconds(max(0.0, float(once))))
