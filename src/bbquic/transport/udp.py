"""One non-blocking UDP socket, read in batches."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from bbquic.errors import ConfigError

BATCH = 64  # datagrams read before their connections answer: one acknowledgement for many
LARGEST = 65536  # bytes; no datagram is larger
BUFFER = 4 << 20  # bytes asked of the kernel each way; it gives what its sysctls allow
BACKLOG = 4096  # datagrams kept while the kernel takes none; beyond, they are lost as on any network

Batch = list[tuple[bytes, Any]]


class UdpSocket:
    """Datagrams in, by callback and in batches; datagrams out, as soon as the kernel takes them."""

    def __init__(self, sock: socket.socket, on_batch: Callable[[Batch], None]) -> None:
        self._sock = sock
        self._on_batch = on_batch
        self._backlog: deque[tuple[bytes, Any]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    @classmethod
    async def open(
        cls, host: str, port: int, on_batch: Callable[[Batch], None], sock: socket.socket | None = None
    ) -> UdpSocket:
        """Bind, or take over a socket that is bound. An empty host means every address of this machine.

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
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        return cls(sock, on_batch)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return host, port

    async def resolve(self, host: str, port: int) -> Any:
        """The socket address of a host, in this socket's family. Raises: OSError when there is none."""
        family = self._sock.family
        flags = socket.AI_V4MAPPED if family == socket.AF_INET6 else 0
        found = await self._loop.getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM, flags=flags)
        return found[0][4]

    def send(self, data: bytes, address: Any) -> None:
        if self._backlog:
            self._keep(data, address)
            return
        try:
            self._sock.sendto(data, address)
        except BlockingIOError:
            self._keep(data, address)
            self._loop.add_writer(self._sock, self._write)
        except OSError:
            pass  # no route just now, or a firewall's no: a lost datagram, and QUIC's timers judge it

    def close(self) -> None:
        """Stop. What the kernel has not taken is lost."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _keep(self, data: bytes, address: Any) -> None:
        if len(self._backlog) < BACKLOG:
            self._backlog.append((data, address))

    def _write(self) -> None:
        while self._backlog:
            data, address = self._backlog[0]
            try:
                self._sock.sendto(data, address)
            except BlockingIOError:
                return
            except OSError:
                pass
            self._backlog.popleft()
        self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        batch: Batch = []
        for _ in range(BATCH):
            try:
                batch.append(self._sock.recvfrom(LARGEST))
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error of some datagram sent before
        if batch:
            self._on_batch(batch)


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
