"""What a network is: its hosts, and what each direction between two of them does to packets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import permutations

HOST_NAME = re.compile(r"[a-z][a-z0-9]{0,11}")  # goes into the names of namespaces and variables
MAX_HOSTS = 32  # one process moves all their packets
MIN_MTU = 68  # IPv4's own


class _Serves:
    """What a link and an uplink have in common: a rate and a drop-tail queue before it."""

    __slots__ = ()
    rate_mbps: float | None
    queue_ms: float
    queue_bytes: int | None

    def seconds_per_byte(self) -> float:
        """0 where the rate is unlimited."""
        return 0.0 if self.rate_mbps is None else 8e-6 / self.rate_mbps

    def queue_seconds(self) -> float:
        """The queue's limit, as time at the rate."""
        if self.queue_bytes is None:
            return self.queue_ms / 1e3
        return self.queue_bytes * self.seconds_per_byte()

    def _check_queue(self) -> None:
        _require(
            self.rate_mbps is None or self.rate_mbps > 0, "rate_mbps must be positive; `up` stops a link"
        )
        _require(self.queue_ms >= 0, "queue_ms must not be negative")
        _require(self.queue_bytes is None or self.queue_bytes >= 0, "queue_bytes must not be negative")


@dataclass(frozen=True, slots=True)
class Uplink(_Serves):
    """A bottleneck that all packets of a host pass before the link of their pair, as a home line is."""

    rate_mbps: float | None
    queue_ms: float = 100.0
    queue_bytes: int | None = None
    up: bool = True

    def __post_init__(self) -> None:
        """Raises: ValueError on a value that no uplink can have."""
        self._check_queue()


@dataclass(frozen=True, slots=True)
class Link(_Serves):
    """One direction between two hosts. A packet waits in the queue, is serialised at the rate, may be lost,
    and then travels for the delay. Packets keep their order, but for the share that `reorder` holds back.
    """

    rate_mbps: float | None = None  # of IP packets, header included; None: unlimited
    delay_ms: float = 0.0  # one way
    jitter_ms: float = 0.0  # the delay is uniform in delay_ms ± jitter_ms
    jitter_hold_ms: float = 0.0  # a drawn delay holds for so long; 0: each packet draws its own
    loss: float = 0.0  # share of packets
    loss_burst: float = 1.0  # mean length of a run of losses; 1: each packet by itself
    reorder: float = 0.0  # share of packets that travel for `reorder_ms` more, overtaken by others
    reorder_ms: float = 0.0
    queue_ms: float = 100.0  # drop-tail limit, as time at the rate
    queue_bytes: int | None = None  # the same as a size; where given, queue_ms does not count
    mtu: int | None = None  # longer packets vanish, as on a path whose ICMP is filtered
    up: bool = True  # while down nothing is served: packets queue, and what has left goes on

    def __post_init__(self) -> None:
        """Raises: ValueError on a value that no link can have."""
        self._check_queue()
        _require(self.delay_ms >= 0, "delay_ms must not be negative")
        _require(0 <= self.jitter_ms <= self.delay_ms, "jitter_ms must be between 0 and delay_ms")
        _require(self.jitter_hold_ms >= 0, "jitter_hold_ms must not be negative")
        _require(0 <= self.loss <= 1, "loss must be a share, between 0 and 1")
        _require(self.loss_burst >= 1, "loss_burst must be at least 1")
        possible = self.loss_burst == 1 or self.loss <= self.loss_burst / (self.loss_burst + 1)
        _require(possible, "loss is more than runs of loss_burst, with a packet between them, can make")
        _require(0 <= self.reorder <= 1, "reorder must be a share, between 0 and 1")
        _require(self.reorder_ms >= 0, "reorder_ms must not be negative")
        _require(self.mtu is None or self.mtu >= MIN_MTU, f"mtu must be at least {MIN_MTU}")


Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts by name; a pair without a link of its own gets `default`. `seed` settles loss and jitter."""

    hosts: tuple[str, ...]
    links: Mapping[Pair, Link] = field(default_factory=dict)  # (from, to)
    uplinks: Mapping[str, Uplink] = field(default_factory=dict)
    mtus: Mapping[str, int] = field(default_factory=dict)  # of a host's interface; 1500 where absent
    default: Link = field(default_factory=Link)
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises: ValueError on a bad name, a host twice, or a link to a host that is not there."""
        _require(1 <= len(self.hosts) <= MAX_HOSTS, f"a network has 1 to {MAX_HOSTS} hosts")
        _require(len(set(self.hosts)) == len(self.hosts), "a host is named twice")
        for host in self.hosts:
            named = HOST_NAME.fullmatch(host) is not None
            _require(named, f"host {host!r}: a name is up to 12 small letters and digits, a letter first")
        for host in (*(one for pair in self.links for one in pair), *self.uplinks, *self.mtus):
            _require(host in self.hosts, f"no host is called {host!r}")
        _require(all(source != to for source, to in self.links), "a host has no link to itself")
        _require(all(MIN_MTU <= mtu <= 65535 for mtu in self.mtus.values()), "an mtu is 68 to 65535 bytes")

    def pairs(self) -> list[Pair]:
        return list(permutations(self.hosts, 2))

    def link(self, source: str, destination: str) -> Link:
        return self.links.get((source, destination), self.default)

    def mtu(self, host: str) -> int:
        return self.mtus.get(host, 1500)


def mesh(*hosts: str, link: Link, mtu: int = 1500, seed: int = 1) -> Network:
    """Every direction between any two of the hosts alike."""
    return Network(hosts, default=link, mtus=dict.fromkeys(hosts, mtu), seed=seed)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)
