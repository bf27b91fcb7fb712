"""One direction of a link as a machine without clocks: packets and the time in, packets and their times out.

Nothing here depends on how often it is asked. A packet's times follow from when it arrived and from what
the link was then and is later, so that a process that looks late is late itself and delays no other packet.
"""

from __future__ import annotations

from collections import deque
from math import inf
from random import Random
from typing import Generic, TypeVar

from bench.wan.counters import LinkStatistics
from bench.wan.link import Link, Uplink

MAX_WAITING = 65_536  # packets in a queue without a byte limit, about 100 MB: more is a flood or a bug

Item = TypeVar("Item")


class Bottleneck(Generic[Item]):
    """A drop-tail queue before a server of a given rate. Times are seconds, sizes bytes."""

    __slots__ = ("_down_since", "_free_at", "_limit", "_per_byte", "_waiting", "longest_wait")

    def __init__(self, settings: Link | Uplink, now: float) -> None:
        self._per_byte = settings.seconds_per_byte()
        self._limit = settings.queue_seconds()
        self._down_since = None if settings.up else now
        self._free_at = now  # when the server has done all that waits
        self._waiting: deque[tuple[float, int, Item]] = deque()  # served at, size, item
        self.longest_wait = 0.0

    def arrive(self, size: int, item: Item, now: float) -> bool:
        """Enqueue an item; False where the queue is full. An item that finds it empty always gets in."""
        if self._down_since is not None:
            now = self._down_since  # the server's clock stands still
        wait = self._free_at - now
        if wait <= 0.0:
            wait = 0.0
        elif wait + size * self._per_byte > self._limit:
            return False
        if len(self._waiting) >= MAX_WAITING:
            return False
        if wait > self.longest_wait:
            self.longest_wait = wait
        self._free_at = now + wait + size * self._per_byte
        self._waiting.append((self._free_at, size, item))
        return True

    def serve(self, now: float) -> list[tuple[float, Item]]:
        """What has been served by now, in order, each with the time at which its last bit left."""
        served: list[tuple[float, Item]] = []
        if self._down_since is None:
            waiting = self._waiting
            while waiting and waiting[0][0] <= now:
                at, _, item = waiting.popleft()
                served.append((at, item))
        return served

    def next_served(self) -> float:
        """When the first that waits will have been served; inf where nothing waits or moves."""
        return self._waiting[0][0] if self._waiting and self._down_since is None else inf

    def configure(self, settings: Link | Uplink, now: float) -> list[Item]:
        """Change the rate, the limit or whether it is up, from now on; `serve` has been called for now.

        The item in service goes on at the new rate with what is left of it. Returns those from the tail that
        the new limit has no room for.
        """
        clock = now if self._down_since is None else self._down_since
        per_byte = settings.seconds_per_byte()
        limit = settings.queue_seconds()
        self._free_at = clock if not settings.up and self._down_since is not None else now
        self._down_since = None if settings.up else self._free_at
        start = self._free_at
        kept: deque[tuple[float, int, Item]] = deque()
        evicted: list[Item] = []
        for place, (at, size, item) in enumerate(self._waiting):
            left = float(size)
            if place == 0 and self._per_byte > 0.0:
                left = min(left, (at - clock) / self._per_byte)
            after = self._free_at + left * per_byte
            if place > 0 and per_byte > 0.0 and after - start > limit:
                evicted.append(item)
            else:
                self._free_at = after
                kept.append((after, size, item))
        self._waiting, self._per_byte, self._limit = kept, per_byte, limit
        return evicted


class Pipe:
    """One direction between two hosts: bottleneck, loss, delay."""

    def __init__(self, link: Link, now: float, seed: int) -> None:
        self._link = link
        self._queue: Bottleneck[bytes] = Bottleneck(link, now)
        self._random = Random(seed)
        self._losing = False
        self._jitter = 0.0
        self._jitter_until = -inf
        self._last_due = -inf
        self._packets_in = self._bytes_in = self._packets_out = self._bytes_out = 0
        self._dropped = self._lost = self._too_big = 0
        self._take(link)

    def arrive(self, packet: bytes, now: float) -> None:
        size = len(packet)
        self._packets_in += 1
        self._bytes_in += size
        if size > self._mtu:
            self._too_big += 1
        elif not self._queue.arrive(size, packet, now):
            self._dropped += 1

    def refuse(self, packet: bytes) -> None:
        """Count a packet that a queue before this one had no room for."""
        self._packets_in += 1
        self._bytes_in += len(packet)
        self._dropped += 1

    def depart(self, now: float) -> list[tuple[float, bytes]]:
        """What has been served by now: packets, each with the time at which the other end gets it.

        That time may lie in the future, and need not rise from one to the next where packets are reordered.
        """
        departures: list[tuple[float, bytes]] = []
        for at, packet in self._queue.serve(now):
            if self._loss > 0.0 and self._loses():
                self._lost += 1
                continue
            due = at + self._delay
            if self._jitter_width > 0.0:
                due += self._draw_jitter(at)
            if self._reorder > 0.0 and self._random.random() < self._reorder:
                due += self._reorder_delay
            elif due < self._last_due:
                due = self._last_due
            else:
                self._last_due = due
            self._packets_out += 1
            self._bytes_out += len(packet)
            departures.append((due, packet))
        return departures

    def timer(self) -> float:
        """No packet is due before: call `depart` then; inf where none waits."""
        return self._queue.next_served() + self.latency

    def configure(self, link: Link, now: float) -> list[tuple[float, bytes]]:
        """Be another link from now on, for what waits too. Returns what `depart` would have until now."""
        departures = self.depart(now)
        self._dropped += len(self._queue.configure(link, now))
        self._take(link)
        return departures

    @property
    def link(self) -> Link:
        return self._link

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            packets_in=self._packets_in,
            bytes_in=self._bytes_in,
            packets_out=self._packets_out,
            bytes_out=self._bytes_out,
            dropped=self._dropped,
            lost=self._lost,
            too_big=self._too_big,
            longest_queue_ms=self._queue.longest_wait * 1e3,
        )

    def _take(self, link: Link) -> None:
        self._link = link
        self._mtu: float = inf if link.mtu is None else link.mtu
        self._delay = link.delay_ms / 1e3
        self._jitter_width = link.jitter_ms / 1e3
        self._jitter_hold = link.jitter_hold_ms / 1e3
        self._jitter_until = -inf
        self.latency = self._delay - self._jitter_width  # seconds; the least that a packet travels
        self._loss = link.loss
        self._run_ends = 1.0 if link.loss_burst == 1.0 else 1.0 / link.loss_burst
        self._run_begins = link.loss  # for a packet after one that was not lost
        if link.loss_burst != 1.0:
            self._run_begins = min(1.0, link.loss / (link.loss_burst * (1.0 - link.loss)))
        self._reorder = link.reorder
        self._reorder_delay = link.reorder_ms / 1e3

    def _loses(self) -> bool:
        """Gilbert's chain: a share `loss` of all packets, in runs of `loss_burst` on average."""
        if self._losing and self._run_ends < 1.0:
            self._losing = self._random.random() >= self._run_ends
        else:
            self._losing = self._random.random() < self._run_begins
        return self._losing

    def _draw_jitter(self, at: float) -> float:
        if at >= self._jitter_until:
            self._jitter = self._random.uniform(-self._jitter_width, self._jitter_width)
            self._jitter_until = at + self._jitter_hold
        return self._jitter
