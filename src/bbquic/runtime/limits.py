"""What limits a step just now, in words with the figures behind them.

A resource that is busy nearly all the time sets the pace, whatever else happens: step = max(M · cycle, loop).
Where none is, the loop does: then it is said what most of a step goes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from bbquic.runtime.accounting import Loop, is_known
from bbquic.runtime.timing import Hop, Parts, WireLink
from bbquic.units import BytesPerSecond, Seconds

COORDINATOR = "coordinator"  # as it is called wherever hops have names
DRAFTER = "drafter"
FULL = 0.85  # busy for more of the time, a resource is what the others wait for


class Cause(StrEnum):
    COMPUTE = "compute"
    LINK = "link"
    LANE = "lane"  # copies and codec, on either side of a stage
    COORDINATOR = "coordinator"
    DRAFTER = "drafter"
    LATENCY = "latency"
    TRANSMISSION = "transmission"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Load:
    """One resource over the last while: `busy` is a share of the time; `figures` is what it comes from."""

    cause: Cause
    owner: str  # such as "home-a" or "hop home-a -> cloud-b"
    busy: float
    figures: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    cause: Cause
    share: float  # busy, or the share of the step
    sentence: str

    def __str__(self) -> str:
        return self.sentence


_WORDS = {
    Cause.COMPUTE: "compute busy",
    Cause.LINK: "link busy",
    Cause.LANE: "copies and codec busy",
    Cause.COORDINATOR: "busy with packs",
    Cause.DRAFTER: "busy with guesses",
}
_ADVICE = {
    Cause.LATENCY: "more micro-batches or sequences would fill it",
    Cause.TRANSMISSION: "fewer bytes a step or more micro-batches would help",
    Cause.COMPUTE: "more micro-batches or sequences would overlap it",
    Cause.LANE: "more micro-batches would overlap them",
    Cause.WAITING: "packs come in bunches; fewer micro-batches would do as well",
}
_NAMES = {
    Cause.LATENCY: "flight",
    Cause.TRANSMISSION: "bytes on the wire",
    Cause.COMPUTE: "compute",
    Cause.LANE: "copies and codec",
    Cause.WAITING: "queueing",
}


def link_load(hop: str, sent: float, elapsed: Seconds, rate: BytesPerSecond | None) -> Load | None:
    """How busy a link is that carried `sent` bytes in `elapsed`; None where its rate is not known."""
    if rate is None or rate <= 0 or elapsed <= 0:
        return None
    speed = sent / elapsed
    return Load(Cause.LINK, f"hop {hop}", speed / rate, f"{_megabytes(speed)} of {_megabytes(rate)}")


def stage_loads(name: str, parts: Parts, steps: int, elapsed: Seconds) -> list[Load]:
    """How busy a stage's lanes were that spent `parts` on `steps` packs in `elapsed`."""
    inbound, outbound = parts.decode + parts.to_device, parts.to_host + parts.encode
    figures = f"{parts.compute / max(steps, 1) * 1000:,.1f} ms a step"
    return [
        Load(Cause.COMPUTE, name, parts.compute / elapsed, figures),
        Load(Cause.LANE, f"{name}, inbound", inbound / elapsed),
        Load(Cause.LANE, f"{name}, outbound", outbound / elapsed),
    ]


def believed_rate(link: WireLink | None) -> BytesPerSecond | None:
    """What a link carries; None where it was never seen full, and how busy it is cannot be said."""
    if link is None or link.rate is None or link.is_lower_bound:
        return None
    return BytesPerSecond(link.rate)


def busiest(loads: Sequence[Load]) -> Load | None:
    return max(loads, key=lambda load: load.busy, default=None)


def limit_of(loads: Sequence[Load], loop: Loop | None, stages: Sequence[str]) -> Limit | None:
    """The resource that is full, else what dominates the loop; None when nothing is known.

    `loop` is the average pack lately and `stages` names its stages.
    """
    most = busiest(loads)
    if most is not None and most.busy > FULL:
        figures = f" ({most.figures})" if most.figures else ""
        words = f"{most.owner}: {_WORDS[most.cause]} {_percent(most.busy)}{figures}"
        return Limit(most.cause, min(most.busy, 1.0), words)
    if loop is None or loop.measured <= 0:
        return None
    shares = loop_shares(loop)
    cause = max(shares, key=lambda one: shares[one])
    share = shares[cause] / loop.measured
    where = _where(cause, loop, stages)
    idle = "" if most is None else f"; nothing is full ({most.owner} {_percent(most.busy)})"
    words = (
        f"{cause}: {_percent(share)} of the {_milliseconds(loop.measured)} step is {_NAMES[cause]}"
        f"{where}{idle}; {_ADVICE[cause]}"
    )
    return Limit(cause, share, words)


def loop_shares(loop: Loop) -> dict[Cause, Seconds]:
    """Seconds of an average step by what they go to; a flight below 0 counts as none."""
    transmission = sum(transmission_of(hop) for hop in loop.hops)
    flight = sum(max(0.0, hop.flight) for hop in loop.hops if is_known(hop))
    lanes = sum(sum((p.from_wire, p.decode, p.to_device, p.to_host, p.encode)) for p in loop.stages)
    return {
        Cause.LATENCY: Seconds(flight - transmission),
        Cause.TRANSMISSION: Seconds(transmission + sum(hop.to_wire for hop in loop.hops)),
        Cause.COMPUTE: Seconds(sum(parts.compute for parts in loop.stages)),
        Cause.LANE: Seconds(lanes),
        Cause.WAITING: Seconds(sum(parts.queue for parts in loop.stages)),
    }


def transmission_of(hop: Hop) -> Seconds:
    """The part of a flight that the message's bytes take at the link's rate; the rest is latency."""
    if hop.rate is None or hop.rate <= 0 or not is_known(hop):
        return Seconds(0.0)
    return Seconds(min(max(0.0, hop.flight), hop.sent / hop.rate))


def hop_names(stages: Sequence[str]) -> list[str]:
    """The loop's hops, in order."""
    around = [COORDINATOR, *stages, COORDINATOR]
    return [f"{source} -> {target}" for source, target in pairwise(around)]


def _where(cause: Cause, loop: Loop, stages: Sequence[str]) -> str:
    """The largest contributor, where there are several to choose from."""
    if cause in (Cause.LATENCY, Cause.TRANSMISSION):
        names = [f"hop {name}" for name in hop_names(stages)]
        values = [_hop_part(cause, hop) for hop in loop.hops]
    else:
        names = list(stages)
        values = [_stage_part(cause, place, loop) for place in range(len(loop.stages))]
    value, name = max(zip(values, names, strict=True))
    return f" (largest: {name}, {_milliseconds(value)})" if len(names) > 1 else ""


def _hop_part(cause: Cause, hop: Hop) -> float:
    sending = transmission_of(hop)
    if cause is Cause.TRANSMISSION:
        return sending + hop.to_wire
    return max(0.0, hop.flight) - sending if is_known(hop) else 0.0


def _stage_part(cause: Cause, place: int, loop: Loop) -> float:
    parts = loop.stages[place]
    if cause is Cause.COMPUTE:
        return parts.compute
    if cause is Cause.WAITING:
        return parts.queue
    return parts.total - parts.compute - parts.queue


def _percent(share: float) -> str:
    return f"{min(share, 1.0):.0%}".replace("%", " %")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"


def _megabytes(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s" if rate >= 1e5 else f"{rate / 1e3:.1f} kB/s"
