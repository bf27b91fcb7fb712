"""Acknowledgements: what a congestion controller hears of packets, one by one or in batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aioquic.quic.congestion.base import register_congestion_control
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Path, Simulation

from bbquic.transport.fast import FastConnection
from bbquic.transport.message import KIB
from bbquic.transport.recovery import FastRecovery, SentFrames


class Recording(RenoCongestionControl):
    """Reno in all it decides; keeps what it is told in batches."""

    restart_burst = 20_000
    pacing_rate: float | None = None

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.sent: list[SentFrames] = []
        self.acked: list[Any] = []
        self.lost: list[Any] = []
        self.singly = 0

    def on_sent_batch(self, packets: list[SentFrames], now: float, size: int) -> None:
        assert size == sum(packet.sent_bytes for packet in packets)
        assert all(packet.sent_time == now for packet in packets)
        self.bytes_in_flight += size
        self.sent += packets

    def on_ack_batch(self, packets: list[Any], now: float, recovery: FastRecovery) -> None:
        assert recovery._cc is self
        for packet in packets:
            super().on_packet_acked(now=now, packet=packet)
        self.acked += packets

    def on_packet_acked(self, *, now: float, packet: Any) -> None:
        raise AssertionError("it takes batches")

    def on_packets_lost(self, *, now: float, packets: Iterable[Any]) -> None:
        packets = list(packets)
        super().on_packets_lost(now=now, packets=packets)
        self.lost += packets

    def on_packets_expired(self, *, packets: Iterable[Any]) -> None:
        packets = list(packets)
        super().on_packets_expired(packets=packets)
        self.lost += packets


register_congestion_control("recording", Recording)


def numbers(packets: list[Any]) -> list[int]:
    return sorted(packet.packet_number for packet in packets)


def test_a_controller_that_takes_batches_hears_of_each_packet_once() -> None:
    simulation = Simulation(
        FastConnection, FastConnection, path=Path(loss=0.05), congestion_control_algorithm="recording"
    )
    client, server = simulation.ends
    controller = client.quic._loss._cc
    assert isinstance(controller, Recording)
    controller.sent, controller.acked, controller.lost = [], [], []
    client.say(bytes(500 * KIB))
    simulation.run(lambda: bool(server.ended) and client.quic.unacknowledged() == (0, 0))
    simulation.run_for(1.0)
    heard = [packet for packet in controller.acked + controller.lost if isinstance(packet, SentFrames)]
    assert numbers(heard) == numbers(controller.sent)
    assert controller.lost
    assert controller.bytes_in_flight == 0


def test_the_first_packet_of_each_burst_is_marked() -> None:
    simulation = Simulation(FastConnection, FastConnection, congestion_control_algorithm="recording")
    controller = simulation.client.quic._loss._cc
    assert isinstance(controller, Recording)
    controller.sent = []
    for _ in range(3):
        simulation.client.say(bytes(8 * KIB))  # within the first window
        simulation.run_for(2.0)
    first = [packet for packet in controller.sent if packet.is_first]
    assert len(first) == 3
    assert first[0] is controller.sent[0]


def test_a_paced_burst_leaves_by_timers_without_waiting_for_acknowledgements() -> None:
    simulation = Simulation(
        FastConnection, FastConnection, path=Path(delay=2.0), congestion_control_algorithm="recording"
    )
    client, server = simulation.ends
    controller = client.quic._loss._cc
    assert isinstance(controller, Recording)
    controller.pacing_rate, controller.restart_burst = 100_000.0, 0
    controller.congestion_window = 1 << 20
    simulation.run_for(10.0)
    start = simulation.now
    client.say(bytes(50_000))
    simulation.run(lambda: bool(server.ended))
    assert (
        0.4 <= simulation.now - start - simulation.path.delay <= 0.7
    )  # half a second's worth, in no time of ours


def test_a_controller_that_knows_no_batches_hears_of_each_packet_singly() -> None:
    simulation = Simulation(FastConnection, FastConnection, path=Path(loss=0.05))
    client, server = simulation.ends
    client.say(bytes(500 * KIB))
    simulation.run(lambda: bool(server.ended) and client.quic.unacknowledged() == (0, 0))
    simulation.run_for(1.0)
    assert client.quic._loss.bytes_in_flight == 0


@st.composite
def acknowledgements(draw: st.DrawFn) -> list[RangeSet]:
    """ACK frames for packets 0 to 199, as any peer may send them."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        ranges = RangeSet()
        for _ in range(draw(st.integers(1, 6))):
            start = draw(st.integers(0, 199))
            ranges.add(start, draw(st.integers(start + 1, 200)))
        made.append(ranges)
    return made


def recovery() -> tuple[FastRecovery, QuicPacketSpace]:
    made = FastRecovery(
        congestion_control_algorithm="reno",
        initial_rtt=0.1,
        max_datagram_size=1200,
        peer_completed_address_validation=True,
        send_probe=lambda: None,
    )
    space = QuicPacketSpace(is_application_data=True)
    made.spaces = [space]
    return made, space


@settings(max_examples=200)
@given(acknowledgements())
def test_any_acknowledgements_leave_what_aioquic_leaves(frames: list[RangeSet]) -> None:
    ours, our_space = recovery()
    theirs, their_space = recovery()
    for each, space in ((ours, our_space), (theirs, their_space)):
        for number in range(200):
            each.on_batch_sent([SentFrames(number, 0.001 * number, 1200)], space, 0.001 * number)
    for turn, ranges in enumerate(frames):
        now = 0.3 + 0.001 * turn
        ours.on_ack_received(ack_rangeset=ranges, ack_delay=0.0, now=now, space=our_space)
        super(FastRecovery, theirs).on_ack_received(
            ack_rangeset=ranges, ack_delay=0.0, now=now, space=their_space
        )
        assert list(our_space.sent_packets) == list(their_space.sent_packets)
        assert our_space.ack_eliciting_in_flight == their_space.ack_eliciting_in_flight
        assert our_space.largest_acked_packet == their_space.largest_acked_packet
        assert our_space.loss_time == their_space.loss_time
        assert ours.bytes_in_flight == theirs.bytes_in_flight
        assert ours.congestion_window == theirs.congestion_window
        assert (ours._rtt_smoothed, ours._rtt_variance) == (theirs._rtt_smoothed, theirs._rtt_variance)
