"""Helix' placement as a mixed-integer program of maximal flow (Mei et al., ASPLOS 2025, section 4).

A node i holds layers s_i to e_i (not included), one binary for each number of layers that fits. Its flow, in
tokens a second, is at most what it serves with so many layers. An edge i, j may carry flow where
s_j <= e_i < e_j: node j then computes layers e_i to e_j (partial inference); its flow counts what it holds.
An edge's capacity is its rate over the bytes of a token's activations, of ids beside the coordinator. Tokens
leave the source for nodes with s_i = 0 and reach the sink from those with e_i = L. HiGHS maximises the flow.

Of the flow's chains the one that settles best becomes the layout: there is one pipeline here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from bbquic.plan.cluster import COMMAND, Cluster, JobShape, Layout, ModelSizes, NodeProfile
from bbquic.plan.cost import ROW_BYTES, WIRE, leg_bytes
from bench.baselines.program import Program, Values
from bench.baselines.settle import (
    Placement,
    at_most_seats,
    block_seconds,
    most_blocks,
    settled,
    usual_load,
)

LIMIT = 5.0  # seconds for HiGHS; the best that it has by then counts
MOST_CHAINS = 8  # of the flow, the widest first
LEAST_FLOW = 1e-6  # of the largest: less is rounding


@dataclass(frozen=True, slots=True)
class Flow:
    """A solution: layers (first, stop) by node, tokens a second by edge, seconds that HiGHS took, and whether
    it proved that there is no better one."""

    held: Mapping[str, tuple[int, int]]
    edges: Mapping[tuple[str, str], float]
    value: float
    seconds: float
    proven: bool


def helix(cluster: Cluster, model: ModelSizes, job: JobShape, *, limit: float = LIMIT) -> Layout | None:
    for seats in at_most_seats(job):
        flow = solve(cluster, model, job, seats, limit=limit)
        layout = None if flow is None else layout_of(cluster, model, job, flow)
        if layout is not None:
            return layout
    return None


def layout_of(cluster: Cluster, model: ModelSizes, job: JobShape, flow: Flow) -> Layout | None:
    """The best of the flow's chains by the planner's own prediction."""
    plans = [settled(cluster, model, job, chain) for chain in chains(flow, model.blocks)]
    found = [plan for plan in plans if plan is not None]
    best = min(found, key=lambda plan: plan.prediction.steady_time, default=None)
    return None if best is None else best.layout


def solve(
    cluster: Cluster, model: ModelSizes, job: JobShape, seats: int, *, limit: float = LIMIT
) -> Flow | None:
    """None where no node holds a layer, or HiGHS found nothing in time. Raises: ImportError without scipy."""
    rooms = {node.name: Room.of(node, model, job, seats) for node in cluster.nodes}
    usable = {name: room for name, room in rooms.items() if room.middle}
    if not usable:
        return None
    problem = _MaxFlow(cluster, model, job, usable)
    began = perf_counter()
    solved = problem.program.solve(limit)
    took = perf_counter() - began
    return None if solved is None else problem.flow(solved[0], took, solved[1])


@dataclass(frozen=True, slots=True)
class Room:
    """Layers that a node holds: alone, beside the embedding, beside the head."""

    middle: int
    first: int
    last: int

    @classmethod
    def of(cls, node: NodeProfile, model: ModelSizes, job: JobShape, seats: int) -> Room:
        return cls(
            most_blocks(node, model, job, seats),
            most_blocks(node, model, job, seats, embeds=True),
            most_blocks(node, model, job, seats, heads=True),
        )


class _MaxFlow:
    """The program's variables by what they mean."""

    def __init__(self, cluster: Cluster, model: ModelSizes, job: JobShape, rooms: Mapping[str, Room]) -> None:
        self._cluster, self._model, self._job, self._rooms = cluster, model, job, rooms
        most = self._most = {name: room.middle for name, room in rooms.items()}
        self.program = program = Program()
        blocks = model.blocks
        self._first = {name: program.whole(0, blocks - 1) for name in most}
        self._counts = {name: [program.binary() for _ in range(count)] for name, count in most.items()}
        ceiling = self._ceiling()
        capacity = {edge: min(rate, ceiling) for edge, rate in self._capacities().items()}
        self._flows = {edge: program.real(0, rate) for edge, rate in capacity.items()}
        self._valid = {edge: program.binary() for edge in capacity}
        for edge, rate in capacity.items():
            program.below({self._flows[edge]: 1.0, self._valid[edge]: -rate}, 0.0)
        for name in most:
            self._node(name)
        for source, target in capacity:
            self._edge(source, target)
        sources = {flow: 1.0 for edge, flow in self._flows.items() if edge[0] == COMMAND}
        program.below(sources, ceiling)
        for flow in sources:
            program.maximise(flow)

    def _served(self, name: str, blocks: int) -> float:
        """Tokens a second of a node with so many layers."""
        node = self._cluster.node(name)
        return usual_load(self._job).rows / (node.overhead + blocks * block_seconds(node, self._job))

    def _ceiling(self) -> float:
        """No flow is larger: all that nodes can serve, over the layers that each token needs."""
        return (
            sum(count * self._served(name, count) for name, count in self._most.items()) / self._model.blocks
        )

    def _capacities(self) -> dict[tuple[str, str], float]:
        """Tokens a second of each edge: those of nodes, and the coordinator's both ways."""
        load = usual_load(self._job)
        hidden = load.tokens / load.rows * self._model.hidden * self._model.value_bytes * WIRE
        out, back = (leg_bytes(load, back=way) / load.rows * WIRE for way in (False, True))
        found = {}
        for (source, target), link in self._cluster.links.items():
            ends = {source, target} - {COMMAND}
            if ends <= self._most.keys() and source != target:
                size = out if source == COMMAND else back if target == COMMAND else hidden
                found[source, target] = link.rate / max(size, ROW_BYTES)
        return found

    def _stop(self, name: str) -> dict[int, float]:
        """e_i as a sum over variables."""
        held = {variable: float(count + 1) for count, variable in enumerate(self._counts[name])}
        return {self._first[name]: 1.0, **held}

    def _node(self, name: str) -> None:
        program = self.program
        program.equal(dict.fromkeys(self._counts[name], 1.0), 1.0)
        program.below(self._stop(name), float(self._model.blocks))
        into = {flow: 1.0 for edge, flow in self._flows.items() if edge[1] == name}
        out = {flow: -1.0 for edge, flow in self._flows.items() if edge[0] == name}
        program.equal({**into, **out}, 0.0)
        served = {
            variable: -self._served(name, count + 1) for count, variable in enumerate(self._counts[name])
        }
        program.below({**into, **served}, 0.0)

    def _edge(self, source: str, target: str) -> None:
        """What a valid edge implies; where d = 0 nothing."""
        program, valid, blocks = self.program, self._valid[source, target], float(self._model.blocks)
        if source == COMMAND:  # s_j <= 0
            program.below({self._first[target]: 1.0, valid: blocks}, blocks)
            self._end(target, valid, self._rooms[target].first)
            return
        if target == COMMAND:  # e_i >= L
            program.below({**_negative(self._stop(source)), valid: blocks}, 0.0)
            self._end(source, valid, self._rooms[source].last)
            return
        # s_j <= e_i
        program.below({self._first[target]: 1.0, **_negative(self._stop(source)), valid: blocks}, blocks)
        # e_i + 1 <= e_j
        program.below({**self._stop(source), **_negative(self._stop(target)), valid: blocks + 1}, blocks)

    def _end(self, name: str, valid: int, room: int) -> None:
        """Who is first or last holds `room` layers at most, and is neither where that is none."""
        most = float(self._most[name])
        held = {variable: count + 1.0 for count, variable in enumerate(self._counts[name])}
        self.program.below({**held, valid: most - room}, most)

    def flow(self, values: Values, seconds: float, proven: bool) -> Flow:
        held = {}
        for name, counts in self._counts.items():
            first = round(values[self._first[name]])
            held[name] = first, first + 1 + int(np.argmax([values[one] for one in counts]))
        edges = {edge: float(values[flow]) for edge, flow in self._flows.items()}
        least = LEAST_FLOW * max(edges.values(), default=0.0)
        carried = {edge: rate for edge, rate in edges.items() if rate > least}
        value = sum(rate for (source, _), rate in carried.items() if source == COMMAND)
        return Flow(held, carried, value, seconds, proven)


def _negative(terms: Mapping[int, float]) -> dict[int, float]:
    return {variable: -factor for variable, factor in terms.items()}


def chains(flow: Flow, blocks: int) -> Iterator[Placement]:
    """Ways from source to sink that carry flow, the widest branches first, MOST_CHAINS at most."""
    found = 0
    stack: list[tuple[tuple[str, ...], tuple[int, ...]]] = [((COMMAND,), ())]
    while stack and found < MOST_CHAINS:
        nodes, held = stack.pop()
        done = sum(held)
        for (source, target), _ in sorted(flow.edges.items(), key=lambda item: item[1]):
            if source != nodes[-1]:
                continue
            if target == COMMAND:
                if done == blocks:
                    found += 1
                    yield Placement(nodes[1:], held)
                continue
            first, stop = flow.held[target]
            if target not in nodes and first <= done < stop:
                stack.append(((*nodes, target), (*held, stop - done)))
