"""What an emulated network has counted so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """One direction between two hosts. Sizes are those of IP packets, header included."""

    packets_in: int = 0
    bytes_in: int = 0
    packets_out: int = 0  # past the queue and not lost; the last of them may still be on their way
    bytes_out: int = 0
    dropped: int = 0  # found a queue full, the link's own or the host's uplink
    lost: int = 0  # on the wire, as `Link.loss` asks
    too_big: int = 0  # longer than `Link.mtu`
    longest_queue_ms: float = 0.0  # the longest that a packet had to wait in the link's own queue


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """The process that moves the packets, since it started."""

    cpu_seconds: float
    packets: int  # handed to hosts
    late_us_mean: float  # handed over so much after the time that the network's model says
    late_us_max: float
    refused: int  # packets that the kernel did not take: the host's interface is down
    stray: int  # packets to no host of the network, and all of IPv6
    is_realtime: bool  # scheduled before ordinary processes; without, a busy machine adds milliseconds
