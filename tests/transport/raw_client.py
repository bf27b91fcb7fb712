"""A QUIC client that is stock aioquic, to say to an endpoint what ours never would."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from transport_helpers import (
    ENGINE,
    Net,
    Pair,
    QuicNet,
    make_pair,
    with_net,
)

from bbquic.transport.identity import Identity
from bbquic.transport.message import Kind, Message, encode, encode_header
from bbquic.transport.options import EndpointOptions
from bbquic.transport.session import Hello


def wire(message: Message) -> bytes:
    return b"".join(encode(message))


HELLO = wire(Message(Kind.HELLO, encode_header(Hello(1, ENGINE, "node", "00" * 8))))


class Raw(QuicConnectionProtocol):
    """Stock aioquic: says what it is told, whatever we think of it."""

    def __init__(self, quic: QuicConnection, stream_handler: Any = None) -> None:
        super().__init__(quic, stream_handler)
        self.ended: asyncio.Future[events.ConnectionTerminated] = asyncio.get_running_loop().create_future()

    def quic_event_received(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.ConnectionTerminated) and not self.ended.done():
            self.ended.set_result(event)

    def say(self, data: bytes, *, end: bool = True, stream_id: int | None = None) -> int:
        """Send on a new unidirectional stream, or go on with one."""
        if stream_id is None:
            stream_id = self._quic.get_next_available_stream_id(is_unidirectional=True)
        self._quic.send_stream_data(stream_id, data, end_stream=end)
        self.transmit()
        return stream_id

    def reset(self, stream_id: int) -> None:
        self._quic.reset_stream(stream_id, 0)
        self.transmit()


@asynccontextmanager
async def raw_client(address: tuple[str, int], identity: Identity | None) -> AsyncIterator[Raw]:
    settings = QuicConfiguration(is_client=True, alpn_protocols=["bbquic"], verify_mode=ssl.CERT_NONE)
    if identity is not None:
        settings.certificate, settings.private_key = identity.certificate, identity.private_key
    async with connect(*address, configuration=settings, create_protocol=Raw, local_port=0) as client:
        assert isinstance(client, Raw)
        yield client


def with_pair(body: Callable[[Pair], Awaitable[None]], options: EndpointOptions | None = None) -> None:
    async def on_net(net: Net) -> None:
        await body(await make_pair(net, options))

    with_net(QuicNet, on_net)
