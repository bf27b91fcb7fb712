"""A layout as a line of resources that packs pass one after the other. Pure.

Each resource serves first in, first out, and every pack takes the same way, so packs never overtake one
another: what a pack meets is known as soon as those that entered before it are through. Each resource then
needs one number, when it is free (Lindley's recursion), and a pack's whole passage is one event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import COMMAND, Cluster, Layout, LinkProfile, ModelSizes, NodeProfile
from bbquic.plan.cost import (
    HopTime,
    Load,
    ends_time,
    hop_time,
    host_share,
    leg_bytes,
    overlapped_block_time,
    serialisation,
)
from bbquic.plan.speculation import PLAIN, Trees
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
class PackTimes:
    """What a pack asks of each resource, seconds by the cluster's figures; `payload` raw bytes of a hop."""

    payload: float
    ways: tuple[Way, ...]
    compute: tuple[float, ...]
    hops: tuple[HopTime, ...]
    lead: float
    back: float
    drafting: float = 0.0


class HopPassage(NamedTuple):
    """What a hop took for one pack, without waiting: lanes and wire in seconds, bytes raw and on the wire."""

    way: Way
    payload: float
    out: float
    wire: float
    into: float
    sent: float


class Passage(NamedTuple):
    """One pack's way around the loop; `compute` by stages, without waiting."""

    entered: float
    back: float
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
        self._drafter = Resource("drafter", None)
        self._conditions = conditions or Conditions()
        self._cluster = cluster
        last = len(layout.stages) - 1
        self._stages: list[_Stage] = []
        for number, stage in enumerate(layout.stages):
            speed = self._conditions.speeds.get(stage.node)
            names = [f"{stage.node} {part}" for part in ("in", "compute", "out")]
            lanes = [Resource(name, speed) for name in names]
            ends = number == 0, number == last
            node = cluster.node(stage.node)
            alpha = host_share(node, stage.offloaded, layout.batch)
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
        yield self._drafter
        for stage in self._stages:
            yield from (stage.into, stage.compute, stage.out)
        yield from self._wires
        yield from (wire for wire in (self._lead, self._back) if wire is not None)

    @property
    def events(self) -> int:
        """Services so far."""
        return sum(resource.served for resource in self.resources())

    def times(
        self, load: Load, ways: Sequence[Way], wanting: float | None = None, trees: Trees = PLAIN
    ) -> PackTimes:
        """What resources are to do for a pack; `wanting` tokens of it are followed by one that is chosen, by
        default those of the decode rows. Of its trees, what is kept goes on from the first stage."""
        onward = replace(load, guesses=min(load.guesses, trees.kept))
        loads = [onward if place else load for place in range(len(self._stages))]
        rows = loads[-1].decoded if wanting is None else wanting
        return PackTimes(
            payload=onward.tokens * self._model.hidden * self._model.value_bytes,
            ways=tuple(ways),
            compute=tuple(map(_compute_time, self._stages, loads, [rows] * len(loads))),
            hops=tuple(self._hop_time(number, onward, way) for number, way in enumerate(ways)),
            lead=_leg_time(self._lead, load, back=False),
            back=_leg_time(self._back, load, back=True),
            drafting=trees.drafting(load.rows) if load.guesses else 0.0,
        )

    def send(self, now: float, pack: PackTimes) -> Passage:
        """A pack enters; packs enter in the order of their times."""
        entered = now if not pack.drafting else self._drafter.serve(now, pack.drafting)
        at = entered if self._lead is None else self._lead.carry(entered, pack.lead)[1]
        at = self._stages[0].compute.serve(at, pack.compute[0])
        hops: list[HopPassage] = []
        for number, hop in enumerate(pack.hops):
            sender, wire, receiver = self._stages[number], self._wires[number], self._stages[number + 1]
            if hop.out:
                at = sender.out.serve(at, hop.out)
            began = max(at, wire.free)
            left, at = wire.carry(at, hop.wire)
            if hop.into:
                at = receiver.into.serve(at, hop.into)
            at = receiver.compute.serve(at, pack.compute[number + 1])
            sent = hop.wire * wire.link.rate
            hops.append(HopPassage(pack.ways[number], pack.payload, hop.out, left - began, hop.into, sent))
        if self._back is not None:
            at = self._back.carry(at, pack.back)[1]
        return Passage(now, at, pack.compute, tuple(hops))

    def _hop_time(self, number: int, load: Load, way: Way) -> HopTime:
        sender, receiver = self._stages[number].node, self._stages[number + 1].node
        size = load.tokens * self._model.hidden * self._model.value_bytes
        hop = hop_time(sender, receiver, self._wires[number].link, size, way)
        if hop.out == float("inf"):
            raise ValueError(f"{sender.name} and {receiver.name} do not both know {way}")
        return hop

    def figures(self, pack: PackTimes) -> tuple[Seconds, Seconds]:
        """(cycle, loop) of such packs, nothing waiting and nothing varying; legs are resources too."""
        ends = pack.lead, pack.back, pack.drafting
        cycle = max(*pack.compute, *(hop.busy for hop in pack.hops), *ends)
        loop = sum(pack.compute) + sum(hop.passes for hop in pack.hops) + sum(ends)
        delays = sum(wire.link.delay for wire in (self._lead, self._back) if wire is not None)
        return Seconds(cycle), Seconds(loop + delays)


def _leg_time(wire: Wire | None, load: Load, *, back: bool) -> float:
    return 0.0 if wire is None else serialisation(wire.link, leg_bytes(load, back=back))


def _compute_time(stage: _Stage, load: Load, wanting: float) -> float:
    """As `build` has it, except that the head is for the rows that want a token."""
    each = overlapped_block_time(stage.node, load, stage.alpha)
    ends = ends_time(stage.node, load, embeds=stage.is_first, heads=False)
    head = stage.node.head(wanting) if stage.is_last and wanting > 0 else 0.0
    return ends + head + stage.node.overhead + stage.blocks * each
