"""The QUIC endpoint against a client that is not ours: hostile bytes, floods, and half-open handshakes."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicErrorCode
from transport_helpers import (
    ENGINE,
    Net,
    Pair,
    QuicNet,
    make_identities,
    make_pair,
    make_peers,
    run,
    text,
    with_net,
)

from bbquic.errors import ConfigError, ConnectionLost, PeerRefused, PeerUnreachable, RemoteProtocolError
from bbquic.transport.channel import Role
from bbquic.transport.ending import CloseCode
from bbquic.transport.endpoint import QuicEndpoint, open_endpoint
from bbquic.transport.identity import Identity
from bbquic.transport.message import KIB, PREFIX, Kind, Message, encode, encode_header
from bbquic.transport.options import EndpointOptions
from bbquic.transport.session import HELD_MESSAGES, Hello
from bbquic.units import Bytes, Seconds


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


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a message began with 4745, not 4251"),
        (PREFIX.pack(b"BQ", 1, 99, 0, 0), "the unknown kind 99"),
        (PREFIX.pack(b"BQ", 1, Kind.PING, 1 << 20, 0), "announced a header of 1048576 bytes, over 65536"),
        (wire(text("x")) + b"y", "1 bytes follow the end of a TOKENS message"),
        (wire(text("x"))[:-1], "ended after 0 of its 1 bytes"),
        (b"", "ended after 0 of a message prefix's 16 bytes"),
        (HELLO, "a second hello arrived"),
    ],
    ids=["no magic", "unknown kind", "over the limit", "trailing", "truncated", "empty", "second hello"],
)
def test_a_bad_message_costs_its_sender_the_connection_and_names_it(data: bytes, words: str) -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(HELLO)
            channel = await pair.b.accept()
            client.say(data)
            with pytest.raises(RemoteProtocolError, match=f"home-a broke the protocol: .*{words}"):
                await channel.receive()
            ended = await client.ended
            assert ended.error_code == CloseCode.BAD_MESSAGE
            assert words in ended.reason_phrase
        there, _ = await pair.join()  # nobody else is harmed
        assert not there.is_closed

    with_pair(body)


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        (Hello(1, "0.9.0", "node", "00"), CloseCode.REFUSED, "home-a runs 0.9.0 (wire 1)"),
        (Hello(2, ENGINE, "node", "00"), CloseCode.REFUSED, "home-a runs 0.1.0 (wire 2)"),
        (Hello(1, ENGINE, "king", "00"), CloseCode.BAD_MESSAGE, "names no role"),
        (Hello(1, "new", "node", "00"), CloseCode.BAD_MESSAGE, "names no version"),
    ],
)
def test_a_hello_that_does_not_fit_ends_the_connection(hello: Hello, code: CloseCode, words: str) -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(wire(Message(Kind.HELLO, encode_header(hello))))
            ended = await client.ended
            assert (ended.error_code, words in ended.reason_phrase) == (code, True)

    with_pair(body)


def test_a_flood_before_the_hello_ends_the_connection() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            for _ in range(HELD_MESSAGES + 1):
                client.say(wire(text("x")))
            assert (await client.ended).error_code == CloseCode.BAD_MESSAGE

    with_pair(body)


def test_messages_that_overtake_the_hello_are_delivered_after_it() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(wire(text("early")))
            client.say(HELLO)
            channel = await pair.b.accept()
            assert await channel.receive() == text("early")

    with_pair(body)


def test_a_client_that_never_says_hello_is_cut_off() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            ended = await client.ended
            assert ended.error_code == CloseCode.NO_HELLO

    with_pair(body, EndpointOptions(handshake_timeout=Seconds(0.3)))


def test_a_client_without_a_certificate_is_cut_off_and_told() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, None) as client:
            client.say(HELLO)
            ended = await client.ended
            assert ended.error_code == CloseCode.UNPINNED
            assert ended.reason_phrase == "no key is not pinned in peers.toml"

    with_pair(body)


def test_a_message_whose_stream_is_reset_is_dropped_and_the_rest_goes_on() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(HELLO)
            channel = await pair.b.accept()
            client.reset(client.say(wire(text("half"))[:-2], end=False))
            client.say(wire(text("whole")))
            assert await channel.receive() == text("whole")

    with_pair(body)


def test_messages_given_up_cost_no_credit_for_good() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(HELLO)
            channel = await pair.b.accept()
            half = wire(Message(Kind.HIDDEN, b"", bytes(16 * KIB)))[:-1]
            for number in range(20):  # five windows of bytes, and of streams
                client.reset(client.say(half, end=False))
                client.say(wire(text(str(number))))
                assert await channel.receive() == text(str(number))

    with_pair(body, EndpointOptions(receive_window=Bytes(64 * KIB), inbox_messages=4))


def test_a_bidirectional_stream_ends_the_connection() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(HELLO)
            channel = await pair.b.accept()
            client._quic._remote_max_streams_bidi = 1  # it was told 0
            client.say(wire(text("x")), stream_id=0)
            with pytest.raises(ConnectionLost, match="the connection to home-a broke"):
                await channel.receive()
            assert (await client.ended).error_code == QuicErrorCode.STREAM_LIMIT_ERROR

    with_pair(body)


def test_a_sender_beyond_its_credit_loses_the_connection() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(HELLO)
            channel = await pair.b.accept()
            client._quic._remote_max_data = 1 << 30  # it was told 64 KiB
            message = wire(Message(Kind.HIDDEN, b"", bytes(16 * KIB)))
            for _ in range(8):
                client.say(message)
            await channel.wait_closed()
            assert (await client.ended).error_code == QuicErrorCode.FLOW_CONTROL_ERROR

    with_pair(body, EndpointOptions(receive_window=Bytes(64 * KIB)))


def test_credit_follows_what_is_read_and_not_what_arrives() -> None:
    async def body(pair: Pair) -> None:
        async with raw_client(pair.b.address, pair.identities["home-a"]) as client:
            client.say(HELLO)
            channel = await pair.b.accept()
            message = Message(Kind.HIDDEN, b"", bytes(16 * KIB))
            for turn in range(5):
                for _ in range(3):
                    client.say(wire(message))
                while channel.statistics().messages_received < 3 * (turn + 1):  # noqa: ASYNC110 (no event for it)
                    await asyncio.sleep(0)
                read = client._quic._remote_max_data - 64 * KIB
                assert read <= channel.statistics().bytes_received - 3 * message.size + len(HELLO)
                for _ in range(3):
                    assert await channel.receive() == message
            assert client._quic._remote_max_data > 2 * 64 * KIB

    with_pair(body, EndpointOptions(receive_window=Bytes(64 * KIB)))


def test_a_message_larger_than_the_window_is_refused_in_place_of_waited_for() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        sending = asyncio.ensure_future(there.send(Message(Kind.HIDDEN, b"", bytes(100 * KIB))))
        with pytest.raises(RemoteProtocolError, match=r"home-a broke the protocol: .* over 65536"):
            await here.receive()
        await there.wait_closed()
        await asyncio.gather(sending, return_exceptions=True)
        with pytest.raises(ConnectionLost, match="home-b rejected a message from here"):
            await there.receive()

    with_pair(body, EndpointOptions(receive_window=Bytes(64 * KIB)))


def test_datagrams_that_are_no_quic_change_nothing() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise:
            for size in (0, 1, 7, 20, 1200, 1500):
                noise.sendto(os.urandom(size), pair.b.address)
                noise.sendto(b"\xc0" + bytes(size), pair.b.address)  # a long header
                noise.sendto(b"\x40" + os.urandom(size), pair.b.address)  # a short one
        await there.send(text("still here"))
        assert await here.receive() == text("still here")

    with_pair(body)


@pytest.mark.parametrize(("size", "answered"), [(1200, True), (100, False)])
def test_another_quic_version_is_answered_with_ours_unless_that_would_amplify(
    size: int, answered: bool
) -> None:
    async def body(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.bind(("127.0.0.1", 0))
            unknown = b"\xc0" + bytes.fromhex("0a0a0a0a") + b"\x08" + b"d" * 8 + b"\x08" + b"s" * 8
            await loop.sock_sendto(client, unknown + bytes(size - len(unknown)), pair.b.address)
            there, _ = await pair.join()  # by then an answer would be here
            there.close()
            if answered:
                reply = await loop.sock_recv(client, 2000)
                assert reply[1:5] == bytes(4)  # a version negotiation packet
                assert reply.endswith(bytes.fromhex("00000001"))
            else:
                with pytest.raises(BlockingIOError):
                    client.recv(2000)

    with_pair(body)


def test_a_dialler_that_has_to_prove_its_address_still_connects() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        await there.send(text("proven"))
        assert await here.receive() == text("proven")

    with_pair(body, EndpointOptions(retry_above=0))


def test_half_open_handshakes_are_bounded_and_make_room_in_time() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(pair.b, QuicEndpoint)
        settings = QuicConfiguration(is_client=True, alpn_protocols=["bbquic"], verify_mode=ssl.CERT_NONE)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
            for _ in range(20):
                half = QuicConnection(configuration=settings)
                half.connect(pair.b.address, now=0.0)
                flood.sendto(half.datagrams_to_send(now=0.0)[0][0], pair.b.address)
            there, _ = await pair.join()  # its first attempts are ignored, a later one is not
        assert not there.is_closed
        assert len(pair.b._dispatcher.channels) <= 4

    with_pair(body, EndpointOptions(unfinished_handshakes=3, handshake_timeout=Seconds(0.5)))


def test_one_address_may_not_hold_all_connections() -> None:
    async def body(pair: Pair) -> None:
        for _ in range(2):
            await pair.join()
        dialling = asyncio.ensure_future(pair.a.connect(pair.peer_b))
        with pytest.raises(PeerUnreachable, match="home-b"):
            await dialling

    with_pair(
        body, EndpointOptions(connections_per_host=2, idle_timeout=Seconds(0.6), keep_alive=Seconds(0.1))
    )


def test_dialling_can_be_given_up_and_tried_again() -> None:
    async def body(pair: Pair) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
            deaf.bind(("127.0.0.1", 0))
            peer = pair.peer_b
            nobody = type(peer)(peer.name, deaf.getsockname(), peer.keys)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await pair.a.connect(nobody)
        there, _ = await pair.join()
        assert not there.is_closed

    with_pair(body)


def test_a_host_that_has_no_address_is_unreachable() -> None:
    async def body(pair: Pair) -> None:
        peer = pair.peer_b
        with pytest.raises(PeerUnreachable, match=r"home-b: .* is no address"):
            await pair.a.connect(type(peer)(peer.name, ("256.256.256.256", 1), peer.keys))

    with_pair(body)


def test_a_taken_port_is_named() -> None:
    async def body(pair: Pair) -> None:
        host, port = pair.b.address
        with pytest.raises(ConfigError, match=f"cannot listen on {host}, UDP port {port}"):
            await open_endpoint(pair.identities["home-a"], pair.peers, Role.NODE, host=host, port=port)

    with_pair(body)


def test_an_endpoint_takes_over_a_bound_socket_and_closes_it() -> None:
    async def main() -> None:
        identities = make_identities("home-a")
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        name = sock.getsockname()
        endpoint = await open_endpoint(identities["home-a"], make_peers(identities), Role.NODE, sock=sock)
        assert endpoint.address == name
        await endpoint.close()
        assert sock.fileno() == -1

    run(main)


def test_all_addresses_of_a_machine_include_ipv4() -> None:
    async def main() -> None:
        identities = make_identities("home-a", "home-b")
        peers = make_peers(identities)
        b = await open_endpoint(identities["home-b"], peers, Role.NODE)
        a = await open_endpoint(identities["home-a"], peers, Role.COMMAND)
        try:
            peer = peers["home-b"]
            channel = await a.connect(type(peer)(peer.name, ("127.0.0.1", b.address[1]), peer.keys))
            assert channel.peer.name == "home-b"
        finally:
            await a.close()
            await b.close()

    run(main)


def test_what_ends_one_connection_leaves_no_trace_of_it() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(pair.a, QuicEndpoint)
        assert isinstance(pair.b, QuicEndpoint)
        there, here = await pair.join()
        there.close()
        await here.wait_closed()
        while pair.a._dispatcher.channels or pair.b._dispatcher.channels:  # noqa: ASYNC110 (no event for it)
            await asyncio.sleep(0)
        assert pair.a._dispatcher._by_id == pair.b._dispatcher._by_id == {}

    with_pair(body)


def test_a_refused_dialler_gets_one_answer_even_when_it_has_sent_already() -> None:
    async def body(pair: Pair) -> None:
        stranger = make_identities("stranger")
        endpoint = await pair.net.open(stranger["stranger"], {**pair.peers, **make_peers(stranger)})
        with pytest.raises(PeerRefused):
            await endpoint.connect(pair.peer_b)
        assert isinstance(pair.b, QuicEndpoint)
        assert len(pair.b._waiting) == 0

    with_pair(body)
