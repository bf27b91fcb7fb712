"""A coordinator far from the first stage, and the same one on the stage's node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bbquic.plan.cluster import COMMAND
from bench.common import median
from bench.plan_emul.emulation import emulated
from bench.plan_emul.predict import layout_of
from bench.plan_emul.scene import Scene, home_of
from bench.stand_in.observed import Passed

BLOCKS = (("a", 12), ("b", 12))


@dataclass(frozen=True)
class Places:
    """Seconds of the same job, from its first rows to its last tokens, in every round."""

    command: Sequence[float]
    stage: Sequence[float]

    @property
    def ratio(self) -> float:
        """The job on the stage's node over the job in the command's process."""
        return median(self.stage) / median(self.command)


def compare(scene: Scene, blocks: tuple[tuple[str, int], ...], rounds: int, steps: int) -> Places:
    """A job of `steps` tokens for each of 32 sequences in four micro-batches, both ways in turn."""
    layouts = {place: layout_of(blocks, 32, 4, place) for place in (COMMAND, blocks[0][0])}
    seconds: dict[str, list[float]] = {place: [] for place in layouts}
    with emulated(scene, layouts.values()) as emulation:
        for _ in range(rounds):
            for place, layout in layouts.items():
                cell = scene.cell(layout, codec="auto", warm_up=0, counted=steps)
                seconds[place].append(_took(emulation.processes.run(cell, home_of(layout))))
    return Places(seconds[COMMAND], seconds[blocks[0][0]])


def _took(passes: Sequence[Passed]) -> float:
    return max(one.received for one in passes) - min(one.sent for one in passes)
