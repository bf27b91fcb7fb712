"""The controller inside aioquic's own connections, as registered, over a simulated path."""

from __future__ import annotations

from functools import partial

import pytest
from aioquic.quic import events
from simulated_path import MBIT, Path, Simulation

from bbquic.transport.burst import BurstWatch
from bbquic.transport.congestion import RATE_CONTROL, RateController, register
from bbquic.transport.identity import Fingerprint, make_identity
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import PinnedConnection, configuration
from bbquic.transport.report import decode_report_untrusted, report_message
from bbquic.units import Bytes, Seconds

ADDRESS = ("192.0.2.1", 4433)
SERVER, CLIENT = make_identity("server"), make_identity("client")
DELAY = 0.025


class End:
    """A connection and its side of the path. The receiver's kernel is the arrival event."""

    def __init__(self, simulation: Simulation, path: Path, original: bytes | None = None) -> None:
        """`original` is the connection id a server was first called by; None makes a client."""
        is_client = original is None
        identity = CLIENT if is_client else SERVER
        settings = configuration(identity, EndpointOptions(), ADDRESS, is_client=is_client)
        settings.congestion_control_algorithm = RATE_CONTROL
        ids = {} if original is None else {"original_destination_connection_id": original}
        pins: set[Fingerprint] = {(SERVER if is_client else CLIENT).fingerprint}
        self.quic = PinnedConnection(
            is_pinned=pins.__contains__, options=EndpointOptions(), configuration=settings, **ids
        )
        self.simulation = simulation
        self.path = path
        self.other: End | None = None
        self.watch = BurstWatch(Bytes(1200))
        self.received = 0
        self.ended = 0
        self._timer_at: float | None = None

    @property
    def control(self) -> RateController:
        control = self.quic._loss._cc
        assert isinstance(control, RateController)
        return control

    def flush(self) -> None:
        now = self.simulation.now
        assert self.other is not None
        for data, _ in self.quic.datagrams_to_send(now):
            self.path.carry(len(data), partial(self.other.take, data))
        at = self.quic.get_timer()
        if at is not None and at != self._timer_at:
            self._timer_at = at
            self.simulation.at(at, partial(self._expire, at))

    def take(self, data: bytes) -> None:
        now = self.simulation.now
        self.quic.receive_datagram(data, ADDRESS, now)
        event = self.quic.next_event()
        while event is not None:
            if isinstance(event, events.StreamDataReceived):
                self.received += len(event.data)
                self.ended += event.end_stream
            event = self.quic.next_event()
        assert self.other is not None
        if not data[0] & 0x80:
            for measured in self.watch.observe([(int(now * 1e9), len(data))], Seconds(2 * DELAY)):
                report = decode_report_untrusted(report_message(measured))
                arrives = now + DELAY
                self.simulation.at(arrives, partial(self.other.control.on_report, report, arrives))
        self.flush()

    def _expire(self, at: float) -> None:
        if at == self._timer_at:
            self._timer_at = None
            self.quic.handle_timer(self.simulation.now)
            self.flush()


@pytest.fixture
def ends() -> tuple[End, End]:
    register()
    simulation = Simulation()
    client = End(simulation, Path(simulation, 20 * MBIT, DELAY))
    original = client.quic.original_destination_connection_id
    server = End(simulation, Path(simulation, 20 * MBIT, DELAY), original)
    client.other, server.other = server, client
    client.quic.connect(ADDRESS, now=simulation.now)
    client.flush()
    simulation.run(simulation.now + 1.0)
    assert server.quic.is_known
    return client, server


def send(client: End, server: End, size: int) -> float:
    """Seconds until a message is there."""
    begin, ended = client.simulation.now, server.ended
    client.quic.write_stream(client.quic.open_stream(0), memoryview(bytes(size)), end=True)
    client.flush()
    client.simulation.run(begin + 60.0, lambda: server.ended > ended)
    assert server.ended > ended
    return client.simulation.now - begin


def test_messages_are_timed_and_the_rate_is_learnt(ends: tuple[End, End]) -> None:
    client, server = ends
    for _ in range(4):
        send(client, server, 400_000)
        client.simulation.run(client.simulation.now + 0.2)
    estimate = client.control.link.statistics(client.simulation.now)
    assert estimate.rate == pytest.approx(20 * MBIT, rel=0.05)
    assert estimate.min_rtt == pytest.approx(2 * DELAY, abs=0.003)
    assert client.control.bytes_in_flight == 0


def test_a_long_transfer_keeps_its_books_under_loss(ends: tuple[End, End]) -> None:
    client, server = ends
    client.path.loss = 0.01
    seconds = send(client, server, 4_000_000)
    assert 4_000_000 / seconds >= 0.7 * 20 * MBIT
    client.simulation.run(client.simulation.now + 1.0)
    assert client.control.bytes_in_flight == 0
    assert client.control.link.statistics(client.simulation.now).loss == pytest.approx(0.01, abs=0.01)
