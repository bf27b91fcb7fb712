"""The UDP socket of an endpoint: which kind this system allows, where it listens, how large it buffers."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from bbquic.errors import ConfigError
from bbquic.transport.trains import Batch, Train
from bbquic.transport.udp_batched import BatchedSocket
from bbquic.transport.udp_plain import PlainSocket

log = logging.getLogger("bbquic.transport")

BUFFER, ENOUGH = 8 << 20, 4 << 20  # bytes asked for each way; 4 MiB last a late reader 67 ms at 500 Mbit/s
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # Linux: over the sysctl's limit, for those who may


class UdpSocket(Protocol):
    """Datagrams in, by callback and in batches; datagrams out, as soon as the kernel takes them.

    `segments_out` tells whether the kernel cuts trains (UDP_SEGMENT), `segments_in` whether it hands over
    what came together as one (UDP_GRO).
    """

    segments_out: bool
    segments_in: bool

    def send(self, train: Train) -> None: ...

    def close(self) -> None:
        """Stop. What the kernel has not taken is lost."""


async def open_udp(
    host: str,
    port: int,
    on_batch: Callable[[Batch], None],
    sock: socket.socket | None = None,
    *,
    batched: bool = True,
) -> tuple[UdpSocket, socket.socket]:
    """Bind, or take over a socket that is bound. An empty host means every address of this machine. Without
    `batched` it is asyncio's datagrams even on Linux.

    Raises: ConfigError when the address is not ours or the port is taken.
    """
    try:
        sock = sock or await _bind(host, port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"cannot listen on {host or 'any address'}, UDP port {port}: {error.strerror or error}",
            hint="another node may be running; choose another port" if taken else None,
        ) from None
    sock.setblocking(False)
    _ask_for_buffers(sock)
    if batched and sys.platform == "linux":
        try:
            return BatchedSocket(sock, on_batch), sock
        except NotImplementedError:
            pass  # this loop watches no sockets
    return await PlainSocket.open(sock, on_batch), sock


async def resolve(sock: socket.socket, host: str, port: int) -> Any:
    """The socket address of a host, in the socket's family. Raises: OSError when there is none."""
    flags = socket.AI_V4MAPPED if sock.family == socket.AF_INET6 else 0
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, family=sock.family, type=socket.SOCK_DGRAM, flags=flags)
    return found[0][4]


def _ask_for_buffers(sock: socket.socket) -> None:
    """Ask for large buffers, read back what was given, and say once where that is too little."""
    for option, force, sysctl in (
        (socket.SO_RCVBUF, SO_RCVBUFFORCE, "net.core.rmem_max"),
        (socket.SO_SNDBUF, SO_SNDBUFFORCE, "net.core.wmem_max"),
    ):
        given = _ask(sock, option, force if sys.platform == "linux" else None)
        if given < ENOUGH and sysctl not in _told:
            _told.add(sysctl)
            log.info(
                "UDP sockets may buffer %d KiB here, %d are better for fast links (sysctl -w %s=%d)",
                given >> 10,
                BUFFER >> 10,
                sysctl,
                BUFFER,
            )


_told: set[str] = set()  # one hint a process, however many sockets it opens


def _ask(sock: socket.socket, option: int, force: int | None) -> int:
    """Bytes that the buffer has now. Linux reports twice what counts, for its own bookkeeping."""
    for attempt, size in ((option, BUFFER // 2), (option, BUFFER), (force, BUFFER)):
        if attempt is not None:
            with suppress(OSError):  # not so much, or not by us
                sock.setsockopt(socket.SOL_SOCKET, attempt, size)
    given = sock.getsockopt(socket.SOL_SOCKET, option)
    return given // 2 if sys.platform == "linux" else given


async def _bind(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    if host not in ("", "::"):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        return _bound(found[0][0], found[0][4])
    try:
        return _bound(socket.AF_INET6, ("::", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return _bound(socket.AF_INET, ("0.0.0.0", port))


def _bound(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock
