"""A channel that leads nowhere: its two ends are in one process, which talks to itself without a network."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from bbquic.transport.channel import ChannelStatistics, Role, Sent
from bbquic.transport.ending import Ending, closed_here
from bbquic.transport.identity import Peer
from bbquic.transport.mailbox import Mailbox
from bbquic.transport.message import Message
from bbquic.transport.probe import ProbeResult
from bbquic.units import Bytes, Seconds

MOST_UNREAD = 256  # messages of an end; then whoever sends waits, as over a network


def local_pair(me: Peer) -> tuple[LocalChannel, LocalChannel]:
    """The two ends of a channel from a node to itself, each of which takes the other for `me`."""
    one, other = LocalChannel(me), LocalChannel(me)
    one._other, other._other = other, one
    return one, other


class LocalChannel:
    """See `bbquic.transport.channel.Channel`. Messages are handed over as they are, in order; their bodies
    are not copied, so a sender leaves them alone."""

    def __init__(self, peer: Peer) -> None:
        """Only `local_pair` makes one: it has no other end yet."""
        self.peer = peer
        self.role = Role.NODE
        self._other = self
        self._unread: Mailbox[Message] = Mailbox()
        self._room = asyncio.Event()  # in `_unread`
        self._closed = asyncio.Event()
        self._ending: Ending | None = None
        self._received = [0, 0]  # messages, bytes

    @property
    def is_closed(self) -> bool:
        return self._ending is not None

    async def send(self, message: Message) -> Sent:
        other = self._other
        while self._ending is None and len(other._unread) >= MOST_UNREAD:
            other._room.clear()
            await other._room.wait()
        if self._ending is not None:
            raise self._ending.error()
        now = time.monotonic()
        other._received[0] += 1
        other._received[1] += message.size
        other._unread.put_nowait(replace(message, arrived=now))
        return Sent(now)

    async def receive(self) -> Message:
        message = await self._unread.get()
        self._room.set()
        return message

    def close(self, reason: str = "") -> None:
        if self._ending is None:
            for end in (self, self._other):
                end._ending = closed_here(self.peer.name, reason)
                end._unread.end(end._ending, drop=end is self)
                end._closed.set()
                end._room.set()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def statistics(self) -> ChannelStatistics:
        """What crosses no link takes no time, and nothing is known of a link."""
        (sent, bytes_sent), (received, bytes_received) = self._other._received, self._received
        return ChannelStatistics(
            messages_sent=sent,
            messages_received=received,
            bytes_sent=Bytes(bytes_sent),
            bytes_received=Bytes(bytes_received),
            unacknowledged=Bytes(0),
            rtt=Seconds(0.0),
            min_rtt=Seconds(0.0),
        )

    async def probe(self) -> ProbeResult:
        """A process's own memory has no bottleneck to find."""
        if self._ending is not None:
            raise self._ending.error()
        return ProbeResult(None, None, 0, Bytes(0), is_settled=False)
