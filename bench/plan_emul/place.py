"""A coordinator far from the first stage, and the same one on the stage's node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bbquic.plan.cluster import COMMAND, Layout
from bench.common import median
from bench.plan_emul.emulation import emulated
from bench.plan_emul.scene import Scene, home_of
from bench.stand_in.observed import Passed


@dataclass(frozen=True)
class Places:
    """Seconds of the same job, from its first rows to its last tokens, in every round."""

    command: Sequence[float]
    stage: Sequence[float]

    @property
    def ratio(self) -> float:
        """The job on the stage's node over the job in the command's process."""
        return median(self.stage) / median(self.command)


def compare(scene: Scene, layout: Layout, rounds: int, steps: int) -> Places:
    """A job of `steps` tokens a sequence by this layout, with the coordinator in either place, in turn."""
    stage = layout.stages[0].node
    layouts = [replace(layout, coordinator=place) for place in (COMMAND, stage)]
    seconds: dict[str, list[float]] = {COMMAND: [], stage: []}
    with emulated(scene, layouts) as emulation:
        for _ in range(rounds):
            for one in layouts:
                cell = scene.cell(one, codec="auto", warm_up=0, counted=steps)
                seconds[one.coordinator].append(_took(emulation.processes.run(cell, home_of(one))))
    return Places(seconds[COMMAND], seconds[stage])


def _took(passes: Sequence[Passed]) -> float:
    return max(one.received for one in passes) - min(one.sent for one in passes)
