"""A UDP socket where the system or the event loop offers no more than asyncio's datagrams, one by one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from bbquic.transport.trains import Arrival, Batch, Train

BATCH = 64  # datagrams handed over at once, at most
BACKLOG = 4 << 20  # bytes asyncio keeps while the kernel takes none; beyond, they are lost as on any network


class PlainSocket(asyncio.DatagramProtocol):
    """See `bbquic.transport.udp.UdpSocket`."""

    segments_out = segments_in = False

    def __init__(self, on_batch: Callable[[Batch], None]) -> None:
        """Made by `open`."""
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._batch: Batch = []
        self._transport: Any = None  # asyncio.DatagramTransport, whose type lacks a method they all have

    @classmethod
    async def open(cls, sock: socket.socket, on_batch: Callable[[Batch], None]) -> PlainSocket:
        """Take over a bound, non-blocking socket."""
        loop = asyncio.get_running_loop()
        _, plain = await loop.create_datagram_endpoint(lambda: cls(on_batch), sock=sock)
        return plain

    def send(self, train: Train) -> None:
        if self._transport is None or self._transport.get_write_buffer_size() > BACKLOG:
            return
        for data in train.datagrams():
            self._transport.sendto(data, train.address)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # closes the socket in the loop's next turn
            self._transport = None

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Keep it until nothing more comes, so that its connection answers once for all. asyncio reads one
        datagram a turn of its loop."""
        if not self._batch:
            self._loop.call_soon(self._hand_over, 0)
        self._batch.append(Arrival([data], addr, None))

    def _hand_over(self, seen: int) -> None:
        """`seen` is how many there were a turn ago."""
        if seen < len(self._batch) < BATCH:
            self._loop.call_soon(self._hand_over, len(self._batch))
            return
        batch, self._batch = self._batch, []
        if self._transport is not None:
            self._on_batch(batch)
