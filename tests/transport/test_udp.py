"""The UDP sockets: the batched one of Linux and the plain one carry the same datagrams."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from transport_helpers import run

from bbquic.transport import udp
from bbquic.transport.trains import Arrival, Batch, Train, couple_whole
from bbquic.transport.udp import UdpSocket
from bbquic.transport.udp_batched import BatchedSocket
from bbquic.transport.udp_plain import PlainSocket

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")


class Port:
    """A socket of ours, and what arrived at it."""

    def __init__(self, family: int = socket.AF_INET, address: Any = ("127.0.0.1", 0)) -> None:
        self.batches: list[Batch] = []
        self._changed = asyncio.Event()
        self.bound = socket.socket(family, socket.SOCK_DGRAM)
        self.bound.bind(address)
        self.bound.setblocking(False)
        self.address = self.bound.getsockname()
        self.socket: UdpSocket

    def on_batch(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._changed.set()

    @property
    def arrivals(self) -> list[Arrival]:
        return [arrival for batch in self.batches for arrival in batch]

    @property
    def datagrams(self) -> list[bytes]:
        return [data for arrival in self.arrivals for data in arrival.datagrams]

    async def wait_datagrams(self, count: int) -> None:
        while len(self.datagrams) < count:
            self._changed.clear()
            await self._changed.wait()


async def open_batched(port: Port) -> None:
    port.socket = BatchedSocket(port.bound, port.on_batch)


async def open_plain(port: Port) -> None:
    port.socket = await PlainSocket.open(port.bound, port.on_batch)


Open = Callable[[Port], Awaitable[None]]
kinds = [pytest.param(open_batched, marks=on_linux, id="batched"), pytest.param(open_plain, id="plain")]


def with_ports(
    opening: Open, body: Callable[[Port, Port], Awaitable[None]], other: Open | None = None
) -> None:
    async def main() -> None:
        ports = Port(), Port()
        await opening(ports[0])
        await (other or opening)(ports[1])
        try:
            await body(*ports)
        finally:
            for port in ports:
                port.socket.close()
            await asyncio.sleep(0)  # asyncio closes its own a turn later

    run(main)


@pytest.mark.parametrize("sending", kinds)
@pytest.mark.parametrize("receiving", kinds)
def test_trains_arrive_as_the_datagrams_they_consist_of(sending: Open, receiving: Open) -> None:
    sent = [bytes([place]) * size for place, size in enumerate([1200, 1200, 1200, 5, 30, 16_000, 1200])]

    async def body(here: Port, there: Port) -> None:
        for train in couple_whole([(data, there.address) for data in sent]):
            here.socket.send(train)
        await there.wait_datagrams(len(sent))
        assert there.datagrams == sent
        assert {arrival.address for arrival in there.arrivals} == {here.address}

    with_ports(sending, body, receiving)


@pytest.mark.parametrize("opening", kinds)
def test_what_came_together_is_handed_over_together(opening: Open) -> None:
    async def body(here: Port, there: Port) -> None:
        for _ in range(10):
            here.bound.sendto(b"datagram", there.address)
        await there.wait_datagrams(10)
        assert len(there.batches) == 1

    with_ports(opening, body)


@on_linux
def test_the_kernel_tells_when_datagrams_came() -> None:
    async def body(here: Port, there: Port) -> None:
        for _ in range(3):
            here.bound.sendto(b"datagram", there.address)
        await there.wait_datagrams(3)
        times = [arrival.time for arrival in there.arrivals]
        assert None not in times
        assert times == sorted(times, key=lambda time: time or 0)

    with_ports(open_batched, body)


@on_linux
def test_a_kernel_that_does_not_cut_a_train_gets_it_singly_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:

    async def body(here: Port, there: Port) -> None:
        # More segments than any kernel takes: EINVAL, as from a device that cannot cut.
        too_many = Train(bytes(260), 2, there.address)
        assert here.socket.segments_out
        with caplog.at_level(logging.INFO, "bbquic.transport"):
            for turn in (1, 2):
                here.socket.send(too_many)
                await there.wait_datagrams(turn * 130)
        assert not here.socket.segments_out
        assert there.datagrams == [bytes(2)] * 260
        assert len(caplog.records) == 1

    with_ports(open_batched, body)


@on_linux
def test_what_a_full_kernel_does_not_take_goes_later_in_order(tmp_path: Path) -> None:
    # Datagrams over a Unix socket: there, the kernel says that it is full, where over loopback it drops.

    async def main() -> None:
        here, there = (
            Port(socket.AF_UNIX, str(tmp_path / "here")),
            Port(socket.AF_UNIX, str(tmp_path / "there")),
        )
        for port in (here, there):
            await open_batched(port)
        trains = [
            Train(bytes([number]) * (3000 if number % 2 else 900), 1000, there.address)
            for number in range(250)
        ]
        for train in trains:
            here.socket.send(train)
        sending = here.socket
        assert isinstance(sending, BatchedSocket)
        assert sending._backlog
        await there.wait_datagrams(500)
        assert there.datagrams == [data for train in trains for data in train.datagrams()]
        for port in (here, there):
            port.socket.close()

    run(main)


@pytest.mark.parametrize("opening", kinds)
def test_an_address_without_a_route_loses_its_datagrams_and_nothing_else(opening: Open) -> None:
    async def body(here: Port, there: Port) -> None:
        here.socket.send(Train(b"lost", 4, ("127.0.0.1", 0)))
        here.socket.send(Train(b"arrives", 7, there.address))
        await there.wait_datagrams(1)
        assert there.datagrams == [b"arrives"]

    with_ports(opening, body)


def test_small_buffers_are_told_of_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    async def main() -> None:
        monkeypatch.setattr(udp, "ENOUGH", 1 << 40)  # more than any system gives
        monkeypatch.setattr(udp, "_told", set())
        with caplog.at_level(logging.INFO, "bbquic.transport"):
            for _ in range(2):
                opened, _ = await udp.open_udp("127.0.0.1", 0, lambda batch: None)
                opened.close()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 2  # one each way
        assert "sysctl -w net.core.rmem_max=" in lines[0]

    run(main)
