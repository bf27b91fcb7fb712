"""What a placement allows at its best, and what policies that know of no batch are assumed to plan for."""

from __future__ import annotations

from dataclasses import dataclass

from bbquic.errors import PlanImpossible
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import Cluster, JobShape, Layout, ModelSizes, NodeProfile
from bbquic.plan.cost import Load, MemoryOptions, load_of, overlapped_block_time, stage_memory
from bbquic.plan.search import Plan, search

MEMORY = MemoryOptions()
SEATS = (16, 4, 1)  # in flight, for which policies that choose no batch hold memory: the first that fit


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks of each node, in the order of the pipeline."""

    nodes: tuple[str, ...]
    blocks: tuple[int, ...]


def settled(cluster: Cluster, model: ModelSizes, job: JobShape, placement: Placement) -> Plan | None:
    """The best plan with this placement; None where it does not fit at any batch."""
    options = SearchOptions(memory=MEMORY, nodes=placement.nodes, split=placement.blocks)
    try:
        return search(cluster, model, job, options)
    except PlanImpossible:
        return None


def settle(cluster: Cluster, model: ModelSizes, job: JobShape, placement: Placement | None) -> Layout | None:
    plan = None if placement is None else settled(cluster, model, job, placement)
    return None if plan is None else plan.layout


def at_most_seats(job: JobShape) -> tuple[int, ...]:
    """SEATS, and fewer for models that leave no room for so many."""
    return tuple(dict.fromkeys(min(seats, job.sequences) for seats in SEATS))


def usual_load(job: JobShape) -> Load:
    """A pack by which such a policy measures nodes and links: all its seats in one."""
    return load_of(job, SEATS[0], 1)


def block_seconds(node: NodeProfile, job: JobShape) -> float:
    """Of one block for the usual pack."""
    return overlapped_block_time(node, usual_load(job))


def most_blocks(
    node: NodeProfile,
    model: ModelSizes,
    job: JobShape,
    batch: int,
    *,
    embeds: bool = False,
    heads: bool = False,
) -> int:
    """Blocks that fit on a node, with the KV of `batch` sequences; more of them never need less."""

    def fits(blocks: int) -> bool:
        held = stage_memory(
            node,
            model,
            MEMORY,
            blocks=blocks,
            batch=batch,
            micro_batches=1,
            slot=job.slot,
            embeds=embeds,
            heads=heads,
        )
        return held is not None

    return next((blocks - 1 for blocks in range(1, model.blocks + 1) if not fits(blocks)), model.blocks)
