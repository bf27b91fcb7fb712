"""Why nothing fits: what each node would need and has, and the cheapest change that would do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bbquic.errors import PlanImpossible
from bbquic.plan.build import Ints, Tables
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import COMMAND, Cluster, JobShape, ModelSizes, NodeProfile
from bbquic.plan.cost import MemoryOptions, held_memory
from bbquic.plan.instance import FIRST, LAST, MIDDLE, ONLY, place_of
from bbquic.plan.splits import even_split


def refusal(
    cluster: Cluster, model: ModelSizes, job: JobShape, options: SearchOptions, fits: int | None
) -> PlanImpossible:
    """The error for the nodes of a search that found no layout.

    `fits`: where a batch was asked for, the largest one that would do. Otherwise not even one sequence fits,
    and the figures are for one.
    """
    if fits is not None:
        return PlanImpossible(
            f"{options.batch} sequences of {job.slot} tokens in flight do not fit these nodes",
            hint=f"{fits} fit: use a batch of {fits} or fewer",
        )
    memory = options.memory
    if options.given:
        blocks = options.split or tuple(len(one) for one in even_split(model.blocks, len(cluster.nodes)))
        needs = _needs(cluster.nodes, blocks, model, job, memory)
        lacking = any(need > have for need, have in needs.values())
        change = None
        hint = "give them fewer blocks, or leave their order to the planner"
    else:
        needs = even_attempt(cluster, model, job, memory)
        change = cheapest_change(cluster, model, job, memory)
        lacking = change is not None
        hint = f"{_gb(change[1])} more on {change[0]} would do, or further nodes" if change else ""
    if not lacking:
        return PlanImpossible(
            f"no links join the nodes for {model.name}: from the command through its stages and back",
            hint=f"missing: {_missing(cluster)}",
        )
    listed = ", ".join(
        f"{name} needs {_gb(need)} and has {_gb(have)}" for name, (need, have) in needs.items()
    )
    return PlanImpossible(
        f"{model.name} does not fit, not even with one sequence in flight: {listed}",
        needs=needs,
        change=change,
        hint=hint,
    )


def even_attempt(
    cluster: Cluster, model: ModelSizes, job: JobShape, memory: MemoryOptions
) -> dict[str, tuple[int, int]]:
    """By node, bytes of free memory needed and there, for one sequence and blocks split evenly.

    Over as many nodes as lack least together; those with most memory have the ends and the longer ranges.
    """
    nodes = sorted(cluster.nodes, key=lambda node: (-node.memory, node.name))
    attempts = [
        _attempt(nodes[:count], model, job, memory) for count in range(1, min(len(nodes), model.blocks) + 1)
    ]
    return min(attempts, key=lambda one: sum(max(0, need - have) for need, have in one.values()))


def _attempt(
    nodes: list[NodeProfile], model: ModelSizes, job: JobShape, memory: MemoryOptions
) -> dict[str, tuple[int, int]]:
    part, extra = divmod(model.blocks, len(nodes))
    blocks = [part + (number < extra) for number in range(len(nodes))]
    order = [0, *range(2, len(nodes)), 1] if len(nodes) > 1 else [0]
    return _needs([nodes[one] for one in order], [blocks[one] for one in order], model, job, memory)


def _needs(
    nodes: Sequence[NodeProfile],
    blocks: Sequence[int],
    model: ModelSizes,
    job: JobShape,
    memory: MemoryOptions,
) -> dict[str, tuple[int, int]]:
    return {
        node.name: (
            _needed(node, model, job, memory, held, place_of(position, len(nodes))),
            int(node.memory),
        )
        for position, (node, held) in enumerate(zip(nodes, blocks, strict=True))
    }


def _needed(
    node: NodeProfile, model: ModelSizes, job: JobShape, memory: MemoryOptions, blocks: int, place: int
) -> int:
    """Bytes of free memory with which a node holds so many blocks for one sequence."""
    embeds, heads = bool(place & FIRST), bool(place & LAST)
    held = held_memory(
        model, memory, blocks=blocks, batch=1, rows=1, slot=job.slot, embeds=embeds, heads=heads
    )
    able = node.offloads and node.attention_host is not None and held.kv <= node.host_memory * memory.share
    able &= memory.offload is None or round(memory.offload) == 1  # of one slot
    return int(np.ceil((held.device - (held.kv if able else 0)) / memory.share))


def cheapest_change(
    cluster: Cluster, model: ModelSizes, job: JobShape, memory: MemoryOptions
) -> tuple[str, int] | None:
    """The node that with the fewest bytes of memory more makes the model fit, and how many.

    Whatever the other nodes hold at most, in the best places, this one holds the rest. None where the model
    fits already.
    """
    fits, _ = Tables.of(cluster, model).slots_on_host(1, 1, job.slot, memory)
    most = _Most(np.where(fits, np.arange(model.blocks + 1), 0).max(axis=2))
    changes = []
    for number, node in enumerate(cluster.nodes):
        for place in (ONLY, FIRST, LAST, MIDDLE):
            others = most.beside(number, place)
            if others is None:
                continue
            rest = max(1, model.blocks - others)
            needed = _needed(node, model, job, memory, rest, place)
            changes.append((max(0, needed - int(node.memory)), node.name))
    extra, name = min(changes)
    return (name, extra) if extra > 0 else None


@dataclass(frozen=True, eq=False)
class _Most:
    """held: [N, 4], the most blocks that each node has room for, by place."""

    held: Ints

    def beside(self, node: int, place: int) -> int | None:
        """Blocks that the other nodes hold at most while `node` is in `place`; None where they cannot have
        the ends."""
        if place == ONLY:
            return 0
        others = np.delete(self.held, node, axis=0)
        middle = others[:, MIDDLE]
        as_first, as_last = _instead(others[:, FIRST], middle), _instead(others[:, LAST], middle)
        if place == FIRST:
            gained = as_last
        elif place == LAST:
            gained = as_first
        else:
            gained = (as_first[:, None] + as_last)[~np.eye(len(others), dtype=bool)]
        best = gained.max(initial=-np.inf)
        return None if best == -np.inf else int(middle.sum() + best)


def _instead(end: Ints, middle: Ints) -> NDArray[np.float64]:
    """What a node's being at an end changes; -inf where it holds nothing there."""
    return np.where(end > 0, end - middle, -np.inf)


def _missing(cluster: Cluster) -> str:
    """Pairs without a link, the first few."""
    names = [COMMAND, *(node.name for node in cluster.nodes)]
    pairs = [(a, b) for a in names for b in names if a != b and (a, b) not in cluster.links]
    shown = ", ".join(f"{a} -> {b}" for a, b in pairs[:4])
    return f"{shown}, and {len(pairs) - 4} more" if len(pairs) > 4 else shown


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
