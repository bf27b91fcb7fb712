"""All nodes in their order, blocks by their memory."""

from __future__ import annotations

from bbquic.plan.cluster import Cluster, JobShape, Layout, ModelSizes, NodeProfile
from bench.baselines.settle import Placement, most_blocks, settle


def even(cluster: Cluster, model: ModelSizes, job: JobShape) -> Layout | None:
    return settle(cluster, model, job, placement(cluster, model, job))


def placement(cluster: Cluster, model: ModelSizes, job: JobShape) -> Placement | None:
    """Blocks in proportion to memory, by largest remainders; a node never gets more than fit, and one that
    would get none is left out. None where all together do not hold the model."""
    nodes, room = _room(cluster, model, job)
    if sum(room.values()) < model.blocks:
        return None
    whole = sum(node.memory for node in nodes)
    shares = {node.name: model.blocks * node.memory / whole for node in nodes}
    blocks = {name: min(int(share), room[name]) for name, share in shares.items()}
    while sum(blocks.values()) < model.blocks:
        open_ones = [name for name in blocks if blocks[name] < room[name]]
        blocks[max(open_ones, key=lambda name: shares[name] - blocks[name])] += 1
    used = [name for name, held in blocks.items() if held]
    return Placement(tuple(used), tuple(blocks[name] for name in used))


def _room(
    cluster: Cluster, model: ModelSizes, job: JobShape
) -> tuple[tuple[NodeProfile, ...], dict[str, int]]:
    """Who takes part, and the most blocks of each; who has no room for an end and a block is at none."""
    nodes = list(cluster.nodes)
    while len(nodes) > 1 and not most_blocks(nodes[0], model, job, 1, embeds=True):
        del nodes[0]
    while len(nodes) > 1 and not most_blocks(nodes[-1], model, job, 1, heads=True):
        del nodes[-1]
    room = {
        node.name: most_blocks(node, model, job, 1, embeds=node is nodes[0], heads=node is nodes[-1])
        for node in nodes
    }
    return tuple(nodes), room
