"""The whole network as a machine without clocks: pipes between hosts, and uplinks that pipes share."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf

from bench.wan.counters import LinkStatistics
from bench.wan.link import Link, Network, Pair, Uplink
from bench.wan.pipe import Bottleneck, Pipe

Departure = tuple[float, int, bytes]  # due at, index of the destination, packet


class _Route:
    """A pipe, and when it is to be asked next."""

    __slots__ = ("destination", "pipe", "wake_at")

    def __init__(self, destination: int, pipe: Pipe) -> None:
        self.destination = destination
        self.pipe = pipe
        self.wake_at = inf


class _Shared:
    """An uplink: what it has served arrives at the pipe of its pair."""

    __slots__ = ("queue", "source", "wake_at")

    def __init__(self, source: int, queue: Bottleneck[tuple[_Route, bytes]]) -> None:
        self.source = source
        self.queue = queue
        self.wake_at = inf


class Fabric:
    """Hosts are indices into `network.hosts`. `timer` says when `depart` has something to give."""

    def __init__(self, network: Network, now: float) -> None:
        self._index = {host: place for place, host in enumerate(network.hosts)}
        self._routes: list[dict[int, _Route]] = [{} for _ in network.hosts]
        self._uplinks: list[_Shared | None] = [None for _ in network.hosts]
        self._wakes: list[tuple[float, int, _Route | _Shared]] = []
        self._due: list[tuple[float, int, int, bytes]] = []  # due at, number, destination, packet
        self._number = count()  # packets that are due together leave in the order of arrival
        for number, (source, to) in enumerate(network.pairs()):
            pipe = Pipe(network.link(source, to), now, seed=network.seed * 1_000_003 + number)
            self._routes[self._index[source]][self._index[to]] = _Route(self._index[to], pipe)
        for host, uplink in network.uplinks.items():
            self.set_uplink(host, uplink, now)

    def receive(self, source: int, destination: int, packet: bytes, now: float) -> None:
        """A host sends an IP packet to another. Times must not go back from one call to the next."""
        route = self._routes[source].get(destination)
        if route is None:
            return
        uplink = self._uplinks[source]
        if uplink is None:
            route.pipe.arrive(packet, now)
            if route.wake_at == inf:
                self._arm(route)
        elif uplink.queue.arrive(len(packet), (route, packet), now):
            if uplink.wake_at == inf:
                self._arm_uplink(uplink)
        else:
            route.pipe.refuse(packet)

    def depart(self, now: float) -> list[Departure]:
        """The packets that are due by now, in the order in which they are."""
        wakes, due = self._wakes, self._due
        while wakes and wakes[0][0] <= now:
            at, _, stage = heappop(wakes)
            if at == stage.wake_at:  # otherwise a change has made it void
                stage.wake_at = inf
                if isinstance(stage, _Route):
                    self._enqueue(stage, stage.pipe.depart(now))
                    self._arm(stage)
                else:
                    self._serve_uplink(stage, now)
                    self._arm_uplink(stage)
        departures: list[Departure] = []
        while due and due[0][0] <= now:
            at, _, destination, packet = heappop(due)
            departures.append((at, destination, packet))
        return departures

    def timer(self) -> float:
        """When to call `depart` next; inf where nothing is on its way."""
        wake = self._wakes[0][0] if self._wakes else inf
        due = self._due[0][0] if self._due else inf
        return wake if wake < due else due

    def set_link(self, pair: Pair, link: Link, now: float) -> None:
        """Another link from now on, for what waits too. What is on the wire is left alone."""
        source, destination = self._index[pair[0]], self._index[pair[1]]
        route = self._routes[source][destination]
        uplink = self._uplinks[source]
        if uplink is not None:
            self._serve_uplink(uplink, now)
        self._enqueue(route, route.pipe.configure(link, now))
        self._arm(route)
        if uplink is not None:
            self._arm_uplink(uplink)

    def set_uplink(self, host: str, settings: Uplink | None, now: float) -> None:
        """None takes the uplink away; what waits in it goes on at once."""
        source = self._index[host]
        uplink = self._uplinks[source]
        if uplink is None:
            if settings is not None:
                self._uplinks[source] = _Shared(source, Bottleneck(settings, now))
            return
        self._serve_uplink(uplink, now)
        for route, packet in uplink.queue.configure(settings or Uplink(rate_mbps=None), now):
            route.pipe.refuse(packet)
        self._serve_uplink(uplink, now)
        if settings is None:
            self._uplinks[source] = None
            uplink.wake_at = inf
        else:
            self._arm_uplink(uplink)

    def statistics(self) -> dict[Pair, LinkStatistics]:
        hosts = list(self._index)
        return {
            (hosts[source], hosts[to]): route.pipe.statistics()
            for source, routes in enumerate(self._routes)
            for to, route in routes.items()
        }

    def _enqueue(self, route: _Route, departures: list[tuple[float, bytes]]) -> None:
        for at, packet in departures:
            heappush(self._due, (at, next(self._number), route.destination, packet))

    def _serve_uplink(self, uplink: _Shared, now: float) -> None:
        for at, (route, packet) in uplink.queue.serve(now):
            route.pipe.arrive(packet, at)
            if route.wake_at == inf:
                self._arm(route)

    def _arm(self, route: _Route) -> None:
        self._wake(route, route.pipe.timer())

    def _arm_uplink(self, uplink: _Shared) -> None:
        """What leaves an uplink is looked at only when a packet of its quickest pipe could be due."""
        latency = min(route.pipe.latency for route in self._routes[uplink.source].values())
        self._wake(uplink, uplink.queue.next_served() + latency)

    def _wake(self, stage: _Route | _Shared, at: float) -> None:
        if at != stage.wake_at:
            stage.wake_at = at
            if at != inf:
                heappush(self._wakes, (at, next(self._number), stage))
