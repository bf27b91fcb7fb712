"""What the emulator does against what was asked of it, by traffic through its own hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.wan import probe
from bench.wan.emulator import MODERATION_US, Command, Wan
from bench.wan.errors import WanError
from bench.wan.link import Link, mesh

PACKET = 1480  # IP bytes: datagrams of 1452
PORT = 5001
PINGS = 100
OVERLOAD = 1.3  # of the rate: the queue stays full, and the link alone sets the pace
UNDERLOAD = 0.8  # of the rate: no queue, so that what is missing was lost on the wire
DEADLINE_S = 60.0

SETTINGS = (
    Link(rate_mbps=20, delay_ms=50),
    Link(rate_mbps=125, delay_ms=25),
    Link(rate_mbps=250, delay_ms=25),
    Link(rate_mbps=40, delay_ms=40, jitter_ms=15, jitter_hold_ms=20),
    Link(rate_mbps=20, delay_ms=50, loss=0.01),
    Link(rate_mbps=125, delay_ms=25, loss=0.02, loss_burst=5),
    Link(rate_mbps=40, delay_ms=20, reorder=0.02, reorder_ms=5),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A flow in one direction, and pings, through a pair of like links."""

    asked: Link
    mbps: float  # under overload, at the receiver; of what gets through where there is loss
    gap_us: float  # median between two packets then
    relay_s_per_gb: float  # CPU that the relay takes for it
    relay_share: float  # of a core, meanwhile
    late_us: float  # mean over all packets
    rtt_ms: float  # median, with the programs at both ends
    delay_ms: float  # median one way, idle; the receiver's kernel's time
    loss: float  # share, below the rate
    reordered: float  # share of packets that come after one sent later

    @property
    def expected_mbps(self) -> float:
        return (self.asked.rate_mbps or 0.0) * (1 - self.asked.loss)


def measure_all(seconds: float, moderation_us: float = MODERATION_US) -> Iterator[Measured]:
    """One setting after another. seconds: of each flow. Raises: WanUnavailable, WanError."""
    for link in SETTINGS:
        yield measure(link, seconds, moderation_us)


def measure(link: Link, seconds: float, moderation_us: float = MODERATION_US) -> Measured:
    """link: both directions alike; it has a rate. Raises: WanUnavailable, WanError."""
    if link.rate_mbps is None:
        raise ValueError("a link without a rate has none to measure")
    with Wan(mesh("a", "b", link=link), moderation_us=moderation_us) as wan:
        pinged, idle = _ping(wan)
        before = wan.relay_statistics(), wan.statistics()["a", "b"]
        full = flow(wan, "a", "b", link.rate_mbps * OVERLOAD, seconds)
        after = wan.relay_statistics(), wan.statistics()["a", "b"]
        cpu = after[0].cpu_seconds - before[0].cpu_seconds
        moved = after[1].bytes_out - before[1].bytes_out
        wan.set("a", "b", queue_ms=1000.0)  # a sender that was late and catches up loses nothing to the queue
        light = flow(wan, "a", "b", link.rate_mbps * UNDERLOAD, seconds)
    return Measured(
        asked=link,
        mbps=full["mbps"],
        gap_us=full["gap_us_p50"],
        relay_s_per_gb=cpu / (moved / 1e9),
        relay_share=cpu / (moved * 8e-6 / link.rate_mbps),
        late_us=after[0].late_us_mean,
        rtt_ms=pinged["rtt_ms_p50"],
        delay_ms=idle["delay_ms_p50"],
        loss=light["lost"],
        reordered=light["reordered"] / light["received"],
    )


def flow(
    wan: Wan,
    source: str,
    destination: str,
    mbps: float,
    seconds: float,
    *,
    segments: int = 8,
    size: int = PACKET,
) -> dict[str, Any]:
    """Send packets of `size` IP bytes from one host to another; returns what `probe.summary` says."""
    receiver = start_receiver(wan, destination)
    arguments = [wan.address(destination), str(PORT), str(mbps), str(size), str(seconds), str(segments)]
    run_probe(wan, source, "send", *arguments)
    return finish(receiver)


def start_receiver(wan: Wan, host: str) -> Command:
    """When this returns it is listening."""
    receiver = _probe(wan, host, "receive", wan.address(host), str(PORT))
    assert receiver.stdout is not None
    if receiver.stdout.readline() != "ready\n":
        raise WanError(f"the receiver in {host} did not start")
    return receiver


def run_probe(wan: Wan, host: str, *arguments: str) -> str:
    """Returns what it printed."""
    command = _probe(wan, host, *arguments)
    output, _ = command.communicate()
    if command.returncode != 0:
        raise WanError(f"probe.py {arguments[0]} in {host} failed, with {command.returncode}")
    return output


def finish(receiver: Command) -> dict[str, Any]:
    """Wait until nothing more comes. Raises: WanError where next to nothing came at all."""
    output, _ = receiver.communicate()
    if receiver.returncode != 0:
        raise WanError(f"the receiver failed, with {receiver.returncode}")
    seen: dict[str, Any] = json.loads(output)
    if seen["received"] < 2:
        raise WanError("no packets arrived")
    return seen


def table(rows: list[Measured]) -> Iterator[str]:
    """Lines to print: asked, then got; in parentheses, off by how much."""
    columns = ("Mbit/s", "gap µs", "one way ms", "RTT ms", "lost", "late µs", "CPU s/GB", "of a core")
    widths = (16, 7, 15, 8, 7, 8, 9, 10)
    yield f"{'asked':42}" + "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    for row in rows:
        cells = (
            f"{row.mbps:.2f} ({row.mbps / row.expected_mbps - 1:+.2%})",
            f"{row.gap_us:.0f}",
            f"{row.delay_ms:.2f} ({row.delay_ms - row.asked.delay_ms:+.2f})",
            f"{row.rtt_ms:.2f}",
            f"{row.loss:.2%}",
            f"{row.late_us:.0f}",
            f"{row.relay_s_per_gb:.1f}",
            f"{row.relay_share:.0%}",
        )
        line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        yield f"{describe(row.asked):42}{line}"


def describe(link: Link) -> str:
    """What differs from an ordinary link."""
    plain = Link()
    parts = [f"{link.rate_mbps:g} Mbit/s", f"{link.delay_ms:g} ms"]
    if link.jitter_ms:
        parts.append(f"±{link.jitter_ms:g} ms")
    if link.loss:
        parts.append(f"{link.loss:.2%} lost")
    if link.loss_burst != plain.loss_burst:
        parts.append(f"runs of {link.loss_burst:g}")
    if link.reorder:
        parts.append(f"{link.reorder:.0%} +{link.reorder_ms:g} ms")
    return ", ".join(parts)


def _ping(wan: Wan) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the pinging end saw, and what the other end did, in an idle network without loss."""
    lossy = wan.link("a", "b").loss
    wan.set_both("a", "b", loss=0.0)
    receiver = start_receiver(wan, "b")
    pinged = json.loads(run_probe(wan, "a", "ping", wan.address("b"), str(PORT), str(PINGS)))
    idle = finish(receiver)
    wan.set_both("a", "b", loss=lossy)
    return pinged, idle


def _probe(wan: Wan, host: str, *arguments: str) -> Command:
    argv = [sys.executable, str(probe.__file__), *arguments]
    return wan.run(host, argv, deadline_s=DEADLINE_S, stdout=subprocess.PIPE)
