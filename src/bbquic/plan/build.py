"""From figures to instances: what every stage and hop would cost, for all that a search may try. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import COMMAND, Cluster, JobShape, LinkProfile, ModelSizes, NodeProfile
from bbquic.plan.cost import (
    Load,
    MemoryOptions,
    block_time,
    communication_time,
    ends_time,
    hop_time,
    leg_time,
    load_of,
    overlapped_block_time,
    stage_memory,
)
from bbquic.plan.instance import FIRST, LAST, MIDDLE, ONLY, Floats, Instance

WAYS = (Way.RAW, Way.H8, Way.REC)  # by their numbers in instances


@dataclass(frozen=True, slots=True)
class Setting:
    """What a search holds fixed for one instance."""

    batch: int
    micro_batches: int
    at_stage: bool = False  # the coordinator is on the first stage's node, else in the command's process
    ways: tuple[Way, ...] = WAYS  # that hops may use; RAW is among them or is the only one

    @property
    def rows(self) -> int:
        """Of the largest micro-batch."""
        return -(-self.batch // self.micro_batches)


def circulating(
    cluster: Cluster, model: ModelSizes, job: JobShape, setting: Setting, memory: MemoryOptions
) -> Instance:
    """The instance of architecture §4: minimise `Objective.CIRCULATING` of it. One B and M, K from memory."""
    load = load_of(job, setting.batch, setting.micro_batches)
    nodes = cluster.nodes
    busy = np.full((len(nodes), 4, model.blocks + 1), np.inf)
    for number, node in enumerate(nodes):
        _fill_stages(busy[number], node, model, job, setting, memory, load)
    hop_busy, hop_passes = _hops(cluster, setting.ways, load.tokens * model.hidden * model.value_bytes)
    lead, back = _legs(cluster, setting, load)
    return Instance(busy, busy, hop_busy, hop_passes, lead, back, setting.micro_batches)


def _fill_stages(
    busy: Floats,
    node: NodeProfile,
    model: ModelSizes,
    job: JobShape,
    setting: Setting,
    memory: MemoryOptions,
    load: Load,
) -> None:
    """`busy` [4, L + 1] of one node. More blocks never need less memory: the first that do not fit end it."""
    plain = overlapped_block_time(node, load)
    for place in (MIDDLE, FIRST, LAST, ONLY):
        embeds, heads = bool(place & FIRST), bool(place & LAST)
        ends = ends_time(node, load, embeds=embeds, heads=heads) + node.overhead
        for blocks in range(1, model.blocks + 1):
            held = stage_memory(
                node,
                model,
                memory,
                blocks=blocks,
                batch=setting.batch,
                rows=setting.rows,
                slot=job.slot,
                embeds=embeds,
                heads=heads,
            )
            if held is None:
                break
            on_host = held[1]
            each = overlapped_block_time(node, load, on_host / setting.batch) if on_host else plain
            busy[place, blocks] = ends + blocks * each


def _hops(cluster: Cluster, ways: Sequence[Way], size: float) -> tuple[Floats, Floats]:
    """busy and passes [C, N, N]; no hop leads from a node to itself."""
    count = len(cluster.nodes)
    busy = np.full((len(ways), count, count), np.inf)
    passes = np.full((len(ways), count, count), np.inf)
    for a, sender in enumerate(cluster.nodes):
        for b, receiver in enumerate(cluster.nodes):
            link = cluster.links.get((sender.name, receiver.name))
            if link is None or a == b:
                continue
            for way, name in enumerate(ways):
                found = hop_time(sender, receiver, link, size, name)
                busy[way, a, b], passes[way, a, b] = found.busy, found.passes
    return busy, passes


def _legs(cluster: Cluster, setting: Setting, load: Load) -> tuple[Floats, Floats]:
    """lead [N] and back [N, N]; infinite where the coordinator's machine does not reach the stage's."""
    names = [node.name for node in cluster.nodes]
    if setting.at_stage:
        back = np.array([[_leg(cluster, last, first, load) for last in names] for first in names])
        return np.zeros(len(names)), back
    lead = np.array([_leg(cluster, COMMAND, name, load) for name in names])
    home = np.array([_leg(cluster, name, COMMAND, load) for name in names])
    return lead, np.tile(home, (len(names), 1))


def _leg(cluster: Cluster, source: str, target: str, load: Load) -> float:
    if source == target:
        return 0.0
    link = cluster.links.get((source, target))
    return float("inf") if link is None else leg_time(link, load)


def serial(cluster: Cluster, model: ModelSizes, batch: int, context: float) -> Instance:
    """The paper's eq. 1 to 3: minimise `Objective.SUM`. Hops carry the batch raw; ends and legs are free."""
    return _paper(cluster, model, batch, 1, context)


def pipeline(cluster: Cluster, model: ModelSizes, batch: int, micro_batches: int, context: float) -> Instance:
    """The paper's eq. 4: minimise `Objective.PIPELINE`. Latency stands inside a hop's cycle, as there."""
    return _paper(cluster, model, batch, micro_batches, context)


def _paper(cluster: Cluster, model: ModelSizes, batch: int, micro_batches: int, context: float) -> Instance:
    nodes, rows = cluster.nodes, batch / micro_batches
    each = np.array([block_time(node, rows, context) for node in nodes])
    stages = np.repeat((each[:, None] * np.arange(model.blocks + 1.0))[:, None, :], 4, axis=1)
    stages[:, :, 0] = np.inf
    hops = np.full((1, len(nodes), len(nodes)), np.inf)
    size = rows * model.hidden * model.value_bytes
    for a, sender in enumerate(nodes):
        for b, receiver in enumerate(nodes):
            link: LinkProfile | None = cluster.links.get((sender.name, receiver.name))
            if link is not None and a != b:
                hops[0, a, b] = communication_time(link, size)
    free = np.zeros((len(nodes), len(nodes)))
    return Instance(stages, stages, hops, hops, np.zeros(len(nodes)), free, micro_batches)
