"""The planner's layout against the others' on emulated links, interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bbquic.plan.cluster import Layout
from bench.common import median
from bench.plan_emul.emulation import emulated
from bench.plan_emul.scene import Scene
from bench.plan_sim.compare import OURS


@dataclass(frozen=True)
class Chosen:
    """A scene, the layouts that were tried in it, and tokens a second of each in every round."""

    scene: str
    layouts: Mapping[str, Layout]
    rates: Mapping[str, Sequence[float]]

    @property
    def best_other(self) -> str:
        others = [name for name in self.rates if name != OURS]
        return max(others, key=lambda name: median(self.rates[name]))

    @property
    def ratio(self) -> float:
        """Median of ours over the best other's median."""
        return median(self.rates[OURS]) / median(self.rates[self.best_other])


def compare(scene: Scene, layouts: Mapping[str, Layout], rounds: int, counted: int = 8) -> Chosen:
    """Run all layouts in turn, `rounds` times; of equal ones one run counts for each of them.

    Every hop chooses its codec itself: a layout's ways are what was planned with.
    """
    names: dict[object, list[str]] = {}
    for name, layout in layouts.items():
        names.setdefault(_run_alike(layout), []).append(name)
    rates: dict[str, list[float]] = {name: [] for name in layouts}
    with emulated(scene, layouts.values()) as emulation:
        for _ in range(rounds):
            for alike in names.values():
                measured = emulation.run(layouts[alike[0]], "auto", counted=counted)
                for name in alike:
                    rates[name].append(measured.tokens_per_second)
    return Chosen(scene.name, layouts, rates)


def _run_alike(layout: Layout) -> object:
    """What tells layouts apart when they run."""
    return layout.stages, layout.batch, layout.micro_batches, layout.coordinator
