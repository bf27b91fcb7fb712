"""A sender and its receiver on a simulated path.

The sender is a light model of QUIC: numbered packets, loss detection and probe timeouts of RFC 9002 as
aioquic has them, an acknowledgement per 16 packets or millisecond, pacing by a token bucket. What is tested,
`RateController` and `BurstWatch`, is the real code; aioquic's own Reno and cubic compete with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aioquic.quic.congestion import cubic, reno  # noqa: F401  (registers both)
from aioquic.quic.congestion.base import QuicCongestionControl, create_congestion_control
from simulated_path import MBIT, PACKET, Path, Simulation

from bbquic.transport.burst import BurstWatch
from bbquic.transport.congestion import RateController
from bbquic.transport.report import RateReport, decode_report_untrusted, report_message
from bbquic.units import Bytes, Seconds

QUANTUM = 0.004  # s of sending that a pacer may catch up
ACK_EVERY, ACK_DELAY = 16, 0.001
MAX_ACK_DELAY = 0.025  # what aioquic advertises and adds to probe timeouts
PACKET_THRESHOLD, TIME_THRESHOLD = 3, 9 / 8


@dataclass(slots=True)
class Packet:
    number: int
    chunk: int
    sent_time: float
    sent_bytes: int
    in_flight: bool = True


@dataclass
class Message:
    """`first` and `last` of its chunks, when it was written and when its last chunk arrived."""

    size: int
    first: int
    last: int
    written_at: float
    arrived_at: float = math.inf

    @property
    def seconds(self) -> float:
        return self.arrived_at - self.written_at


class Flow:
    """A sender and its receiver. `forth` carries data, `back_delay` (and jitter) acknowledgements."""

    def __init__(
        self,
        simulation: Simulation,
        forth: Path,
        back_delay: float,
        algorithm: str | RateController = "reno",
        *,
        back_jitter: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.simulation = simulation
        self.forth = forth
        self.back = Path(simulation, 1e12, back_delay, jitter=back_jitter, limit=1e9, seed=seed)
        self.control: QuicCongestionControl = (
            create_congestion_control(algorithm, max_datagram_size=PACKET)
            if isinstance(algorithm, str)
            else algorithm
        )
        self.timestamps = True  # whether the receiver knows arrival times, and reports
        self.messages: deque[Message] = deque()
        self.chunks = 0  # written so far
        self.delivered = 0  # bytes, of distinct chunks
        self.sent = self.lost = 0  # packets
        self.reported: list[float] = []
        self._next_chunk = 0
        self._again: deque[int] = deque()
        self._missing: set[int] = set()
        self._number = 0
        self._flying: dict[int, Packet] = {}
        self._largest_acked = -1
        self._rtt = self._rtt_variation = self._latest = 0.0
        self._probes = 0
        self._is_probe_due = False
        self._tokens, self._tokens_at = 0.0, simulation.now
        self._wake_at = self._timer_at = math.inf
        self._unacked: list[int] = []
        self._ack_armed = False
        self._watch = BurstWatch(Bytes(PACKET))

    # The application.

    def write(self, size: int) -> Message:
        count = -(-size // (PACKET - 40))
        message = Message(size, self.chunks, self.chunks + count - 1, self.simulation.now)
        self.messages.append(message)
        self.chunks += count
        self._missing.update(range(message.first, message.last + 1))
        self.send()
        return message

    def wait(self, message: Message, limit: float = 120.0) -> Message:
        self.simulation.run(self.simulation.now + limit, lambda: message.arrived_at < math.inf)
        assert message.arrived_at < math.inf, "it never arrived"
        return message

    def rest(self, seconds: float) -> None:
        self.simulation.run(self.simulation.now + seconds)

    # The sender.

    def send(self) -> None:
        control, now = self.control, self.simulation.now
        while self._again or self._next_chunk < self.chunks:
            has_room = control.bytes_in_flight + PACKET <= control.congestion_window
            if not has_room and not self._is_probe_due:
                return
            if not self._may_send(now):
                return
            self._is_probe_due = False
            self._transmit(now)
        self._arm()

    def _may_send(self, now: float) -> bool:
        rate = getattr(self.control, "pacing_rate", None)
        if rate is None:
            return True
        burst = max(16 * PACKET, rate * QUANTUM)
        self._tokens = min(max(burst, self._tokens), self._tokens + (now - self._tokens_at) * rate)
        self._tokens_at = now
        is_quiet = getattr(self.control, "is_quiet", None)
        if self.control.bytes_in_flight <= 0 or (is_quiet is not None and is_quiet(now)):
            self._tokens = max(self._tokens, getattr(self.control, "restart_burst", 0))
        if self._tokens >= PACKET:
            return True
        wanted = min(burst, max(2 * PACKET, rate * 0.001)) - self._tokens
        at = now + max(wanted / rate, 1e-6)
        if self._wake_at <= now or at < self._wake_at:
            self._wake_at = at
            self.simulation.at(at, self._wake)
        return False

    def _wake(self) -> None:
        if self.simulation.now >= self._wake_at:
            self._wake_at = math.inf
        self.send()

    def _transmit(self, now: float) -> None:
        if self._again:
            chunk = self._again.popleft()
        else:
            chunk = self._next_chunk
            self._next_chunk += 1
        packet = Packet(self._number, chunk, now, PACKET)
        self._number += 1
        self.sent += 1
        self._flying[packet.number] = packet
        self.control.on_packet_sent(packet=packet)  # type: ignore[arg-type]
        self._tokens -= PACKET
        self.forth.carry(PACKET, partial(self._arrive, packet))
        self._arm()

    def _acknowledge(self, numbers: list[int]) -> None:
        now = self.simulation.now
        acked = [self._flying.pop(number) for number in numbers if number in self._flying]
        if not acked:
            return
        acked.sort(key=lambda packet: packet.number)
        batch: Callable[[list[Packet], float, Any], None] | None = getattr(self.control, "on_ack_batch", None)
        if batch is not None:
            batch(acked, now, None)
        else:
            for packet in acked:
                self.control.on_packet_acked(now=now, packet=packet)  # type: ignore[arg-type]
        if acked[-1].number > self._largest_acked:
            self._largest_acked = acked[-1].number
            self._measure(now, now - acked[-1].sent_time)
        self._probes = 0
        self._detect(now)
        self.send()
        self._arm()

    def _measure(self, now: float, rtt: float) -> None:
        self._latest = rtt
        if not self._rtt:
            self._rtt, self._rtt_variation = rtt, rtt / 2
        else:
            self._rtt_variation += (abs(self._rtt - rtt) - self._rtt_variation) / 4
            self._rtt += (rtt - self._rtt) / 8
        self.control.on_rtt_measurement(now=now, rtt=rtt)

    def _detect(self, now: float) -> None:
        delay = TIME_THRESHOLD * max(self._latest, self._rtt)
        lost = []
        for packet in self._flying.values():
            if packet.number > self._largest_acked:
                break
            late = packet.sent_time <= now - delay + 1e-9
            if packet.number <= self._largest_acked - PACKET_THRESHOLD or late:
                lost.append(packet)
        if lost:
            self._lose(lost)
            self.control.on_packets_lost(now=now, packets=lost)  # type: ignore[arg-type]

    def _lose(self, packets: list[Packet]) -> None:
        for packet in packets:
            del self._flying[packet.number]
            self._again.append(packet.chunk)
        self.lost += len(packets)

    def _deadline(self) -> float:
        """When a loss or a probe is due."""
        if not self._flying:
            return math.inf
        first = next(iter(self._flying.values()))
        if first.number < self._largest_acked:
            return first.sent_time + TIME_THRESHOLD * max(self._latest, self._rtt)
        last = next(reversed(self._flying.values())).sent_time
        timeout = self._rtt + max(4 * self._rtt_variation, 0.001) + MAX_ACK_DELAY if self._rtt else 0.2
        return float(last + timeout * 2**self._probes)

    def _arm(self) -> None:
        at = self._deadline()
        if at < self._timer_at:
            self._timer_at = at
            self.simulation.at(at, self._expire)

    def _expire(self) -> None:
        now = self.simulation.now
        if now < self._timer_at:
            return
        self._timer_at = math.inf
        if now + 1e-9 < self._deadline():
            self._arm()
            return
        before = self.lost
        self._detect(now)
        if self.lost == before and self._flying:
            self._probes += 1
            self._is_probe_due = True
            oldest = next(iter(self._flying.values()))
            self._lose([oldest])
            self.control.on_packets_expired(packets=[oldest])  # type: ignore[list-item]
        self.send()
        self._arm()

    # The receiver.

    def _arrive(self, packet: Packet) -> None:
        now = self.simulation.now
        if packet.chunk in self._missing:
            self._missing.discard(packet.chunk)
            self.delivered += PACKET
            self._complete(now)
        self._unacked.append(packet.number)
        if len(self._unacked) >= ACK_EVERY:
            self._send_ack()
        elif not self._ack_armed:
            self._ack_armed = True
            self.simulation.at(now + ACK_DELAY, self._ack_late)
        if self.timestamps and isinstance(self.control, RateController):
            for measured in self._watch.observe([(int(now * 1e9), PACKET)], Seconds(self._rtt or 0.1)):
                self.reported.append(measured.rate)
                report = decode_report_untrusted(report_message(measured))
                self.back.carry(60, partial(self._take_report, report))

    def _complete(self, now: float) -> None:
        while self.messages and not any(
            chunk in self._missing for chunk in _ends(self.messages[0], self._missing)
        ):
            self.messages.popleft().arrived_at = now

    def _ack_late(self) -> None:
        self._ack_armed = False
        if self._unacked:
            self._send_ack()

    def _send_ack(self) -> None:
        numbers, self._unacked = self._unacked, []
        self.back.carry(60, partial(self._acknowledge, numbers))

    def _take_report(self, report: RateReport) -> None:
        assert isinstance(self.control, RateController)
        self.control.on_report(report, self.simulation.now)
        self.send()


def _ends(message: Message, missing: set[int]) -> range:
    """Chunks to look at: the last first, as it is nearly always what a message waits for."""
    if message.last in missing:
        return range(message.last, message.last + 1)
    return range(message.first, message.last + 1)


def make_flow(
    rate_mbit: float,
    rtt: float,
    *,
    jitter: float = 0.0,
    loss: float = 0.0,
    loss_run: int = 1,
    swap: float = 0.0,
    limit: float = 0.1,
    seed: int = 1,
    algorithm: str | RateController | None = None,
) -> Flow:
    """One flow alone on a path; `jitter` is the whole round trip's, around `rtt`."""
    simulation = Simulation()
    one_way = rtt / 2 - jitter / 2
    forth = Path(
        simulation,
        rate_mbit * MBIT,
        one_way,
        jitter=jitter,
        loss=loss,
        loss_run=loss_run,
        swap=swap,
        limit=limit,
        seed=seed,
    )
    control = RateController(max_datagram_size=PACKET) if algorithm is None else algorithm
    return Flow(simulation, forth, one_way, control, back_jitter=jitter, seed=seed)
