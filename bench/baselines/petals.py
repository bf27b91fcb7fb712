"""Petals' greedy placement and routing (Borzunov et al., 2023, sections 3.2 and 3.3 and its appendix).

Servers join one after the other. Each measures its throughput (the slower of its compute and its network),
holds as many blocks as fit, and takes the contiguous span whose blocks are served worst: the least of the
spans' sorted throughputs. Servers then move where that makes the worst block better by a quarter or more. A
client takes the chain of servers that is fastest: the shortest path over (server, block).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from bbquic.plan.cluster import COMMAND, Cluster, JobShape, Layout, ModelSizes, NodeProfile
from bbquic.plan.cost import WIRE, communication_time, leg_time
from bench.baselines.settle import (
    Placement,
    at_most_seats,
    block_seconds,
    most_blocks,
    settle,
    usual_load,
)

BALANCE = 0.75  # a server stays where the worst block has more than this share of what it could have
MOVES = 3  # rounds in which each server reconsiders


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks `first` to `stop` (not included) on a server, and the requests a second it serves them at."""

    server: str
    first: int
    stop: int
    throughput: float


def petals(cluster: Cluster, model: ModelSizes, job: JobShape) -> Layout | None:
    for seats in at_most_seats(job):
        layout = settle(cluster, model, job, placement(cluster, model, job, seats))
        if layout is not None:
            return layout
    return None


def placement(cluster: Cluster, model: ModelSizes, job: JobShape, seats: int) -> Placement | None:
    """None where the servers leave a block out."""
    return route(cluster, model, job, spans(cluster, model, job, seats))


def spans(cluster: Cluster, model: ModelSizes, job: JobShape, seats: int) -> tuple[Span, ...]:
    """What each server holds, in the order in which they joined: the cluster's."""
    held: dict[str, Span] = {}
    choices = {node.name: _choices(node, model, job, seats) for node in cluster.nodes}
    for node in cluster.nodes:
        if choices[node.name]:
            count = max(stop - first for first, stop in choices[node.name])
            rate = throughput(cluster, model, job, node, count)
            served = _served(list(held.values()), model.blocks)
            held[node.name] = _best_span(node.name, rate, choices[node.name], served)
    for _ in range(MOVES):
        for name in list(held):
            _reconsider(held, name, choices[name], model.blocks)
    return tuple(held.values())


def _choices(node: NodeProfile, model: ModelSizes, job: JobShape, seats: int) -> list[tuple[int, int]]:
    """Spans that fill a node. Who has the first or the last block holds embedding or head too (at Petals
    the client has both) and has less room."""
    blocks = model.blocks
    middle, first, last, only = (
        most_blocks(node, model, job, seats, embeds=embeds, heads=heads)
        for embeds, heads in ((False, False), (True, False), (False, True), (True, True))
    )
    if only == blocks:
        return [(0, blocks)]
    inner = [(at, at + middle) for at in range(1, blocks - middle)] if middle else []
    at_ends = [(0, min(first, blocks - 1)), (blocks - min(last, blocks - 1), blocks)]
    return [span for span in (at_ends[0], *inner, at_ends[1]) if span[0] < span[1]]


def throughput(cluster: Cluster, model: ModelSizes, job: JobShape, node: NodeProfile, blocks: int) -> float:
    """Tokens a second: its compute over the blocks that a request uses on average, (n + 1) / 2 of n; or its
    network, by the median of its links."""
    load = usual_load(job)
    compute = load.rows / (block_seconds(node, job) * (blocks + 1) / 2)
    rates = sorted(link.rate for (source, _), link in cluster.links.items() if source == node.name)
    if not rates:
        return compute
    size = load.tokens / load.rows * model.hidden * model.value_bytes * WIRE
    return min(compute, rates[len(rates) // 2] / size)


def _served(held: Sequence[Span], blocks: int) -> list[float]:
    """Throughput of each block: the sum of its servers'."""
    return [sum(one.throughput for one in held if one.first <= block < one.stop) for block in range(blocks)]


def _best_span(server: str, rate: float, choices: Sequence[tuple[int, int]], served: Sequence[float]) -> Span:
    first, stop = min(choices, key=lambda span: sorted(served[span[0] : span[1]]))
    return Span(server, first, stop, rate)


def _reconsider(held: dict[str, Span], name: str, choices: Sequence[tuple[int, int]], blocks: int) -> None:
    """Move a server where the worst block gains enough by it."""
    present, others = held[name], [one for one in held.values() if one.server != name]
    better = _best_span(name, present.throughput, choices, _served(others, blocks))
    worst = min(_served([*others, present], blocks))
    if min(_served([*others, better], blocks)) * BALANCE > worst:
        held[name] = better


def route(cluster: Cluster, model: ModelSizes, job: JobShape, held: Sequence[Span]) -> Placement | None:
    """The fastest chain over (server, block), each server used in one stretch; None where there is none.

    Dijkstra over chains: one that is at the same server, block and has used the same servers is kept once.
    """
    load = usual_load(job)
    size = load.tokens * model.hidden * model.value_bytes * WIRE
    by_name = {one.server: one for one in held}
    seconds = {name: block_seconds(cluster.node(name), job) for name in by_name}

    def hops(source: str, block: int, used: frozenset[str]) -> Iterator[tuple[float, str]]:
        for name, span in by_name.items():
            link = cluster.links.get((source, name))
            if link is not None and name not in used and span.first <= block < span.stop:
                took = leg_time(link, load) if source == COMMAND else communication_time(link, size)
                yield took, name

    queue: list[tuple[float, int, str, tuple[tuple[str, int], ...]]] = []
    for took, name in hops(COMMAND, 0, frozenset()):
        heappush(queue, (took, 0, name, ((name, 0),)))
    done: set[tuple[str, int, frozenset[str]]] = set()
    while queue:
        time, block, at, chain = heappop(queue)
        used = frozenset(name for name, _ in chain)
        if block > model.blocks:
            return _placement(chain, model.blocks)
        if (at, block, used) in done:
            continue
        done.add((at, block, used))
        if block == model.blocks:
            home = cluster.links.get((at, COMMAND))
            if home is not None:  # the way home counts too; `blocks + 1` says that it is over
                heappush(queue, (time + leg_time(home, load, back=True), block + 1, at, chain))
            continue
        if block < by_name[at].stop:
            heappush(queue, (time + seconds[at], block + 1, at, chain))
        if block > chain[-1][1]:
            for took, name in hops(at, block, used):
                heappush(queue, (time + took, block, name, (*chain, (name, block))))
    return None


def _placement(chain: Sequence[tuple[str, int]], blocks: int) -> Placement:
    firsts = [first for _, first in chain]
    held = tuple(stop - first for first, stop in zip(firsts, [*firsts[1:], blocks], strict=True))
    return Placement(tuple(name for name, _ in chain), held)
