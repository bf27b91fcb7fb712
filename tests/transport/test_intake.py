"""Receiving: whatever a peer with the right keys sends, the fast path makes of it what aioquic does."""

from __future__ import annotations

from typing import Any

import pytest
from aioquic.quic.packet import QuicErrorCode
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Kind, Simulation, seal

from bbquic.transport.ending import CloseCode
from bbquic.transport.fast import FastConnection
from bbquic.transport.intake import ACK_EVERY, ONE_RTT
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import PinnedConnection
from bbquic.transport.varint import encode_varint
from bbquic.units import Bytes

WINDOW, STREAM_WINDOW = 11_000, 6500  # bytes; either can be the first that is reached
OPTIONS = EndpointOptions(receive_window=Bytes(WINDOW), inbox_messages=4)
KNOWN = 3000  # bytes the server has of streams 2 and 6 already

stream_ids = st.sampled_from([0, 1, 2, 3, 6, 10, 14, 18, 62, 2**20 + 2, 2**61])
offsets = st.sampled_from(
    [0, 1, KNOWN - 1, KNOWN, KNOWN + 1, KNOWN + 500, STREAM_WINDOW - 100, WINDOW - 10, 2**40, 2**62 - 1]
)
lengths = st.sampled_from([0, 1, 2, 500, 1000])


@st.composite
def stream_frames(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0x08, 0x0F))
    length = draw(lengths)
    frame = bytes([kind]) + encode_varint(draw(stream_ids))
    if kind & 4:
        frame += encode_varint(draw(offsets))
    if kind & 2:
        frame += encode_varint(length + draw(st.sampled_from([0, 0, 0, 1])))
    return frame + bytes(length)


@st.composite
def next_pieces(draw: st.DrawFn) -> bytes:
    """What the fast path takes: a piece of a known stream that may be the next."""
    length = draw(st.sampled_from([100, 100, 1000]))
    at, fin = KNOWN + draw(st.sampled_from([0, 100, 200, 1000, 2000])), draw(st.booleans())
    stream_id = draw(st.sampled_from([2, 6]))
    return bytes([0x0E | fin, stream_id]) + encode_varint(at) + encode_varint(length) + bytes(length)


other_frames = st.sampled_from(
    [
        b"\x00",  # PADDING
        b"\x01",  # PING
        b"\x02\x00\x00\x00\x00",  # ACK of packet 0
        b"\x02\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00",  # ACK of a packet far away
        b"\x02\x02\x00\x00\x09",  # ACK down to a negative number
        b"\x04\x02\x00" + encode_varint(KNOWN),  # RESET_STREAM
        b"\x04\x02\x00" + encode_varint(KNOWN - 1),  # below what came
        b"\x05\x03\x00",  # STOP_SENDING
        b"\x10\x7f\xff",  # MAX_DATA
        b"\x11\x03\x40\x80",  # MAX_STREAM_DATA
        b"\x1c\x00\x00\x00",  # CONNECTION_CLOSE
        b"\x1d\x00\x00",
        b"\x1e",  # HANDSHAKE_DONE
        b"\x30data",  # DATAGRAM
        b"\x31\x04data",
        b"\x31\x09data",
        b"\x21",  # no frame at all
        b"\x40\x01",  # PING, in two bytes
    ]
)
packets = st.lists(next_pieces() | stream_frames() | other_frames, min_size=0, max_size=5).map(b"".join)


@st.composite
def damaged_packets(draw: st.DrawFn) -> bytes:
    """A packet with one byte changed, or cut short, before it was sealed."""
    frames = bytearray(draw(packets))
    if frames and draw(st.booleans()):
        frames[draw(st.integers(0, len(frames) - 1))] ^= draw(st.integers(1, 255))
    if frames and draw(st.booleans()):
        del frames[draw(st.integers(1, len(frames))) :]
    return bytes(frames)


@st.composite
def flows(draw: st.DrawFn) -> list[list[bytes]]:
    """Two streams in order, as a sender of ours writes them, up to their ends and limits and beyond; with
    other frames among them, and damage at times."""
    at = {2: KNOWN, 6: KNOWN}
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        batch: list[bytes] = []
        for _ in range(draw(st.integers(1, 5))):
            stream_id = draw(st.sampled_from([2, 6]))
            length, skipped = draw(st.sampled_from([100, 700, 0])), draw(st.sampled_from([0, 0, 0, 100]))
            fin = draw(st.sampled_from([0, 0, 0, 1]))
            start = at[stream_id] + skipped
            head = bytes([0x0E | fin, stream_id]) + encode_varint(start)
            extra = draw(st.sampled_from([0] * 9 + [1]))  # announced and not there
            frames = head + encode_varint(length + extra) + bytes([len(batch)]) * length
            at[stream_id] = start + length if not skipped else at[stream_id]
            batch.append(frames + draw(st.sampled_from([b"", b"", b"", b"\x00", b"\x01"])))
        batches.append(batch)
    return batches


def outcome(kind: Kind, batches: list[list[bytes]], **aioquic: Any) -> tuple[Any, ...]:
    """All that can be told of a server that got these packets."""
    aioquic = {"max_stream_data": STREAM_WINDOW} | aioquic
    simulation = Simulation(PinnedConnection, kind, options=OPTIONS, **aioquic)
    client, server = simulation.ends
    server.reads = False
    for _ in range(2):
        client.say(bytes(KNOWN), end=False)
    simulation.run_for(0.2)
    for batch in batches:
        padded = [frames if len(frames) >= 2 else frames + bytes(2) for frames in batch]
        sealed = [seal(client.quic, frames) for frames in padded]
        server.quic.receive_batch(sealed, client.address, simulation.now)
        server.take_events()
    closing = server.quic.closing
    assert closing is None or closing.error_code != CloseCode.INTERNAL
    return (
        (closing.error_code, closing.frame_type) if closing else None,
        server.received,
        sorted(server.ended),
        server.reset,
        server.datagrams,
        server.quic._local_max_data.used,
        server.quic._local_max_streams_uni.used,
        closing is None and list(server.quic._spaces[ONE_RTT].ack_queue),
    )


@settings(max_examples=120)
@given(st.lists(st.lists(packets | damaged_packets(), min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_frames_whatever_have_the_same_outcome_as_with_aioquic(batches: list[list[bytes]]) -> None:
    assert outcome(FastConnection, batches) == outcome(PinnedConnection, batches)


@settings(max_examples=150)
@given(flows())
def test_streams_in_order_have_the_same_outcome_as_with_aioquic(batches: list[list[bytes]]) -> None:
    assert outcome(FastConnection, batches) == outcome(PinnedConnection, batches)


@settings(max_examples=40)
@given(st.lists(packets, min_size=1, max_size=4))
def test_datagram_frames_have_the_same_outcome_where_they_are_allowed(frames: list[bytes]) -> None:
    allowed = {"max_datagram_frame_size": 6}
    assert outcome(FastConnection, [frames], **allowed) == outcome(PinnedConnection, [frames], **allowed)


def test_a_stream_beyond_its_own_limit_ends_the_connection() -> None:
    pieces = [
        b"\x0e\x02" + encode_varint(at) + encode_varint(1000) + bytes(1000) for at in range(KNOWN, 7000, 1000)
    ]
    ended = outcome(FastConnection, [pieces])
    assert ended == outcome(PinnedConnection, [pieces])
    assert ended[0] == (QuicErrorCode.FLOW_CONTROL_ERROR, 0x0E)
    assert outcome(FastConnection, [pieces[:-1]])[0] is None


def test_a_packet_that_comes_twice_is_read_once() -> None:
    simulation = Simulation(PinnedConnection, FastConnection, max_datagram_frame_size=100)
    client, server = simulation.ends
    packet = seal(client.quic, b"\x31\x04once")
    for batch in ([packet, packet], [packet]):
        server.quic.receive_batch(batch, client.address, simulation.now)
    server.take_events()
    assert server.datagrams == [b"once"]


def test_the_datagram_that_ends_a_stream_tells_when_it_came() -> None:
    simulation = Simulation(PinnedConnection, FastConnection)
    client, server = simulation.ends
    for _ in range(2):
        client.say(bytes(KNOWN), end=False)
    simulation.run_for(0.2)
    late = seal(client.quic, b"\x0e\x06" + encode_varint(KNOWN) + b"\x01a")
    batch = [
        seal(client.quic, b"\x0e\x02" + encode_varint(KNOWN) + b"\x01a"),
        seal(client.quic, b"\x0f\x02" + encode_varint(KNOWN + 1) + b"\x01b"),  # the fast way
        seal(client.quic, b"\x0b\x0a\x01a"),  # a message in one datagram: its stream is new
        seal(client.quic, b"\x0f\x06" + encode_varint(KNOWN + 1) + b"\x01b"),  # its end, too early
        late,
        seal(client.quic, b"\x01\x00\x00"),
    ]
    sizes = [len(data) for data in batch]
    stamps = [(10, sizes[0]), (20, sizes[1]), (30, sizes[2] + sizes[3]), (40, sizes[4]), (50, sizes[5])]
    server.quic.receive_batch(batch, client.address, simulation.now, stamps)
    server.take_events()
    assert sorted(server.ended) == [2, 6, 10]
    assert {stream: server.quic.take_arrival(stream) for stream in (2, 6, 10)} == {2: 20, 6: 40, 10: 30}
    assert server.quic.take_arrival(2) is None


def test_reserved_bits_are_a_protocol_violation() -> None:
    simulation = Simulation(PinnedConnection, FastConnection)
    client, server = simulation.ends
    keys = client.quic._cryptos[ONE_RTT]
    number = client.quic._packet_number
    header = b"\x59" + client.quic._peer_cid.cid + number.to_bytes(2, "big")
    packet = keys.encrypt_packet(header, b"\x01\x00\x00", number)
    server.quic.receive_batch([packet], client.address, simulation.now)
    assert server.quic.closing is not None
    assert server.quic.closing.error_code == 0xA  # PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    ("pings", "missing", "at_once"),
    [(1, False, False), (ACK_EVERY - 1, False, False), (ACK_EVERY, False, True), (2, True, True)],
)
def test_an_acknowledgement_comes_at_once_for_many_packets_or_a_missing_one(
    pings: int, missing: bool, at_once: bool
) -> None:
    simulation = Simulation(PinnedConnection, FastConnection)
    client, server = simulation.ends
    sealed = [seal(client.quic, b"\x01\x00\x00") for _ in range(pings + missing)]
    before = len(server.sent)
    server.quic.receive_batch(sealed[missing:], client.address, simulation.now)
    simulation.flush(server)
    assert (len(server.sent) > before) is at_once
    if at_once:  # and then it counts anew
        before = len(server.sent)
        server.quic.receive_batch([seal(client.quic, b"\x01\x00\x00")], client.address, simulation.now)
        simulation.flush(server)
        assert len(server.sent) == before
    assert server.quic.get_timer() == simulation.now + server.quic._ack_delay
