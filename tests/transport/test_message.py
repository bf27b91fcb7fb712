"""Framing: what is sent is read again, and whatever else comes is refused in words."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.errors import RemoteProtocolError, TransportError
from bbquic.transport.message import (
    MAX_MESSAGE,
    MIB,
    PREFIX,
    RULES,
    Kind,
    Message,
    MessageDecoder,
    decode_header_untrusted,
    encode,
    encode_header,
)
from bbquic.transport.options import EndpointOptions


class Example(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    counts: list[int]


def wire(message: Message) -> bytes:
    return b"".join(encode(message))


def decode(data: bytes, pieces: int = 1 << 30) -> Message:
    decoder = MessageDecoder()
    for start in range(0, len(data), pieces):
        decoder.feed_untrusted(data[start : start + pieces])
    return decoder.finish_untrusted()


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(list(Kind)))
    body = draw(st.binary(max_size=200)) if RULES[kind].body else b""
    return Message(kind, draw(st.binary(max_size=100)), body)


@given(messages(), st.integers(1, 40))
def test_a_message_is_read_as_it_was_sent_whatever_the_pieces(message: Message, pieces: int) -> None:
    assert decode(wire(message), pieces) == message


@given(messages())
def test_a_message_knows_its_size_on_the_wire(message: Message) -> None:
    assert len(wire(message)) == message.size


@given(messages(), st.data())
def test_one_changed_byte_gives_a_message_or_a_refusal(message: Message, data: st.DataObject) -> None:
    changed = bytearray(wire(message))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(RemoteProtocolError):
        decode(bytes(changed), data.draw(st.integers(1, 40)))


@given(messages(), st.data())
def test_a_message_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    whole = wire(message)
    with pytest.raises(RemoteProtocolError, match="ended after"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(messages(), st.binary(min_size=1, max_size=50))
def test_bytes_after_the_end_are_refused(message: Message, more: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{len(more)} bytes follow the end"):
        decode(wire(message) + more)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_refusal(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode(data)


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (PREFIX.pack(b"XY", 1, Kind.ROWS, 0, 0), "a message began with 5859, not 4251"),
        (PREFIX.pack(b"BQ", 2, Kind.ROWS, 0, 0), "wire version 2, not 1"),
        (PREFIX.pack(b"BQ", 1, 99, 0, 0), "the unknown kind 99"),
        (PREFIX.pack(b"BQ", 1, Kind.PING, 65537, 0), "a PING message announced a header of 65537 bytes"),
        (PREFIX.pack(b"BQ", 1, Kind.PLAN, 16 * MIB + 1, 0), "a PLAN message announced a header"),
        (PREFIX.pack(b"BQ", 1, Kind.ROWS, 0, 1), "a ROWS message announced a body of 1 bytes, over 0"),
        (PREFIX.pack(b"BQ", 1, Kind.HIDDEN, 0, MAX_MESSAGE + 1), "a HIDDEN message announced a body"),
        (PREFIX.pack(b"BQ", 1, Kind.HIDDEN, 0, 2**64 - 1), "a HIDDEN message announced a body"),
    ],
)
def test_a_wrong_prefix_is_refused_as_soon_as_it_is_there(prefix: bytes, words: str) -> None:
    decoder = MessageDecoder()
    decoder.feed_untrusted(prefix[:-1])
    with pytest.raises(RemoteProtocolError, match=words):
        decoder.feed_untrusted(prefix[-1:])


def test_a_message_larger_than_the_receiver_holds_is_refused() -> None:
    decoder = MessageDecoder(limit=1000)
    with pytest.raises(RemoteProtocolError, match="announced 1001 bytes, over 1000"):
        decoder.feed_untrusted(PREFIX.pack(b"BQ", 1, Kind.HIDDEN, 5, 1001 - 16 - 5))


def test_a_hello_of_another_wire_version_is_read() -> None:
    prefix = PREFIX.pack(b"BQ", 9, Kind.HELLO, 1, 0)
    assert decode(prefix + b"x") == Message(Kind.HELLO, b"x")


def test_announced_bytes_cost_no_memory_before_they_come() -> None:
    tracemalloc.start()
    decoders = [MessageDecoder() for _ in range(100)]
    for decoder in decoders:
        decoder.feed_untrusted(PREFIX.pack(b"BQ", 1, Kind.HIDDEN, 4 * MIB, MAX_MESSAGE) + b"x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB


def test_no_message_can_be_built_over_its_limits() -> None:
    with pytest.raises(TransportError, match="a TOKENS message's body has 1 bytes, over 0"):
        Message(Kind.TOKENS, b"", b"x")
    with pytest.raises(TransportError, match="a PING message's header"):
        Message(Kind.PING, bytes(65537))
    with pytest.raises(TransportError, match="a HIDDEN message's body"):
        Message(Kind.HIDDEN, b"", bytes(MAX_MESSAGE + 1))


def test_a_body_of_wider_items_is_measured_in_bytes() -> None:
    body = memoryview(bytes(16)).cast("I")
    message = Message(Kind.HIDDEN, b"", body)
    assert message.body_size == 16
    assert decode(wire(message)).body == bytes(16)


def test_encoding_does_not_copy_the_body() -> None:
    body = bytearray(b"abc")
    buffers = encode(Message(Kind.HIDDEN, b"", memoryview(body)))
    body[0] = ord("x")
    assert bytes(buffers[-1]) == b"xbc"


def test_a_decoded_body_is_the_receivers_alone_to_write_to() -> None:
    sent = wire(Message(Kind.HIDDEN, b"", b"abc"))
    body, other = decode(sent).body, decode(sent).body
    assert isinstance(body, memoryview)
    body[0] = ord("x")
    assert bytes(other) == b"abc"


def test_every_kind_has_its_rule_and_its_place_in_the_queue() -> None:
    assert set(RULES) == set(Kind)
    assert (
        Message(Kind.ROWS, b"").priority
        < Message(Kind.CANCEL, b"").priority
        < Message(Kind.PLAN, b"").priority
    )


def test_a_receive_window_has_room_for_one_unfinished_message_of_each_priority() -> None:
    largest: dict[int, int] = {}
    for rule in RULES.values():
        size = PREFIX.size + rule.header + rule.body
        largest[rule.priority] = max(size, largest.get(rule.priority, 0))
    options = EndpointOptions()
    assert options.receive_window >= sum(largest.values()) + options.high_watermark


def test_a_header_is_read_as_it_was_written() -> None:
    example = Example("a", [1, 2])
    assert decode_header_untrusted(Example, encode_header(example)) == example


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"name": "a"}),
        msgspec.msgpack.encode({"name": 1, "counts": []}),
        msgspec.msgpack.encode({"name": "a", "counts": ["1"]}),
        msgspec.msgpack.encode({"name": "a", "counts": [1.0]}),
        msgspec.msgpack.encode({"name": "a", "counts": [], "more": 1}),
        msgspec.msgpack.encode(Example("a", [])) + b"\x00",
        b"\x82\xa4name\xa1\xff\xa6counts\x90",
        b"\x91" * 60_000,
        b"\x82\xa4name\xa1a\xa6counts\xdd\xff\xff\xff\xff",
    ],
    ids=[
        "empty",
        "never a value",
        "field missing",
        "number for string",
        "string for number",
        "float for int",
        "unknown field",
        "trailing byte",
        "not UTF-8",
        "nested too deep",
        "announces 4 billion items",
    ],
)
def test_a_header_that_is_not_what_its_kind_says_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="a header is not a Example"):
        decode_header_untrusted(Example, header)


@given(st.data())
def test_one_changed_byte_gives_a_header_or_a_refusal(data: st.DataObject) -> None:
    changed = bytearray(encode_header(Example("name", [1, 200, 70_000, 2**40])))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        decode_header_untrusted(Example, bytes(changed))


def test_a_refusal_repeats_no_control_characters_of_a_stranger() -> None:
    header = msgspec.msgpack.encode({"name": "a", "counts": [], "\x1b[2J\n": 1})
    with pytest.raises(RemoteProtocolError) as caught:
        decode_header_untrusted(Example, header)
    assert str(caught.value).isprintable()
