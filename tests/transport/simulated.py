"""Two QUIC connections and the path between them, in simulated time: no sockets, no clock, no waiting."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from aioquic.quic import events
from aioquic.quic.connection import END_STATES
from aioquic.tls import Epoch

from bbquic.transport.identity import make_identity
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import PinnedConnection, configuration

CLIENT, SERVER = make_identity("client"), make_identity("server")
CLIENT_ADDRESS, SERVER_ADDRESS = ("192.0.2.1", 1), ("192.0.2.2", 2)
GRAIN = 1e-6  # seconds; time always moves on, as on a real clock
MOST_STEPS = 100_000  # many more than anything here takes

Kind = type[PinnedConnection]


@dataclass(frozen=True)
class Path:
    """What happens to datagrams: shares of them lost and duplicated, seconds of delay and of its spread."""

    loss: float = 0.0
    duplication: float = 0.0
    delay: float = 0.01
    jitter: float = 0.0

    def delays(self, draw: random.Random) -> list[float]:
        """When the copies of a datagram arrive."""
        if draw.random() < self.loss:
            return []
        copies = 2 if draw.random() < self.duplication else 1
        return [self.delay + draw.random() * self.jitter for _ in range(copies)]


class End:
    """One connection, and what its application has read."""

    def __init__(self, quic: PinnedConnection, address: tuple[str, int]) -> None:
        self.quic = quic
        self.address = address
        self.reads = True  # gives credit for whole messages
        self.received: dict[int, bytearray] = {}
        self.ended: list[int] = []  # streams, in the order they ended
        self.reset: list[int] = []
        self.datagrams: list[bytes] = []
        self.sent: list[bytes] = []  # every datagram

    def say(self, data: bytes, priority: int = 1, *, end: bool = True) -> int:
        stream_id = self.quic.open_stream(priority)
        self.quic.write_stream(stream_id, memoryview(data), end=end)
        return stream_id

    def take_events(self) -> None:
        event = self.quic.next_event()
        while event is not None:
            if isinstance(event, events.StreamDataReceived):
                self.received.setdefault(event.stream_id, bytearray()).extend(event.data)
                if event.end_stream:
                    self.ended.append(event.stream_id)
                    if self.reads:
                        self.quic.release(len(self.received[event.stream_id]))
            elif isinstance(event, events.StreamReset):
                self.reset.append(event.stream_id)
                self.quic.release(self.quic.reset_size(event.stream_id))
            elif isinstance(event, events.DatagramFrameReceived):
                self.datagrams.append(event.data)
            event = self.quic.next_event()

    @property
    def messages(self) -> list[bytes]:
        """Those that are whole, in the order their streams were opened."""
        return [bytes(self.received[stream_id]) for stream_id in sorted(self.ended)]


class Simulation:
    def __init__(
        self,
        client: Kind,
        server: Kind,
        *,
        path: Path | None = None,
        seed: int = 0,
        options: EndpointOptions | None = None,
        **settings: Any,
    ) -> None:
        """Connected already, over a path as slow but without loss. `settings` are aioquic's."""
        self.options = options or EndpointOptions()
        self.now = 0.0
        path = path or Path()
        self.path = Path(delay=path.delay, jitter=path.jitter)
        self._draw = random.Random(seed)
        self._in_flight: list[tuple[float, int, End, bytes]] = []
        self._count = 0
        dialling = client(
            is_pinned=lambda key: key == SERVER.fingerprint,
            options=self.options,
            configuration=self._configuration(True, settings),
        )
        accepting = server(
            is_pinned=lambda key: key == CLIENT.fingerprint,
            options=self.options,
            configuration=self._configuration(False, settings),
            original_destination_connection_id=dialling.original_destination_connection_id,
        )
        self.client, self.server = End(dialling, CLIENT_ADDRESS), End(accepting, SERVER_ADDRESS)
        dialling.connect(SERVER_ADDRESS, now=self.now)
        self.run(lambda: all(end.quic.is_known and end.quic._handshake_confirmed for end in self.ends))
        self.run_for(1.0)
        self.path = path

    def _configuration(self, is_client: bool, settings: dict[str, Any]) -> Any:
        identity, peer = (CLIENT, SERVER_ADDRESS) if is_client else (SERVER, CLIENT_ADDRESS)
        made = configuration(identity, self.options, peer, is_client=is_client)
        for name, value in settings.items():
            setattr(made, name, value)
        return made

    @property
    def ends(self) -> tuple[End, End]:
        return self.client, self.server

    def other(self, end: End) -> End:
        return self.server if end is self.client else self.client

    def run(self, until: Callable[[], bool], limit: float = 3600.0) -> None:
        """Let time pass until something holds; a failure after `limit` simulated seconds."""
        stop = self.now + limit
        for _ in range(MOST_STEPS):
            if until():
                return
            assert self.now < stop, "it never came to that"
            self.step(stop)
        raise AssertionError("time hardly moves: a timer asks to be called again and again")

    def run_for(self, seconds: float) -> None:
        stop = self.now + seconds
        while self.now < stop:
            self.step(stop)

    def step(self, stop: float) -> None:
        """Send what may be sent; then on to the next arrival or timer."""
        for end in self.ends:
            self.flush(end)
        times = [end.quic.get_timer() for end in self.ends if end.quic._close_at is not None]
        times += [self._in_flight[0][0] if self._in_flight else None, stop]
        self.now = max(self.now + GRAIN, min(time for time in times if time is not None))
        for end in self.ends:
            timer = end.quic.get_timer() if end.quic._close_at is not None else None
            if timer is not None and timer <= self.now:
                end.quic.handle_timer(self.now)
        self._deliver()

    def flush(self, end: End) -> None:
        end.take_events()
        if not end.quic._network_paths:
            return
        for train in end.quic.trains_to_send(self.now):
            for data in train.datagrams():
                end.sent.append(data)
                for delay in self.path.delays(self._draw) if train.address == self.other(end).address else ():
                    self._count += 1
                    heappush(self._in_flight, (self.now + delay, self._count, self.other(end), data))

    def _deliver(self) -> None:
        arrived: dict[int, list[bytes]] = {}
        while self._in_flight and self._in_flight[0][0] <= self.now:
            _, _, end, data = heappop(self._in_flight)
            arrived.setdefault(self.ends.index(end), []).append(data)
        for place, datagrams in arrived.items():
            end = self.ends[place]
            end.quic.receive_batch(datagrams, self.other(end).address, self.now)
            end.take_events()

    def drop_in_flight(self) -> None:
        self._in_flight.clear()


def is_over(end: End) -> bool:
    return end.quic._state in END_STATES


def seal(sender: PinnedConnection, frames: bytes) -> bytes:
    """A genuine 1-RTT packet with any frames whatever, as aioquic would send it."""
    keys = sender._cryptos[Epoch.ONE_RTT]
    number = sender._packet_number
    sender._packet_number += 1
    header = bytes([0x41 | keys.key_phase << 2]) + sender._peer_cid.cid + (number & 0xFFFF).to_bytes(2, "big")
    return keys.encrypt_packet(header, frames, number)
