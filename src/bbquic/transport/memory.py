"""A network inside one process, for tests: the same promises as over QUIC, without sockets or clocks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bbquic import __version__
from bbquic.errors import PeerUnreachable
from bbquic.transport.channel import ChannelStatistics, Role, Sent
from bbquic.transport.ending import (
    CloseCode,
    Ending,
    closed_by_peer,
    closed_here,
    silent,
    unpinned_reason,
    wrong_key,
)
from bbquic.transport.identity import Identity, Peer, find_peer
from bbquic.transport.mailbox import Mailbox
from bbquic.transport.message import Message, MessageDecoder, encode
from bbquic.transport.options import EndpointOptions
from bbquic.transport.probe import ProbeResult
from bbquic.transport.session import Session, new_hello
from bbquic.transport.strangers import StrangerLog
from bbquic.units import Bytes


class MemoryNetwork:
    """Where memory endpoints find one another by address.

    With `order`, messages in flight, of all channels alike, arrive in an order it draws, some held back for
    a few turns of the loop; the same seed and program give the same order. Without, as they were sent.
    """

    def __init__(self, order: random.Random | None = None) -> None:
        self._order = order
        self._endpoints: dict[tuple[str, int], MemoryEndpoint] = {}
        self._in_flight: list[tuple[MemoryChannel, Message]] = []
        self._scheduled = False

    def endpoint(
        self,
        identity: Identity,
        peers: Mapping[str, Peer],
        role: Role,
        *,
        engine: str = __version__,
        options: EndpointOptions | None = None,
    ) -> MemoryEndpoint:
        """An endpoint that listens at its peer's own address, or at one nobody else has.

        Raises: ValueError when another one listens there.
        """
        me = find_peer(peers.values(), identity.fingerprint)
        address = me.address if me is not None and role is Role.NODE else None
        address = address or ("memory", len(self._endpoints) + 1)
        if address in self._endpoints:
            raise ValueError(f"{address[0]} port {address[1]} is taken")
        name = me.name if me is not None else identity.label
        endpoint = MemoryEndpoint(self, address, name, identity, peers, role, engine, options)
        self._endpoints[address] = endpoint
        return endpoint

    def find(self, address: tuple[str, int] | None) -> MemoryEndpoint | None:
        return None if address is None else self._endpoints.get(address)

    def remove(self, endpoint: MemoryEndpoint) -> None:
        self._endpoints.pop(endpoint.address, None)

    def carry(self, to: MemoryChannel, message: Message) -> None:
        """Deliver at once, or some time later when the order is drawn."""
        if self._order is None:
            to.deliver(message)
            return
        self._in_flight.append((to, message))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn, self._order)

    def _turn(self, order: random.Random) -> None:
        if order.random() < 0.5:  # else: this turn nothing arrives, so that later messages catch up
            to, message = self._in_flight.pop(order.randrange(len(self._in_flight)))
            to.deliver(message)
        self._scheduled = bool(self._in_flight)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._turn, order)


class MemoryEndpoint:
    """See `bbquic.transport.channel.Endpoint`."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: tuple[str, int],
        name: str,
        identity: Identity,
        peers: Mapping[str, Peer],
        role: Role,
        engine: str,
        options: EndpointOptions | None,
    ) -> None:
        self.options = options or EndpointOptions()
        self.name = name
        self.identity = identity
        self._network = network
        self._address = address
        self._peers = peers
        self._hello = new_hello(role, engine)
        self._channels: list[MemoryChannel] = []
        self._waiting: Mailbox[MemoryChannel] = Mailbox()
        self._strangers = StrangerLog()
        self._ended: Ending | None = None

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    async def connect(self, peer: Peer) -> MemoryChannel:
        await asyncio.sleep(0)  # a network's answer never comes in the same turn
        if self._ended is not None:
            raise self._ended.error()
        target = self._network.find(peer.address)
        if target is None:
            raise PeerUnreachable(f"{peer.name} does not answer at {peer.address or 'no address'}")
        if target.identity.fingerprint not in peer.keys:
            raise wrong_key(peer.name, target.identity.fingerprint).error()
        session = Session(self._hello, name=self.name, peer=peer.name)
        back = target.answer(self, session)
        mine = MemoryChannel(self._network, peer, session.role, self.options)
        mine.join(back)
        self._channels.append(mine)
        return mine

    def answer(self, caller: MemoryEndpoint, session: Session) -> MemoryChannel:
        """The accepting side of `connect`: check the caller's key, exchange hellos, queue the channel."""
        key = caller.identity.fingerprint
        peer = find_peer(self._peers.values(), key)
        if peer is None:
            self._strangers.refused(caller.address, key, asyncio.get_running_loop().time())
            raise closed_by_peer(self.name, CloseCode.UNPINNED, unpinned_reason(key)).error()
        if len(self._waiting) >= self.options.waiting_channels:
            raise closed_by_peer(self.name, CloseCode.BUSY, "").error()
        mine = Session(self._hello, name=self.name, peer=peer.name)
        session.receive_untrusted(mine.hello())
        mine.receive_untrusted(session.hello())
        channel = MemoryChannel(self._network, peer, mine.role, self.options)
        self._channels.append(channel)
        self._waiting.put_nowait(channel)
        return channel

    async def accept(self) -> MemoryChannel:
        return await self._waiting.get()

    async def close(self) -> None:
        self._leave(closed_here("every peer", "the endpoint was closed"))
        for channel in self._channels:
            channel.close("the endpoint was closed")

    def vanish(self) -> None:
        """Die without a word, as by a pulled plug. Peers notice at once, in place of the idle timeout."""
        self._leave(closed_here("every peer", "the endpoint vanished"))
        for channel in self._channels:
            channel.vanish(self.name)

    def _leave(self, ending: Ending) -> None:
        if self._ended is None:
            self._ended = ending
            self._network.remove(self)
            self._waiting.end(ending, drop=True)


@dataclass
class _Count:
    messages: int = 0
    bytes: int = 0

    def add(self, message: Message) -> None:
        self.messages += 1
        self.bytes += message.size

    def remove(self, message: Message) -> None:
        self.messages -= 1
        self.bytes -= message.size


@dataclass(eq=False)
class MemoryChannel:
    """See `bbquic.transport.channel.Channel`."""

    network: MemoryNetwork
    peer: Peer
    role: Role
    options: EndpointOptions
    _mailbox: Mailbox[Message] = field(default_factory=Mailbox)
    _sent: _Count = field(default_factory=_Count)
    _received: _Count = field(default_factory=_Count)
    _unread: _Count = field(default_factory=_Count)  # on their way here, or waiting to be read here
    _room: asyncio.Event = field(default_factory=asyncio.Event)  # here, for the sender over there
    _closed: asyncio.Event = field(default_factory=asyncio.Event)
    _ending: Ending | None = None
    _other: MemoryChannel | None = None

    @property
    def is_closed(self) -> bool:
        return self._ending is not None

    def join(self, other: MemoryChannel) -> None:
        """Make these two the ends of one connection."""
        self._other, other._other = other, self

    async def send(self, message: Message) -> Sent:
        other = self._other
        assert other is not None
        while self._ending is None and not other._has_room():
            other._room.clear()
            await other._room.wait()
        if self._ending is not None:
            raise self._ending.error()
        self._sent.add(message)
        other._unread.add(message)
        sent = Sent(time.monotonic())
        self.network.carry(other, _copy(message))
        return sent

    async def probe(self) -> ProbeResult:
        """A process's own memory has no bottleneck to find."""
        if self._ending is not None:
            raise self._ending.error()
        return ProbeResult(None, None, 0, Bytes(0), is_settled=False)

    async def receive(self) -> Message:
        message = await self._mailbox.get()
        self._unread.remove(message)
        self._room.set()
        return message

    def deliver(self, message: Message) -> None:
        """A message arrives at this end."""
        if self._ending is None:
            self._received.add(message)
            self._mailbox.put_nowait(replace(message, arrived=time.monotonic()))

    def close(self, reason: str = "") -> None:
        other = self._other
        assert other is not None
        if self._ending is None:
            self._end(closed_here(self.peer.name, reason), drop=True)
            other._end(closed_by_peer(other.peer.name, CloseCode.DONE, reason), drop=False)

    def vanish(self, name: str) -> None:
        """The process at this end, called `name`, died."""
        other = self._other
        assert other is not None
        self._end(closed_here(self.peer.name, "the endpoint vanished"), drop=True)
        other._end(silent(name, self.options.idle_timeout), drop=False)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def statistics(self) -> ChannelStatistics:
        other = self._other
        assert other is not None
        return ChannelStatistics(
            messages_sent=self._sent.messages,
            messages_received=self._received.messages,
            bytes_sent=Bytes(self._sent.bytes),
            bytes_received=Bytes(self._received.bytes),
            unacknowledged=Bytes(self._sent.bytes - other._received.bytes),
            rtt=None,
            min_rtt=None,
        )

    def _has_room(self) -> bool:
        unread, options = self._unread, self.options
        return unread.bytes < options.receive_window and unread.messages < options.inbox_messages

    def _end(self, ending: Ending, *, drop: bool) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        self._mailbox.end(ending, drop=drop)
        self._room.set()
        self._closed.set()
        if self._other is not None:
            self._other._room.set()


def _copy(message: Message) -> Message:
    """As over a wire: the bytes are the receiver's own, so the sender may reuse its buffers."""
    decoder = MessageDecoder()
    for buffer in encode(message):
        decoder.feed_untrusted(buffer)
    return decoder.finish_untrusted()
