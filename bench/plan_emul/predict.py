"""What the planner predicts of a layout, by its own arrays and figures of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bbquic.plan import predict as plan_predict
from bbquic.plan.breakeven import Way
from bbquic.plan.build import WAYS, Setting, circulating
from bbquic.plan.cluster import COMMAND, Layout, PlannedStage
from bbquic.plan.cost import MemoryOptions, circulating_step
from bbquic.plan.instance import Objective, evaluate
from bench.plan_emul.figures import Figures
from bench.plan_emul.scene import Scene

MEMORY = MemoryOptions()


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step and of what it is made of, and what holds it up; `layout` has the codecs chosen."""

    layout: Layout
    step: float
    cycle: float
    loop: float
    limit: str

    @property
    def tokens_per_second(self) -> float:
        return self.layout.batch / self.step


def predict(scene: Scene, figures: Figures, layout: Layout, *, raw: bool = False) -> Predicted:
    """A layout's steady step. Its hops use the best codecs, or none where all is to be sent raw."""
    ways = (Way.RAW,) if raw or not figures.codecs else WAYS
    setting = Setting(layout.batch, layout.micro_batches, layout.coordinator != COMMAND, ways)
    cluster = scene.planned(figures)
    instance = circulating(cluster, scene.model, scene.job, setting, MEMORY)
    places = {node.name: number for number, node in enumerate(cluster.nodes)}
    found = evaluate(
        instance,
        Objective.CIRCULATING,
        tuple(places[name] for name in layout.nodes),
        tuple(stage.blocks for stage in layout.stages),
    )
    chosen = replace(layout, ways=tuple(ways[way] for way in found.ways))
    made = plan_predict.predict(cluster, scene.model, scene.job, chosen, MEMORY)
    loop = made.loop + figures.overhead.coordinator
    step = circulating_step(layout.micro_batches, made.cycle, loop)
    return Predicted(chosen, step, made.cycle, loop, str(made.limit))


def layout_of(
    blocks: tuple[tuple[str, int], ...], batch: int, micro_batches: int, coordinator: str | None = None
) -> Layout:
    """So many blocks on each node, in order; the coordinator on the first of them unless another is given."""
    stages, first = [], 0
    for node, count in blocks:
        stages.append(PlannedStage(node, first, first + count))
        first += count
    ways = (Way.RAW,) * (len(stages) - 1)
    return Layout(tuple(stages), batch, micro_batches, ways, coordinator or blocks[0][0])


def shown(layout: Layout) -> str:
    """`a 12, b 12; B=32 M=4; coordinator on a`."""
    stages = ", ".join(f"{stage.node} {stage.blocks}" for stage in layout.stages)
    return f"{stages}; B={layout.batch} M={layout.micro_batches}; coordinator on {layout.coordinator}"
