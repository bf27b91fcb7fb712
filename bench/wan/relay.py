"""The process that moves packets between the hosts' TUN devices, at the times that the fabric says.

It is a process of its own, and the kernel runs it before ordinary ones, so that a busy bench does not bend
its clock. Waking up costs more than all else it does for a packet. Where there is much to do it therefore
sleeps for `moderation` after each round, whatever arrives meanwhile: a network card spares its host
interrupts in the same way. Where there is little, a machine sleeps soundly and wakes late; the relay then
rises early, and watches the clock.

    python -m bench.wan.relay CONTROL TUN...    file descriptors; started by `Wan`, of no use by itself
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from bench.wan import control, hosts
from bench.wan.counters import RelayStatistics
from bench.wan.fabric import Fabric
from bench.wan.link import Link, Uplink

READ_AT_ONCE = 64  # packets from one host before due ones are looked at again
SOUND_SLEEP = 1e-3  # seconds, after which a virtual machine takes about 0.2 ms to wake
RISE_EARLY = 0.2e-3
LONGEST_WAIT = 3600.0  # seconds; select knows no infinity
PRIORITY = 5  # among real-time processes; any is ahead of the ordinary


class Relay:
    """Reads, waits and writes until its owner says stop, or is gone: then it removes the hosts."""

    def __init__(self, owner: socket.socket, tuns: list[int], setup: dict[str, Any]) -> None:
        self._owner = owner
        self._tuns = tuns
        self._sizes = setup["mtus"]
        self._destinations = {socket.inet_aton(one): place for place, one in enumerate(setup["addresses"])}
        self._moderation = float(setup["moderation_s"])
        self._namespaces: list[str] = setup["namespaces"]
        self._fabric = Fabric(control.network_from(setup["network"]), time.monotonic())
        self._is_realtime = _become_realtime()
        self._running = True
        self._packets = self._refused = self._stray = 0
        self._late = self._latest = 0.0

    def run(self) -> None:
        sources = {fd: place for place, fd in enumerate(self._tuns)}
        inputs = [self._owner.fileno(), *self._tuns]
        is_busy = False
        worked_at = time.monotonic()
        while self._running:
            delivered = self._deliver()
            if is_busy:
                self._nap()
                ready = select.select(inputs, [], [], 0.0)[0]
            else:
                ready = self._wait(inputs)
            for fd in ready:
                if fd in sources:
                    self._collect(fd, sources[fd])
                else:
                    self._obey()
            is_busy = False
            if delivered or ready:
                now = time.monotonic()
                is_busy = self._moderation > 0.0 and (delivered > 1 or now - worked_at < self._moderation)
                worked_at = now

    def _wait(self, inputs: list[int]) -> list[int]:
        """Until a packet arrives or is due: the inputs that are readable."""
        wait = self._until_due()
        if wait < SOUND_SLEEP:
            return select.select(inputs, [], [], wait)[0]
        ready = select.select(inputs, [], [], wait - RISE_EARLY)[0]
        while not ready and 0.0 < self._until_due() <= RISE_EARLY:
            ready = select.select(inputs, [], [], 0.0)[0]
        return ready

    def _until_due(self) -> float:
        return min(max(0.0, self._fabric.timer() - time.monotonic()), LONGEST_WAIT)

    def _nap(self) -> None:
        """Sleep for the moderation, or up to twice that if something is due then."""
        time.sleep(min(max(self._moderation, self._until_due()), 2 * self._moderation))

    def _collect(self, tun: int, source: int) -> None:
        size, destinations, receive = self._sizes[source], self._destinations, self._fabric.receive
        for _ in range(READ_AT_ONCE):
            try:
                packet = os.read(tun, size)
            except BlockingIOError:
                return
            destination = destinations.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if destination is None:
                self._stray += 1
            else:
                receive(source, destination, packet, time.monotonic())

    def _deliver(self) -> int:
        """How many packets there were."""
        now = time.monotonic()
        departures = self._fabric.depart(now)
        for due, destination, packet in departures:
            try:
                os.write(self._tuns[destination], packet)
            except OSError:
                self._refused += 1
            self._packets += 1
            late = now - due
            self._late += late
            if late > self._latest:
                self._latest = late
        return len(departures)

    def _obey(self) -> None:
        order = control.receive(self._owner)
        now = time.monotonic()
        match order:
            case None:
                self._running = False
                self._remove_hosts()
            case {"do": "stop"}:
                self._running = False
            case {"do": "link", "pair": [str(source), str(to)], "link": dict(fields)}:
                self._fabric.set_link((source, to), Link(**fields), now)
            case {"do": "uplink", "host": str(host), "uplink": dict() | None as fields}:
                self._fabric.set_uplink(host, None if fields is None else Uplink(**fields), now)
            case {"do": "count"}:
                pass
            case _:
                raise ValueError(f"no such order: {order!r}")
        if order is not None:
            with suppress(BrokenPipeError):
                control.send(self._owner, self._report(with_links=order["do"] == "count"))

    def _report(self, with_links: bool) -> dict[str, Any]:
        relay = RelayStatistics(
            cpu_seconds=time.process_time(),
            packets=self._packets,
            late_us_mean=self._late / max(1, self._packets) * 1e6,
            late_us_max=self._latest * 1e6,
            refused=self._refused,
            stray=self._stray,
            is_realtime=self._is_realtime,
        )
        return control.report(relay, self._fabric.statistics() if with_links else {})

    def _remove_hosts(self) -> None:
        """The owner was killed, and cannot."""
        for namespace in self._namespaces:
            hosts.remove(namespace)


def _become_realtime() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    except OSError:
        return False
    return True


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when to stop
    descriptors = [int(one) for one in sys.argv[1:]]
    with socket.socket(fileno=descriptors[0]) as owner:
        setup = control.receive(owner)
        if setup is None:
            return
        relay = Relay(owner, descriptors[1:], setup)
        control.send(owner, {"ready": True})
        gc.collect()
        gc.freeze()
        gc.disable()  # packets make no cycles, and a collection would make them late
        relay.run()


if __name__ == "__main__":
    main()
