"""Layouts of a scene by every policy: the planner's own search, and the others' placements.

A placement says which node holds which blocks. Batch, micro-batches and the coordinator's place are then
chosen for it as well as we can, by our predictions: what is compared is where the blocks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bbquic.plan.cluster import COMMAND, Layout
from bbquic.plan.partition import even_split
from bench.plan_emul.choice import OURS
from bench.plan_emul.figures import Figures
from bench.plan_emul.predict import Predicted, layout_of, predict
from bench.plan_emul.scene import Scene

BATCHES = (8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4, 8)

Blocks = tuple[tuple[str, int], ...]


def candidates(scene: Scene, figures: Figures) -> dict[str, Predicted]:
    """By policy; a placement that never fits is left out."""
    placements = {"even": even(scene), OURS: even(scene)}
    found = {name: set_best(scene, figures, blocks) for name, blocks in placements.items()}
    return {name: one for name, one in found.items() if one is not None}


def even(scene: Scene) -> Blocks:
    """All nodes, in their order, as like as can be."""
    ranges = even_split(scene.model.blocks, len(scene.nodes))
    return tuple((node.name, len(held)) for node, held in zip(scene.nodes, ranges, strict=True))


def set_best(scene: Scene, figures: Figures, blocks: Blocks) -> Predicted | None:
    """The best batch, micro-batches and place for the coordinator of a placement; None: it never fits."""
    possible = [one for one in _settings(scene, figures, blocks) if one.step < float("inf")]
    return max(possible, key=lambda one: one.tokens_per_second, default=None)


def _settings(scene: Scene, figures: Figures, blocks: Blocks) -> Iterator[Predicted]:
    for batch in BATCHES:
        for micro_batches in MICRO_BATCHES:
            for coordinator in (COMMAND, blocks[0][0]):
                yield predict(scene, figures, layout_of(blocks, batch, micro_batches, coordinator))


def placed(layout: Layout) -> Blocks:
    return tuple((stage.node, stage.blocks) for stage in layout.stages)


def chain(stages: Sequence[tuple[str, int]]) -> Blocks:
    """A placement from what a policy gives, without nodes that hold nothing."""
    return tuple((node, blocks) for node, blocks in stages if blocks)
