"""Connections with fast paths and without, in all pairings, over bad paths and in simulated time."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Kind, Path, Simulation

from bbquic.transport.ending import CloseCode
from bbquic.transport.fast import FastConnection
from bbquic.transport.intake import ONE_RTT
from bbquic.transport.message import KIB, MIB
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import PinnedConnection
from bbquic.units import Bytes, Seconds

BULK, URGENT = 2, 0
PATIENT = EndpointOptions(
    idle_timeout=Seconds(600.0)
)  # where a fifth is lost, a few probes are lost in a row

pairings = pytest.mark.parametrize(
    ("client", "server"),
    [
        (FastConnection, FastConnection),
        (FastConnection, PinnedConnection),
        (PinnedConnection, FastConnection),
        (PinnedConnection, PinnedConnection),
    ],
    ids=["fast-fast", "fast-stock", "stock-fast", "stock-stock"],
)
kinds = pytest.mark.parametrize("kind", [FastConnection, PinnedConnection], ids=["fast", "stock"])

paths = st.builds(
    Path,
    loss=st.sampled_from([0.0, 0.02, 0.2]),
    duplication=st.sampled_from([0.0, 0.1]),
    delay=st.floats(0.0005, 0.2),
    jitter=st.sampled_from([0.0, 0.002, 0.05]),  # of 50 ms: most datagrams overtake others
)
sizes = st.lists(st.sampled_from([0, 1, 100, 1150, 1200, 5000, 40_000, 100_000]), min_size=1, max_size=6)


def contents(lengths: list[int], seed: int) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(length) for length in lengths]


def exchange(simulation: Simulation, there: list[bytes], back: list[bytes]) -> None:
    """Send messages both ways at once; all must arrive, whole and once, and be acknowledged."""
    client, server = simulation.ends
    before = len(client.ended), len(server.ended)
    for message in there:
        client.say(message)
    for message in back:
        server.say(message)
    simulation.run(
        lambda: (
            (len(client.ended), len(server.ended)) == (before[0] + len(back), before[1] + len(there))
            and client.quic.unacknowledged() == server.quic.unacknowledged() == (0, 0)
        )
    )
    assert client.messages[before[0] :] == back
    assert server.messages[before[1] :] == there


@pairings
@settings(max_examples=40)
@given(path=paths, there=sizes, back=sizes, seed=st.integers(0, 2**32))
def test_all_arrives_intact_and_once(
    client: Kind, server: Kind, path: Path, there: list[int], back: list[int], seed: int
) -> None:
    simulation = Simulation(client, server, path=path, seed=seed, options=PATIENT)
    exchange(simulation, contents(there, seed), contents(back, seed + 1))
    for end in simulation.ends:
        assert end.quic.closing is None
        simulation.flush(end)
        assert all(stream.stream_id in end.quic._streams for stream in end.quic._streams_queue)
        assert end.quic._loss.bytes_in_flight >= 0
    used = [end.quic._remote_max_data_used for end in simulation.ends]
    assert used == [sum(there), sum(back)]  # credit is spent once, however often bytes are sent


def test_the_limit_of_a_stream_holds_its_sender() -> None:
    simulation = Simulation(FastConnection, PinnedConnection, max_stream_data=20_000)
    client, server = simulation.ends
    controller = client.quic._loss._cc
    controller.congestion_window, controller.pacing_rate = 1 << 20, 1e9  # type: ignore[attr-defined]
    client.say(bytes(50_000))
    simulation.run_for(simulation.path.delay / 2)  # nothing is acknowledged by then
    assert len(client.sent) > 15
    assert client.quic._remote_max_data_used == 20_000
    simulation.run(lambda: bool(server.ended))
    assert server.quic.closing is None


@pytest.mark.parametrize("size", [0, 1])
def test_a_tiny_message_is_one_packet(size: int) -> None:
    simulation = Simulation(FastConnection, FastConnection)
    client, server = simulation.ends
    before = client.quic._packet_number
    client.say(bytes(size))
    simulation.run(lambda: bool(server.ended))
    for _ in range(3):
        simulation.flush(client)
    assert client.quic._packet_number == before + 1


def test_what_leaves_first_after_a_key_update_has_the_new_keys() -> None:
    simulation = Simulation(FastConnection, FastConnection)
    client, server = simulation.ends
    client.quic.request_key_update()
    client.say(b"first")
    simulation.run(lambda: bool(server.ended), limit=simulation.path.delay + 0.001)


def test_between_two_fast_ends_nearly_all_packets_go_the_fast_way() -> None:
    simulation = Simulation(FastConnection, FastConnection)
    exchange(simulation, [bytes(MIB)], [])
    client, server = simulation.client.quic, simulation.server.quic
    assert isinstance(client, FastConnection)
    assert isinstance(server, FastConnection)
    assert client.fast_packets[0] > 0.95 * len(simulation.client.sent)
    assert server.fast_packets[1] >= client.fast_packets[0]


@pairings
def test_keys_are_updated_in_mid_transfer(client: Kind, server: Kind) -> None:
    simulation = Simulation(client, server, path=Path(loss=0.02, jitter=0.005))
    for turn, end in enumerate((*simulation.ends, *simulation.ends)):
        before = end.quic._cryptos[ONE_RTT].key_phase
        end.quic.request_key_update()
        exchange(simulation, contents([60_000], turn), contents([60_000], -turn))
        assert [one.quic._cryptos[ONE_RTT].recv.key_phase for one in simulation.ends] == [1 - before] * 2


@pairings
def test_connection_ids_are_changed_in_mid_transfer(client: Kind, server: Kind) -> None:
    simulation = Simulation(client, server, path=Path(loss=0.02))
    for turn in range(4):
        used = simulation.server.quic.host_cid
        simulation.client.quic.change_connection_id()
        exchange(simulation, contents([60_000], turn), contents([60_000], -turn))
        assert simulation.server.quic.host_cid != used


@pairings
def test_a_client_whose_address_changes_is_followed(client: Kind, server: Kind) -> None:
    simulation = Simulation(client, server)
    simulation.client.say(bytes(MIB))
    simulation.run(lambda: bool(simulation.server.received))
    simulation.client.address = ("192.0.2.77", 77)  # its router gave it another one
    simulation.run(lambda: len(simulation.server.ended) == 1)
    exchange(simulation, [bytes(MIB)], [bytes(MIB)])
    assert simulation.server.quic.get_peer_address() == simulation.client.address
    assert simulation.server.quic._network_paths[0].is_validated


def test_a_round_trip_that_grows_to_thirty_times_as_long_stalls_nothing() -> None:
    # aioquic alone never recovers: it forgets a packet at its probe timeout, so that no acknowledgement
    # of it, late as it is, tells it the new round trip. Our probes are packets of their own.
    simulation = Simulation(FastConnection, FastConnection, path=Path(delay=0.01), options=PATIENT)
    simulation.path = Path(delay=0.3)
    exchange(simulation, [b"there"], [b"back"])
    assert simulation.now < 10.0


@pairings
def test_a_connection_outlives_hours_with_nothing_but_pings(client: Kind, server: Kind) -> None:
    simulation = Simulation(client, server, path=Path(loss=0.1))
    for _ in range(2 * 3600 // 5):
        simulation.client.quic.send_ping(0)
        simulation.run_for(5.0)
    exchange(simulation, [b"still here"], [b"so am I"])


@kinds
def test_a_peer_that_falls_silent_ends_the_connection(kind: Kind) -> None:
    simulation = Simulation(kind, kind, path=Path(loss=1.0))
    simulation.client.say(bytes(100 * KIB))
    simulation.run(simulation.client.quic.is_silent, limit=60.0)


@kinds
def test_unread_messages_stop_the_sender_at_the_window(kind: Kind) -> None:
    window = 64 * KIB
    simulation = Simulation(
        kind, kind, options=EndpointOptions(receive_window=Bytes(window)), path=Path(loss=0.05)
    )
    client, server = simulation.ends
    server.reads = False
    messages = contents([20 * KIB] * 8, 1)
    for message in messages:
        client.say(message)
    simulation.run_for(15.0)
    assert sum(map(len, server.received.values())) == window
    assert client.quic._remote_max_data_used == window
    assert server.quic.closing is None
    while server.messages != messages:
        for content in server.received.values():
            server.quic.release(len(content))
        server.reads = True
        simulation.run_for(1.0)


@kinds
def test_the_urgent_overtakes_what_was_written_before_it(kind: Kind) -> None:
    simulation = Simulation(kind, kind)
    client, server = simulation.ends
    bulk = client.say(bytes(2 * MIB), BULK)
    simulation.run(lambda: bool(server.received))
    urgent = client.say(bytes(100 * KIB), URGENT)
    simulation.run(lambda: urgent in server.ended)
    assert bulk not in server.ended
    if kind is FastConnection:  # aioquic takes streams in turn
        in_flight = 2 * client.quic._loss.congestion_window
        assert len(server.received[bulk]) <= in_flight


def test_of_equal_priority_the_older_is_sent_whole_before_the_next_begins() -> None:
    simulation = Simulation(FastConnection, FastConnection)
    client, server = simulation.ends
    streams = [client.say(bytes(200 * KIB)) for _ in range(5)]
    simulation.run(lambda: len(server.ended) == len(streams))
    assert server.ended == streams


@kinds
def test_a_message_given_up_half_way_is_reset_and_the_rest_goes_on(kind: Kind) -> None:
    simulation = Simulation(kind, kind, path=Path(loss=0.05))
    client, server = simulation.ends
    half = client.say(bytes(300 * KIB), end=False)
    whole = client.say(b"whole")
    simulation.run(lambda: len(server.received.get(half, b"")) > 10_000)
    client.quic.reset_stream(half, 1)
    simulation.run(lambda: server.reset == [half] and server.ended == [whole])
    exchange(simulation, [bytes(MIB)], [])
    assert half not in client.quic._streams


@kinds
def test_an_acknowledgement_of_what_was_never_sent_is_a_protocol_violation(kind: Kind) -> None:
    simulation = Simulation(kind, PinnedConnection)
    liar = simulation.server.quic._spaces[ONE_RTT]
    liar.ack_queue.add(0, 10_000)
    liar.ack_at, liar.largest_received_time = simulation.now, simulation.now
    simulation.run_for(1.0)
    closing = simulation.client.quic.closing
    assert closing is not None
    assert closing.error_code == 0xA  # PROTOCOL_VIOLATION


@kinds
@settings(max_examples=60)
@given(st.data())
def test_a_changed_byte_on_the_way_is_as_good_as_a_loss(kind: Kind, data: st.DataObject) -> None:
    simulation = Simulation(kind, kind)
    client, server = simulation.ends
    message = bytes(range(256)) * 40
    client.say(message)
    simulation.flush(client)
    simulation.drop_in_flight()
    changed = [bytearray(datagram) for datagram in client.sent[-8:]]
    victim = data.draw(st.sampled_from(changed))
    victim[data.draw(st.integers(0, len(victim) - 1))] ^= data.draw(st.integers(1, 255))
    server.quic.receive_batch([bytes(one) for one in changed], client.address, simulation.now)
    assert server.quic.closing is None
    simulation.run(lambda: server.messages == [message])


@kinds
@given(noise=st.lists(st.binary(max_size=60) | st.binary(min_size=1200, max_size=1200), max_size=8))
@settings(max_examples=40)
def test_noise_changes_nothing(kind: Kind, noise: list[bytes]) -> None:
    simulation = Simulation(kind, kind)
    client, server = simulation.ends
    header = b"\x41" + client.quic._peer_cid.cid
    for batch in (noise, [header + piece for piece in noise], [b"\xc0" + piece for piece in noise]):
        server.quic.receive_batch(batch, client.address, simulation.now)
    assert server.quic.closing is None
    exchange(simulation, [b"there"], [b"back"])


def test_a_bug_in_the_stack_costs_the_connection_and_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(FastConnection, FastConnection)
    client, server = simulation.ends
    client.say(b"message")
    simulation.flush(client)
    del server.quic._spaces[ONE_RTT].received_packets  # as if we had overlooked something
    with caplog.at_level(logging.ERROR, "bbquic.transport"):
        server.quic.receive_batch(client.sent[-1:], client.address, simulation.now)
    assert server.quic.closing is not None
    assert server.quic.closing.error_code == CloseCode.INTERNAL
    assert "broke the QUIC stack" in caplog.text


@pairings
def test_datagram_frames_arrive_where_both_ends_allow_them(client: Kind, server: Kind) -> None:
    simulation = Simulation(client, server, max_datagram_frame_size=1100)
    sent = contents([0, 1, 500, 1000, 1000], 7)
    for data in sent:
        simulation.client.quic.send_datagram_frame(data)
    simulation.client.say(bytes(100))
    simulation.run(lambda: len(simulation.server.datagrams) == len(sent))
    assert simulation.server.datagrams == sent
    exchange(simulation, [b"and streams"], [b"as well"])


def test_arrival_times_reach_the_observer_only_when_all_was_genuine() -> None:
    simulation = Simulation(FastConnection, FastConnection)
    client, server = simulation.ends
    seen: list[tuple[int, int]] = []
    assert isinstance(server.quic, FastConnection)
    server.quic.observe_arrival = lambda time, size: seen.append((time, size))
    client.say(bytes(4000))
    simulation.flush(client)
    genuine = client.sent[-4:]
    forged = genuine[0][:-1] + bytes([genuine[0][-1] ^ 1])
    server.quic.receive_batch([forged], client.address, simulation.now, [(1, len(forged))])
    assert seen == []
    server.quic.receive_batch(genuine, client.address, simulation.now, [(2, 2400), (3, 1800)])
    assert seen == [(2, 2400), (3, 1800)]
