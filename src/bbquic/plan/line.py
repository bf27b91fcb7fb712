"""A layout as a line of resources that packs pass one after the other. Pure.

Each resource serves first in, first out, and every pack takes the same way, so packs never overtake one
another: what a pack meets is known as soon as those that entered before it are through. Each resource then
needs one number, when it is free (Lindley's recursion), and a pack's whole passage is one event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import COMMAND, Cluster, Layout, LinkProfile, ModelSizes, NodeProfile
from bbquic.plan.cost import (
    HopTime,
    Load,
    ends_time,
    hop_time,
    leg_bytes,
    overlapped_block_time,
    serialisation,
)
from bbquic.plan.varying import Conditions, Varying
from bbquic.units import Seconds


class Resource:
    """Serves one pack at a time. `busy` sums what it served, in seconds."""

    __slots__ = ("busy", "free", "name", "served", "speed")

    def __init__(self, name: str, speed: Varying | None) -> None:
        self.name = name
        self.speed = speed  # of a link, bytes a second; else how many times as fast as its profile
        self.free = 0.0
        self.busy = 0.0
        self.served = 0

    def serve(self, arrival: float, amount: float) -> float:
        """When it is done with `amount`: seconds, or what `speed` does a second of."""
        start = self.free if self.free > arrival else arrival
        self.free = start + amount if self.speed is None else self.speed.ends(start, amount)
        self.busy += self.free - start
        self.served += 1
        return self.free


class Wire(Resource):
    """A link: serialisation is its service, its delay occupies nothing."""

    __slots__ = ("link",)

    def __init__(self, name: str, link: LinkProfile, rate: Varying | None) -> None:
        super().__init__(name, rate)
        self.link = link

    def carry(self, arrival: float, seconds: float) -> tuple[float, float]:
        """When the last byte has left, and when it arrives, of a message of `seconds` at the link's rate."""
        left = self.serve(arrival, seconds if self.speed is None else seconds * self.link.rate)
        return left, left + self.link.delay


@dataclass(frozen=True, slots=True)
class HopPassage:
    """What a hop took for one pack, without waiting: lanes and wire in seconds, bytes raw and on the wire."""

    way: Way
    payload: float
    out: float
    wire: float
    into: float
    sent: float


@dataclass(frozen=True, slots=True)
class Passage:
    """One pack's way around the loop; `compute` by stages, without waiting."""

    entered: Seconds
    back: Seconds
    compute: tuple[float, ...]
    hops: tuple[HopPassage, ...]


@dataclass(slots=True)
class _Stage:
    node: NodeProfile
    blocks: int
    alpha: float
    is_first: bool
    is_last: bool
    into: Resource
    compute: Resource
    out: Resource


class Line:
    """Resources of a layout, and when each is free. Raises: ValueError where a link that it needs is missing
    or an end of a hop does not know the codec."""

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSizes,
        layout: Layout,
        conditions: Conditions | None = None,
    ) -> None:
        self._model = model
        self._conditions = conditions or Conditions()
        self._cluster = cluster
        last = len(layout.stages) - 1
        self._stages: list[_Stage] = []
        for number, stage in enumerate(layout.stages):
            speed = self._conditions.speeds.get(stage.node)
            names = [f"{stage.node} {part}" for part in ("in", "compute", "out")]
            lanes = [Resource(name, speed) for name in names]
            alpha = stage.offloaded / layout.batch
            ends = number == 0, number == last
            node = cluster.node(stage.node)
            self._stages.append(_Stage(node, stage.blocks, alpha, *ends, *lanes))
        names = list(layout.nodes)
        self._wires = [self._wire(a, b) for a, b in pairwise(names)]
        self._lead = None if layout.coordinator == names[0] else self._wire(COMMAND, names[0])
        home = layout.coordinator
        self._back = None if home == names[-1] else self._wire(names[-1], home)

    def _wire(self, source: str, target: str) -> Wire:
        link = self._cluster.links.get((source, target))
        if link is None:
            raise ValueError(f"there is no link from {source} to {target}")
        return Wire(f"{source} to {target}", link, self._conditions.rates.get((source, target)))

    def resources(self) -> Iterator[Resource]:
        for stage in self._stages:
            yield from (stage.into, stage.compute, stage.out)
        yield from self._wires
        yield from (wire for wire in (self._lead, self._back) if wire is not None)

    @property
    def events(self) -> int:
        """Services so far."""
        return sum(resource.served for resource in self.resources())

    def send(self, now: float, load: Load, ways: Sequence[Way], wanting: float | None = None) -> Passage:
        """A pack enters; packs enter in the order of their times. `wanting` rows get a token, by default
        the decode rows."""
        wanting = load.rows if wanting is None else wanting
        at = now
        if self._lead is not None:
            at = self._lead.carry(at, self._leg(self._lead, load, back=False))[1]
        compute: list[float] = []
        hops: list[HopPassage] = []
        for number, stage in enumerate(self._stages):
            amount = _compute_time(stage, load, wanting)
            compute.append(amount)
            at = stage.compute.serve(at, amount)
            if not stage.is_last:
                at, hop = self._hop(number, at, load, ways[number])
                hops.append(hop)
        if self._back is not None:
            at = self._back.carry(at, self._leg(self._back, load, back=True))[1]
        return Passage(Seconds(now), Seconds(at), tuple(compute), tuple(hops))

    def _hop(self, number: int, at: float, load: Load, way: Way) -> tuple[float, HopPassage]:
        hop = self._hop_time(number, load, way)
        if hop.out:
            at = self._stages[number].out.serve(at, hop.out)
        wire = self._wires[number]
        began = max(at, wire.free)
        left, at = wire.carry(at, hop.wire)
        if hop.into:
            at = self._stages[number + 1].into.serve(at, hop.into)
        sent = hop.wire * wire.link.rate
        return at, HopPassage(way, self._payload(load), hop.out, left - began, hop.into, sent)

    def _hop_time(self, number: int, load: Load, way: Way) -> HopTime:
        sender, receiver = self._stages[number].node, self._stages[number + 1].node
        hop = hop_time(sender, receiver, self._wires[number].link, self._payload(load), way)
        if hop.out == float("inf"):
            raise ValueError(f"{sender.name} and {receiver.name} do not both know {way}")
        return hop

    def _payload(self, load: Load) -> float:
        return load.tokens * self._model.hidden * self._model.value_bytes

    @staticmethod
    def _leg(wire: Wire, load: Load, *, back: bool) -> float:
        return serialisation(wire.link, leg_bytes(load, back=back))

    def figures(self, load: Load, ways: Sequence[Way]) -> tuple[Seconds, Seconds]:
        """(cycle, loop) of such packs by the cluster's figures, nothing waiting and nothing varying."""
        computes = [_compute_time(stage, load, load.rows) for stage in self._stages]
        hops = [self._hop_time(number, load, way) for number, way in enumerate(ways)]
        cycle = max(*computes, *(hop.busy for hop in hops), 0.0)
        loop = sum(computes) + sum(hop.passes for hop in hops)
        for wire, back in ((self._lead, False), (self._back, True)):
            if wire is not None:
                took = self._leg(wire, load, back=back)
                cycle, loop = max(cycle, took), loop + took + wire.link.delay
        return Seconds(cycle), Seconds(loop)


def _compute_time(stage: _Stage, load: Load, wanting: float) -> float:
    """As `build` has it, except that the head is for the rows that want a token."""
    each = overlapped_block_time(stage.node, load, stage.alpha)
    ends = ends_time(stage.node, load, embeds=stage.is_first, heads=False)
    head = stage.node.head(wanting) if stage.is_last and wanting > 0 else 0.0
    return ends + head + stage.node.overhead + stage.blocks * each
