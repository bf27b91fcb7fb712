"""A path between two UDP ports that loses and swaps datagrams, as drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast


class BadPath(asyncio.DatagramProtocol):
    """Stands between one dialler and one target; both only ever see its address."""

    def __init__(self, target: tuple[str, int], seed: int, loss: float, swap: float) -> None:
        self._target = target
        self._draw = random.Random(seed)
        self._loss, self._swap = loss, swap
        self._dialler: Any = None
        self._held: tuple[bytes, Any] | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self.lost = 0

    @classmethod
    async def open(cls, target: tuple[str, int], *, seed: int, loss: float, swap: float) -> BadPath:
        loop = asyncio.get_running_loop()
        _, path = await loop.create_datagram_endpoint(
            lambda: cls(target, seed, loss, swap), local_addr=("127.0.0.1", 0)
        )
        return path

    @property
    def address(self) -> tuple[str, int]:
        assert self._transport is not None
        return cast(tuple[str, int], self._transport.get_extra_info("sockname"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        assert self._transport is not None
        if addr != self._target:
            self._dialler = addr
        to = self._dialler if addr == self._target else self._target
        if self._draw.random() < self._loss:
            self.lost += 1
            return
        held, self._held = self._held, None
        if held is None and self._draw.random() < self._swap:
            self._held = (data, to)
            return
        self._transport.sendto(data, to)
        if held is not None:
            self._transport.sendto(*held)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
