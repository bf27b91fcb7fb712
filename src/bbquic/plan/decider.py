"""What a controller may see and set, so that the same one runs in a job and in a simulation of it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bbquic.plan.breakeven import Way
from bbquic.plan.line import HopPassage, Passage
from bbquic.units import BytesPerSecond, Seconds

LAG = 4  # messages over which a link's rate is averaged: so many steps late a change is seen in full


@dataclass(frozen=True, slots=True)
class HopSeen:
    """A hop by the packs that are back. `rate` in bytes of datagrams a second, over the newest LAG messages;
    None before the first is back. `payload` raw bytes, `out` and `into` seconds in the lanes (copy, encode;
    decode, copy), of the newest message, which was sent by `way`."""

    way: Way
    rate: BytesPerSecond | None = None
    payload: float = 0.0
    out: Seconds = Seconds(0.0)
    into: Seconds = Seconds(0.0)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known at the coordinator when a pack is back and the next one is to leave. `step` counts packs
    that came back, `loop` is the newest one's with all waiting, `compute` is by stages."""

    now: Seconds
    step: int
    batch: int
    micro_batches: int
    loop: Seconds
    compute: tuple[Seconds, ...]
    hops: tuple[HopSeen, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """From the next pack on: the way of each hop, and how many micro-batches there are to be."""

    ways: tuple[Way, ...]
    micro_batches: int


class Decider(Protocol):
    """Asked at each step's boundary."""

    def decide(self, seen: Seen) -> Decision: ...


class Watch:
    """Makes `Seen` of the passages that are back."""

    def __init__(self, decision: Decision, batch: int) -> None:
        self.decision = decision
        self._batch = batch
        self._step = 0
        self._wires: list[deque[tuple[float, float]]] = [deque(maxlen=LAG) for _ in decision.ways]
        self._newest: Passage | None = None

    def note(self, passage: Passage) -> None:
        self._step += 1
        self._newest = passage
        for wire, hop in zip(self._wires, passage.hops, strict=True):
            wire.append((hop.sent, hop.wire))

    def ask(self, decider: Decider, now: Seconds) -> Decision:
        self.decision = decider.decide(self.seen(now))
        return self.decision

    def seen(self, now: Seconds) -> Seen:
        newest = self._newest
        count = self.decision.micro_batches
        if newest is None:
            hops = tuple(HopSeen(way) for way in self.decision.ways)
            return Seen(now, 0, self._batch, count, Seconds(0.0), (), hops)
        hops = tuple(map(_hop_seen, newest.hops, self._wires))
        loop, compute = Seconds(newest.back - newest.entered), tuple(map(Seconds, newest.compute))
        return Seen(now, self._step, self._batch, count, loop, compute, hops)


def _hop_seen(hop: HopPassage, wire: Sequence[tuple[float, float]]) -> HopSeen:
    sent, took = sum(size for size, _ in wire), sum(seconds for _, seconds in wire)
    rate = BytesPerSecond(sent / took) if took > 0 else None
    return HopSeen(hop.way, rate, hop.payload, Seconds(hop.out), Seconds(hop.into))
