"""A UDP socket on Linux, where one system call moves many datagrams (UDP_SEGMENT out, UDP_GRO in) and the
kernel tells when they came."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from bbquic.transport.trains import Arrival, Batch, Train, cut

log = logging.getLogger("bbquic.transport")

SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104  # <linux/udp.h>
SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; its control message has the same number, and a timespec
TIMESPEC = struct.Struct("@qq")  # seconds, ns
SEGMENT_SIZE = struct.Struct("@H")
GRO_SIZE = struct.Struct("@i")
LARGEST = 65_536  # bytes; no datagram, and nothing coalesced, is larger
BATCH = 64  # datagrams read before their connections answer: one acknowledgement for many
BACKLOG = 4096  # trains kept while the kernel takes none; beyond, they are lost as on any network
NO_SEGMENTATION = (errno.EIO, errno.EINVAL)  # what a device or a tunnel that cannot cut trains answers
FULL = (errno.EAGAIN, errno.ENOBUFS)


class BatchedSocket:
    """See `bbquic.transport.udp.UdpSocket`."""

    def __init__(self, sock: socket.socket, on_batch: Callable[[Batch], None]) -> None:
        """Raises: NotImplementedError when the loop watches no sockets."""
        self._sock = sock
        self._on_batch = on_batch
        self._backlog: deque[Train] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)
        self.segments_out = _knows(sock, UDP_SEGMENT)
        self.segments_in = _knows(sock, UDP_GRO) and _switch_on(sock, SOL_UDP, UDP_GRO)
        _switch_on(sock, socket.SOL_SOCKET, SO_TIMESTAMPNS)
        self._room = socket.CMSG_SPACE(GRO_SIZE.size) + socket.CMSG_SPACE(TIMESPEC.size)

    def send(self, train: Train) -> None:
        if self._backlog or not self._try(train):
            self._keep(train)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _try(self, train: Train) -> bool:
        """Send; whether the kernel had room. What it refuses for good is lost, as on any network."""
        is_single = train.segment >= len(train.data)
        if not is_single and not self.segments_out:
            return self._try_singly(train)
        control = [] if is_single else [(SOL_UDP, UDP_SEGMENT, SEGMENT_SIZE.pack(train.segment))]
        try:
            self._sock.sendmsg((train.data,), control, 0, train.address)
        except OSError as error:
            if error.errno in FULL:
                return False
            if not is_single and error.errno in NO_SEGMENTATION:
                self.segments_out = False
                log.info("this system cannot cut UDP datagrams here (%s); sending singly", error.strerror)
                return self._try_singly(train)
            # else no route just now, or a firewall's no: QUIC's timers judge it
        return True

    def _try_singly(self, train: Train) -> bool:
        datagrams = train.datagrams()
        for place, data in enumerate(datagrams):
            try:
                self._sock.sendto(data, train.address)
            except OSError as error:
                if error.errno in FULL:
                    rest = [Train(one, len(one), train.address) for one in datagrams[place:]]
                    self._backlog.extendleft(reversed(rest))
                    self._loop.add_writer(self._sock, self._write)
                    break
        return True  # or kept

    def _keep(self, train: Train) -> None:
        if not self._backlog:
            self._loop.add_writer(self._sock, self._write)
        if len(self._backlog) < BACKLOG:
            self._backlog.append(train)

    def _write(self) -> None:
        while self._backlog:
            train = self._backlog.popleft()
            if not self._try(train):
                self._backlog.appendleft(train)
                return
        self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        batch: Batch = []
        count = 0
        while count < BATCH:
            try:
                data, controls, _, address = self._sock.recvmsg(LARGEST, self._room)
            except BlockingIOError:
                break
            except OSError:
                count += 1
                continue  # an ICMP error of some datagram sent before
            arrival = _arrival(data, controls, address)
            count += len(arrival.datagrams)
            batch.append(arrival)
        if batch:
            self._on_batch(batch)


def _arrival(data: bytes, controls: list[tuple[int, int, bytes]], address: Any) -> Arrival:
    segment, time = 0, None
    for level, kind, value in controls:
        if level == SOL_UDP and kind == UDP_GRO:
            (segment,) = GRO_SIZE.unpack_from(value)
        elif level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = TIMESPEC.unpack_from(value)
            time = seconds * 1_000_000_000 + nanoseconds
    return Arrival(cut(data, segment), address, time)


def _knows(sock: socket.socket, option: int) -> bool:
    try:
        sock.getsockopt(SOL_UDP, option)
    except OSError:
        return False
    return True


def _switch_on(sock: socket.socket, level: int, option: int) -> bool:
    try:
        sock.setsockopt(level, option, 1)
    except OSError:
        return False
    return True
