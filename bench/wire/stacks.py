"""What a worker can speak: `ours`, `stock` (aioquic's own asyncio classes), `tcp-bbr`, `tcp-cubic`."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import QuicEvent, StreamDataReceived

from bbquic.transport.channel import Channel, Endpoint, Role
from bbquic.transport.identity import Peer, load_identity
from bbquic.transport.message import Kind, Message
from bbquic.transport.options import EndpointOptions
from bbquic.transport.threaded import open_endpoint
from bbquic.units import Bytes

DATAGRAM = 1452  # bytes of UDP payload: what an Ethernet path carries under IPv6
WINDOW = 64 << 20  # flow control must never be what is measured
OPTIONS = EndpointOptions(loopback_datagram_size=Bytes(DATAGRAM))


class Receiver(Protocol):
    port: int

    async def next_message(self) -> tuple[int, float]:
        """Size in bytes and CLOCK_MONOTONIC of the arrival of a message's last byte."""


class Sender(Protocol):
    async def send(self, body: bytes) -> None: ...
    async def close(self) -> None: ...
    def rate(self) -> float | None:
        """Estimate of the link in bytes/s, where the stack has one."""


async def open_receiver(stack: str, setup: dict[str, Any]) -> Receiver:
    if stack == "ours":
        return await OurReceiver.open(setup)
    if stack == "stock":
        return await StockReceiver.open(setup)
    return await TcpReceiver.open(stack, setup)


async def open_sender(stack: str, setup: dict[str, Any]) -> Sender:
    if stack == "ours":
        return await OurSender.open(setup)
    if stack == "stock":
        return await StockSender.open(setup)
    return await TcpSender.open(stack, setup)


def _peers(setup: dict[str, Any]) -> dict[str, Peer]:
    """Both ends; the receiver's address as the driver gives it."""
    keys = Path(setup["keys"])
    fingerprints = {name: load_identity(keys / f"{name}.key").fingerprint for name in ("sender", "receiver")}
    address = (setup["host"], setup["port"]) if setup.get("port") else None
    return {
        "sender": Peer("sender", None, (fingerprints["sender"],)),
        "receiver": Peer("receiver", address, (fingerprints["receiver"],)),
    }


class OurReceiver:
    def __init__(self, endpoint: Endpoint) -> None:
        self.port = endpoint.address[1]
        self._endpoint = endpoint
        self._messages: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self._task = asyncio.create_task(self._accept())

    @classmethod
    async def open(cls, setup: dict[str, Any]) -> OurReceiver:
        identity = load_identity(Path(setup["keys"]) / "receiver.key")
        peers, host = _peers(setup), setup["host"]
        return cls(await open_endpoint(identity, peers, Role.NODE, host=host, options=OPTIONS))

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._read(await self._endpoint.accept()))

    async def _read(self, channel: Channel) -> None:
        while not channel.is_closed:
            try:
                message = await channel.receive()
            except Exception:
                return
            self._messages.put_nowait((message.body_size, time.monotonic()))

    async def next_message(self) -> tuple[int, float]:
        return await self._messages.get()


class OurSender:
    def __init__(self, endpoint: Endpoint, channel: Channel) -> None:
        self._endpoint = endpoint
        self._channel = channel

    @classmethod
    async def open(cls, setup: dict[str, Any]) -> OurSender:
        identity = load_identity(Path(setup["keys"]) / "sender.key")
        peers = _peers(setup)
        links = Path(setup["links"]) if setup.get("links") else None
        options = replace(OPTIONS, links=links)
        endpoint = await open_endpoint(identity, peers, Role.COMMAND, host="", options=options)
        return cls(endpoint, await endpoint.connect(peers["receiver"]))

    async def send(self, body: bytes) -> None:
        await self._channel.send(Message(Kind.HIDDEN, b"\x80", body))

    async def close(self) -> None:
        await self._endpoint.close()

    def rate(self) -> float | None:
        link = self._channel.statistics().link
        rate = link.rate if link is not None else None
        return None if rate is None else float(rate)


class _StockProtocol(QuicConnectionProtocol):
    """Counts the bytes of each stream; a stream is a message."""

    messages: asyncio.Queue[tuple[int, float]]

    def __init__(self, quic: QuicConnection, stream_handler: Any = None) -> None:
        super().__init__(quic, stream_handler)
        self._sizes: dict[int, int] = {}

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, StreamDataReceived):
            size = self._sizes.get(event.stream_id, 0) + len(event.data)
            self._sizes[event.stream_id] = size
            if event.end_stream:
                self.messages.put_nowait((size, time.monotonic()))


def _stock_configuration(*, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=["bench"],
        verify_mode=ssl.CERT_NONE,
        max_data=WINDOW,
        max_stream_data=WINDOW,
        max_datagram_size=DATAGRAM,
    )


class StockReceiver:
    def __init__(self) -> None:
        self.port = 0
        self._messages: asyncio.Queue[tuple[int, float]] = asyncio.Queue()

    @classmethod
    async def open(cls, setup: dict[str, Any]) -> StockReceiver:
        receiver = cls()
        configuration = _stock_configuration(is_client=False)
        keys = Path(setup["keys"])
        configuration.load_cert_chain(keys / "receiver.crt", keys / "receiver.key")

        def protocol(*args: Any, **kwargs: Any) -> _StockProtocol:
            made = _StockProtocol(*args, **kwargs)
            made.messages = receiver._messages
            return made

        server = await serve(setup["host"], 0, configuration=configuration, create_protocol=protocol)
        assert server._transport is not None
        receiver.port = server._transport.get_extra_info("sockname")[1]
        return receiver

    async def next_message(self) -> tuple[int, float]:
        return await self._messages.get()


class StockSender:
    def __init__(self, context: Any, protocol: QuicConnectionProtocol) -> None:
        self._context = context
        self._protocol = protocol

    @classmethod
    async def open(cls, setup: dict[str, Any]) -> StockSender:
        context = connect(setup["host"], setup["port"], configuration=_stock_configuration(is_client=True))
        return cls(context, await context.__aenter__())

    async def send(self, body: bytes) -> None:
        quic = self._protocol._quic
        stream = quic.get_next_available_stream_id(is_unidirectional=True)
        quic.send_stream_data(stream, body, end_stream=True)
        self._protocol.transmit()

    async def close(self) -> None:
        await self._context.__aexit__(None, None, None)

    def rate(self) -> float | None:
        return None


class TcpReceiver:
    """One connection carries 8-byte lengths and bodies."""

    def __init__(self) -> None:
        self.port = 0
        self._messages: asyncio.Queue[tuple[int, float]] = asyncio.Queue()

    @classmethod
    async def open(cls, stack: str, setup: dict[str, Any]) -> TcpReceiver:
        receiver = cls()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, stack.removeprefix("tcp-").encode())
        sock.bind((setup["host"], 0))
        server = await asyncio.start_server(receiver._serve, sock=sock, limit=1 << 22)
        receiver.port = server.sockets[0].getsockname()[1]
        return receiver

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(8), "big")
                await reader.readexactly(size)
                self._messages.put_nowait((size, time.monotonic()))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def next_message(self) -> tuple[int, float]:
        return await self._messages.get()


class TcpSender:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    @classmethod
    async def open(cls, stack: str, setup: dict[str, Any]) -> TcpSender:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, stack.removeprefix("tcp-").encode())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (setup["host"], setup["port"]))
        _, writer = await asyncio.open_connection(sock=sock)
        return cls(writer)

    async def send(self, body: bytes) -> None:
        self._writer.write(len(body).to_bytes(8, "big") + body)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def rate(self) -> float | None:
        return None
