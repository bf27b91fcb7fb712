"""Whether the fast paths fit the aioquic that is installed: found out once, before the first connection."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import version
from typing import Any

from aioquic.quic import events
from aioquic.quic.connection import QuicConnection
from aioquic.quic.stream import QuicStream

from bbquic.errors import TransportError
from bbquic.transport.fast import FastConnection
from bbquic.transport.identity import make_identity
from bbquic.transport.intake import ONE_RTT
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import PinnedConnection, configuration

log = logging.getLogger("bbquic.transport")

ADDRESS = ("192.0.2.1", 1)  # nobody's (RFC 5737); nothing is sent there
MESSAGE = bytes(range(256)) * 400  # 100 KB: some flights, each of many packets
MOST_ROUNDS = 100  # many more than the message takes
STEP = 0.01  # seconds of the check's own time a round

# Names in aioquic's objects that the fast paths read or write.
CONNECTION_PARTS = """
    _ack_delay _ack_eliciting_sent_since_receipt _close_at _crypto_streams _cryptos _datagrams_pending
    _events _handshake_confirmed _handshake_done_pending _host_cids _idle_timeout _max_datagram_size
    _network_paths _pacing_at _payload_received _peer_cid _ping_pending _probe_pending _remote_max_data
    _remote_max_data_used _remote_preferred_address _retire_connection_ids _spaces _spin_bit
    _spin_highest_pn _stream_limit _streams_blocked_pending _streams_queue
"""
RECOVERY_PARTS = """
    _cc _detect_loss _pto_count _rtt_first_sample_time _rtt_latest _rtt_variance
    _time_of_last_sent_ack_eliciting_packet peer_completed_address_validation
"""
SENDER_PARTS = """
    _buffer _buffer_fin _pending _pending_eof buffer_is_empty highest_offset
"""
RECEIVER_PARTS = """
    _buffer _buffer_start _final_size highest_offset is_finished stop_pending
"""
SPACE_PARTS = """
    ack_at ack_eliciting_in_flight ack_queue expected_packet_number largest_acked_packet
    largest_received_packet largest_received_time received_packets sent_packets
"""


def connection_type(options: EndpointOptions) -> type[PinnedConnection]:
    """What to make connections of: FastConnection, unless it is not wanted or does not work here."""
    return FastConnection if options.fast_paths and _fast_paths_work() else PinnedConnection


@cache
def _fast_paths_work() -> bool:
    try:
        check_fast_paths()
    except Exception as error:  # of any kind: it is what the check is for
        log.warning(
            "bbquic's fast paths do not fit aioquic %s; using its own, several times slower: %s",
            version("aioquic"),
            error or type(error).__name__,
        )
        return False
    return True


def check_fast_paths() -> None:
    """Raises: TransportError, or whatever else goes wrong, unless two connections without sockets exchange
    a message, and that by the fast paths."""
    client, server = _connected()
    _look_for_parts(client)
    stream_id = client.open_stream(0)
    client.write_stream(stream_id, memoryview(MESSAGE), end=True)
    received = bytearray()
    for turn in range(MOST_ROUNDS):
        _exchange(client, server, 1.0 + turn * STEP)
        received += _stream_bytes(server)
        if client.is_acknowledged(stream_id):
            break
    if received != MESSAGE:
        raise TransportError(f"of {len(MESSAGE)} bytes sent, {len(received)} arrived")
    if not client.is_acknowledged(stream_id):
        raise TransportError("what arrived was not acknowledged")
    if client.fast_packets[0] < 2 or server.fast_packets[1] < 2:
        raise TransportError("the fast paths were not taken")


def _connected() -> tuple[FastConnection, FastConnection]:
    identity, options = make_identity("self-check"), EndpointOptions()
    settings: list[Any] = [
        configuration(identity, options, ADDRESS, is_client=is_client) for is_client in (True, False)
    ]
    client = FastConnection(is_pinned=lambda key: True, options=options, configuration=settings[0])
    server = FastConnection(
        is_pinned=lambda key: True,
        options=options,
        configuration=settings[1],
        original_destination_connection_id=client.original_destination_connection_id,
    )
    client.connect(ADDRESS, now=0.0)
    for turn in range(10):
        _exchange(client, server, turn * STEP)
    if not (client.is_known and server.is_known):
        raise TransportError("a handshake did not complete")
    _stream_bytes(server)
    return client, server


def _exchange(client: FastConnection, server: FastConnection, now: float) -> None:
    for one, other in ((client, server), (server, client)):
        datagrams = [data for train in one.trains_to_send(now) for data in train.datagrams()]
        if datagrams:
            other.receive_batch(datagrams, ADDRESS, now)


def _stream_bytes(connection: QuicConnection) -> bytes:
    found = b""
    event = connection.next_event()
    while event is not None:
        if isinstance(event, events.StreamDataReceived):
            found += event.data
        event = connection.next_event()
    return found


def _look_for_parts(connection: FastConnection) -> None:
    stream = QuicStream(stream_id=3)
    missing = [
        name
        for owner, names in (
            (connection, CONNECTION_PARTS),
            (connection._loss, RECOVERY_PARTS),
            (stream.sender, SENDER_PARTS),
            (stream.receiver, RECEIVER_PARTS),
            (connection._spaces[ONE_RTT], SPACE_PARTS),
        )
        for name in names.split()
        if not hasattr(owner, name)
    ]
    if missing:
        raise TransportError(f"it lacks {', '.join(missing)}")
