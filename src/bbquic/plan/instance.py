"""A layout problem in arrays: what `partition` and `paths` choose from, whatever the seconds in it stand for.

One instance is for one batch, number of micro-batches and place of the coordinator; `cost` makes it. Whatever
is not possible (memory, a missing link) is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIDDLE, FIRST, LAST, ONLY = 0, 1, 2, 3  # a stage's place: bit 0, it embeds; bit 1, it has the head


class Objective(StrEnum):
    """What is to be least."""

    SUM = "sum"  # Σ passes: the paper's eq. 1
    PIPELINE = "pipeline"  # (M + n - 1) · max busy, n stages: eq. 4
    CIRCULATING = "circulating"  # max(M · max busy, Σ passes): the architecture's


@dataclass(frozen=True, eq=False)
class Instance:
    """N nodes, L blocks, C ways for each hop; all arrays are seconds.

    busy, passes: [N, 4, L + 1], of a stage by node, place (MIDDLE, ...) and blocks; at 0 blocks infinite.
        `busy` is how long a micro-batch keeps the stage's slowest resource, `passes` what it adds to the
        loop.
    hop_busy, hop_passes: [C, N, N], the same of a hop from one node to another. One of the ways is chosen for
        each hop: the one with the least `passes` among those whose `busy` is within what the bottleneck
        allows, the first of equal ones.
    lead: [N], from the coordinator to the first stage. back: [N, N], by first and last stage, from
        the last one to the coordinator. Both count in the loop alone.
    """

    busy: Floats
    passes: Floats
    hop_busy: Floats
    hop_passes: Floats
    lead: Floats
    back: Floats
    micro_batches: int

    @property
    def nodes(self) -> int:
        return int(self.busy.shape[0])

    @property
    def blocks(self) -> int:
        return int(self.busy.shape[2]) - 1

    def permuted(self, order: list[int]) -> Instance:
        """The same nodes, numbered in another order; a subset leaves out the others."""
        pairs = np.ix_(order, order)
        return Instance(
            self.busy[order],
            self.passes[order],
            self.hop_busy[:, pairs[0], pairs[1]],
            self.hop_passes[:, pairs[0], pairs[1]],
            self.lead[order],
            self.back[pairs],
            self.micro_batches,
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """A solution: `order` of the used nodes, `blocks` of each (at least 1), the way of each hop between them.

    `value` is the objective; `cycle` the longest busy time, `loop` the sum of all passes and legs.
    """

    order: tuple[int, ...]
    blocks: tuple[int, ...]
    ways: tuple[int, ...]
    value: float
    cycle: float
    loop: float


def place_of(position: int, stages: int) -> int:
    """MIDDLE, FIRST, LAST or ONLY, of the stage at a position."""
    return (FIRST if position == 0 else 0) | (LAST if position == stages - 1 else 0)


def evaluate(
    instance: Instance, objective: Objective, order: tuple[int, ...], blocks: tuple[int, ...]
) -> Assignment:
    """The best that this order and these blocks give: the ways are chosen here, exactly, by trying the
    bottleneck at each value that a stage or a hop can have. What all searches are tested against.
    """
    count = len(order)
    places = [place_of(position, count) for position in range(count)]
    stages = list(zip(order, places, blocks, strict=True))
    busy = [float(instance.busy[node, place, held]) for node, place, held in stages]
    hops = list(pairwise(order))
    own = sum(float(instance.passes[node, place, held]) for node, place, held in stages)
    own += float(instance.lead[order[0]]) + float(instance.back[order[0], order[-1]])
    levels = sorted({*busy, *(float(value) for a, b in hops for value in instance.hop_busy[:, a, b])})
    best: Assignment | None = None
    for limit in levels if objective is not Objective.SUM else [float("inf")]:
        if max(busy) > limit and objective is not Objective.SUM:
            continue
        ways, cycle, loop = [], max(busy), own
        for a, b in hops:
            allowed = instance.hop_busy[:, a, b] <= limit
            passes = np.where(allowed, instance.hop_passes[:, a, b], np.inf)
            way = int(np.argmin(passes))
            ways.append(way)
            loop += float(passes[way])
            cycle = max(cycle, float(instance.hop_busy[way, a, b])) if allowed[way] else float("inf")
        value = value_of(objective, instance.micro_batches, count, cycle, loop)
        if best is None or value < best.value:
            best = Assignment(order, blocks, tuple(ways), value, cycle, loop)
    assert best is not None
    return best


def value_of(objective: Objective, micro_batches: int, stages: int, cycle: float, loop: float) -> float:
    """The objective from a solution's bottleneck and loop."""
    if objective is Objective.SUM:
        return loop
    if objective is Objective.PIPELINE:
        return (micro_batches + stages - 1) * cycle if loop < float("inf") else float("inf")
    return max(micro_batches * cycle, loop)
