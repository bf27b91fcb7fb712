"""One process's place in the cluster, over QUIC: one UDP socket for all that it dials and is dialled by."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from bbquic import __version__
from bbquic.errors import PeerUnreachable, TransportError
from bbquic.transport.channel import Role
from bbquic.transport.connection import QuicChannel, failed_dial
from bbquic.transport.dispatch import Dispatcher
from bbquic.transport.ending import CloseCode, Ending, closed_here
from bbquic.transport.identity import Fingerprint, Identity, Peer, find_peer
from bbquic.transport.link_memory import LinkMemory
from bbquic.transport.mailbox import Mailbox
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import check_aioquic, configuration
from bbquic.transport.selfcheck import connection_type
from bbquic.transport.session import new_hello
from bbquic.transport.strangers import StrangerLog
from bbquic.transport.trains import Batch, Train
from bbquic.transport.udp import UdpSocket, open_udp, resolve


async def open_endpoint_here(
    identity: Identity,
    peers: Mapping[str, Peer],
    role: Role,
    *,
    host: str = "",
    port: int = 0,
    sock: socket.socket | None = None,
    engine: str = __version__,
    options: EndpointOptions | None = None,
) -> QuicEndpoint:
    """Listen on a UDP port, 0 for any, on the loop that runs now; an empty host or `::` means every address
    of this machine. A bound UDP socket given as `sock` is taken over instead. `engine` is our version:
    another major.minor is refused.

    Raises: ConfigError when we cannot listen there, TransportError when aioquic is not the one we know.
    """
    endpoint = QuicEndpoint(identity, peers, role, engine, options or EndpointOptions())
    await endpoint.listen(host, port, sock)
    return endpoint


class QuicEndpoint:
    """See `bbquic.transport.channel.Endpoint`. Belongs to the loop that made it."""

    def __init__(
        self,
        identity: Identity,
        peers: Mapping[str, Peer],
        role: Role,
        engine: str,
        options: EndpointOptions,
    ) -> None:
        """Made by `open_endpoint_here`, which also makes it listen."""
        self.options = options
        me = find_peer(peers.values(), identity.fingerprint)
        self.name = me.name if me is not None else identity.label
        self.hello = new_hello(role, engine)
        self.links = LinkMemory(options.links) if options.links is not None else None
        check_aioquic(self.options, identity)
        self._connection_type = connection_type(self.options)
        self._by_key = {key: peer for peer in peers.values() for key in peer.keys}
        self._identity = identity
        self._dispatcher = Dispatcher(self.options, self._reply, self._accept)
        self._waiting: Mailbox[QuicChannel] = Mailbox()
        self._strangers = StrangerLog()
        self._loop = asyncio.get_running_loop()
        self._ended: Ending | None = None
        self._socket: UdpSocket | None = None
        self._bound: socket.socket | None = None

    async def listen(self, host: str, port: int, sock: socket.socket | None) -> None:
        batched = self.options.batched_sockets
        self._socket, self._bound = await open_udp(host, port, self._receive, sock, batched=batched)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._open_socket().getsockname()[:2]
        return host, port

    async def connect(self, peer: Peer) -> QuicChannel:
        sock = self._open_socket()
        if peer.address is None:
            raise PeerUnreachable(
                f"{peer.name} has no address in peers.toml",
                hint="give it one there, or let it dial this machine",
            )
        host, port = peer.address
        try:
            address = await resolve(sock, host, port)
        except OSError as error:
            raise PeerUnreachable(f"{peer.name}: {host} is no address: {error.strerror or error}") from None
        channel = self._dial(peer, address)
        try:
            await channel.wait_established()
        except TransportError as error:
            raise failed_dial(error, peer) from None
        except asyncio.CancelledError:
            channel.close("gave up dialling")
            raise
        return channel

    async def accept(self) -> QuicChannel:
        return await self._waiting.get()

    async def close(self) -> None:
        if self._ended is not None:
            return
        self._ended = closed_here("every peer", "the endpoint was closed")
        self._waiting.end(self._ended, drop=True)
        for channel in self._dispatcher.channels:
            channel.abandon()
        await asyncio.sleep(0)  # whoever waited on a channel hears of its end before this returns
        if self._socket is not None:
            self._socket.close()

    # What a connection asks of its host.

    def send_train(self, train: Train) -> None:
        if self._socket is not None:
            self._socket.send(train)

    def find_peer(self, fingerprint: Fingerprint) -> Peer | None:
        return self._by_key.get(fingerprint)

    def add_connection_id(self, connection_id: bytes, channel: QuicChannel) -> None:
        self._dispatcher.add(connection_id, channel)

    def drop_connection_id(self, connection_id: bytes) -> None:
        self._dispatcher.drop(connection_id)

    def established(self, channel: QuicChannel) -> None:
        self._dispatcher.finished(channel)
        if channel.is_dialled:
            return
        if len(self._waiting) >= self.options.waiting_channels:
            channel.refuse(CloseCode.BUSY, "nobody takes new connections there")
        else:
            self._waiting.put_nowait(channel)

    def refused_stranger(self, address: Any, fingerprint: Fingerprint | None) -> None:
        self._strangers.refused((address[0], address[1]), fingerprint, self._loop.time())

    def forget(self, channel: QuicChannel) -> None:
        self._dispatcher.forget(channel)

    # Connections in both directions.

    def _dial(self, peer: Peer, address: Any) -> QuicChannel:
        if not self._dispatcher.has_room():
            raise PeerUnreachable(
                f"{self.options.connections} connections are open, so {peer.name} must wait"
            )
        quic = self._connection_type(
            is_pinned=lambda fingerprint: fingerprint in peer.keys,
            options=self.options,
            configuration=configuration(self._identity, self.options, address, is_client=True),
        )
        channel = QuicChannel(self, quic, peer)
        self._dispatcher.add(quic.host_cid, channel)
        channel.dial(address)
        return channel

    def _accept(self, address: Any, original: bytes, retried: bytes | None) -> QuicChannel:
        quic = self._connection_type(
            is_pinned=lambda fingerprint: fingerprint in self._by_key,
            options=self.options,
            configuration=configuration(self._identity, self.options, address, is_client=False),
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
        )
        channel = QuicChannel(self, quic)
        self._dispatcher.add(quic.host_cid, channel)
        return channel

    def _receive(self, batch: Batch) -> None:
        if self._ended is None:
            self._dispatcher.receive(batch)

    def _reply(self, data: bytes, address: Any) -> None:
        """Answer a datagram that belongs to no connection."""
        self.send_train(Train(data, len(data), address))

    def _open_socket(self) -> socket.socket:
        if self._ended is not None:
            raise self._ended.error()
        assert self._bound is not None
        return self._bound
