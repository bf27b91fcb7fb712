"""The QUIC endpoint against a client that is not ours: bad messages, floods, credit it was not given."""

from __future__ import annotations

import asyncio

import pytest
from aioquic.quic.packet import QuicErrorCode
from raw_client import HELLO, raw_client, wire, with_pair
from transport_helpers import (
    ENGINE,
    Pair,
    text,
)

from bbquic.errors import ConnectionLost, RemoteProtocolError
from bbquic.transport.ending import CloseCode
from bbquic.transport.message import KIB, PREFIX, Kind, Message, encode_header
from bbquic.transport.options import EndpointOptions
from bbquic.transport.session import HELD_MESSAGES, Hello
from bbquic.units import Bytes, Seconds


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
                while channel.statistics().messages_received < 3 * (turn + 1):
                    await asyncio.sleep(0)
                read = client._quic._remote_max_data - 64 * KIB
                assert read <= channel.statistics().bytes_received - 3 * message.size + len(HELLO)
                for _ in range(3):
                    assert await channel.receive() == message
            assert client._quic._remote_max_data > 2 * 64 * KIB

    with_pair(body, EndpointOptions(receive_window=Bytes(64 * KIB)))
