"""The rate controller: how fast to send, and how much may be in flight.

Registered with aioquic under `RATE_CONTROL`. Bursts are sent at the rate their receiver measured; a long
transfer goes on with what acknowledgements say it gets; where no bottleneck shows (loopback, LAN) a window
grows and shrinks as Reno's. docs/transport.md tells why. Time is an argument; nothing here knows a socket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.packet_builder import QuicSentPacket

from bbquic.transport.burst import HEAD_PACKETS, quiet_before_burst
from bbquic.transport.delivery import DeliveryMeter
from bbquic.transport.link import LinkMeter
from bbquic.transport.loss import LossWatch
from bbquic.transport.report import MOST_RATE, RateReport
from bbquic.transport.transfer import SEARCH_GAIN, SLACK, Transfer
from bbquic.units import Bytes, BytesPerSecond, Seconds

RATE_CONTROL = "bbquic-rate"

BURST_GAIN = 1.1  # of the measured rate: the bottleneck never waits, and queues a tenth of the burst
UNCLEAR = 0.5  # of a link's clarity: the path jitters as much as the head of a burst lasts
IN_FLIGHT = 2.0  # bandwidth-delay products: room for late acknowledgements and jitter
LONG_TRANSFER = (
    1 << 19
)  # bytes without a pause, and 2 BDP: from there acknowledgements say more than the head
LAN_RTT = Seconds(0.001)  # below, pacing means timers finer than an event loop's: the window alone limits
NO_BOTTLENECK = BytesPerSecond(MOST_RATE / 10)  # 1 Gbit/s, more than we can send: not a limit
MOST_IN_FLIGHT = 16 << 20  # bytes: 1 Gbit/s at 100 ms, whatever a peer reports
LEAST_SHARE = 1 / 16  # of the rate, however long losses last: 16 halvings would end in silence
RECOVERY = 1.05  # of the share, a clean round: a cut of a tenth is regained in two
LEAST_PACKETS_IN_FLIGHT = 4
QUIET_MARGIN = 0.9  # of the receiver's silence: it may know a shorter round trip
QUANTUM_PACKETS = 16  # what a pacer lets go at once


class Phase(StrEnum):
    """What governs the rate now."""

    STARTUP = "startup"  # nothing known: the window doubles
    BURST = "burst"  # the receiver's measurement
    LONG = "long"  # what a long transfer was delivered at
    WINDOW = "window"  # no bottleneck in sight: Reno's window, no pacing


class SentPacket(Protocol):
    """What is asked of a packet, aioquic's own or a fast path's."""

    sent_time: float | None
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """A snapshot. `share` is what losses left of the rate."""

    phase: Phase
    pacing_rate: BytesPerSecond | None
    congestion_window: Bytes
    bytes_in_flight: Bytes
    share: float
    cuts: int


class RateController(QuicCongestionControl):
    """One connection's. aioquic calls the `on_…` methods; a fast path may use the batched ones instead.

    A pacer reads `pacing_rate` (bytes/s, None for no pacing) and, when nothing is in flight or nothing was
    sent for a while (`is_quiet`), may send `restart_burst` bytes at once: those are what the receiver times.
    """

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.restart_burst = HEAD_PACKETS * max_datagram_size
        self.congestion_window = self.restart_burst
        self.pacing_rate: float | None = None  # the first flight is one burst: it measures the path
        self.link = LinkMeter()
        self.phase = Phase.STARTUP
        self._datagram_size = max_datagram_size
        self._meter = DeliveryMeter()
        self._loss = LossWatch()
        self._share = 1.0
        self._cuts = 0
        self._transfer = Transfer()
        self._busy_bytes = 0
        self._last_sent = 0.0
        self._was_full = False

    # What the connection tells us.

    def remember(self, rate: BytesPerSecond | None, min_rtt: Seconds | None, now: float) -> None:
        """Before the first packet: start from what an earlier connection knew."""
        self.link.remember(rate, min_rtt, now)
        if rate is not None and min_rtt is not None:
            self._follow_link()
            self._update()

    def on_report(self, report: RateReport, now: float) -> None:
        """The receiver timed the head of a burst of ours."""
        before = self.link.rate
        if self.link.on_report(report, now):
            after = self.link.rate
            if before is not None and after is not None and after < before:
                self._share = min(1.0, self._share * before / after)  # cuts were made to the rate of before
                self._loss.cut_at = now  # and losses of what was sent at it are answered
            self._follow_link()
            self._update()

    def is_quiet(self, now: float) -> bool:
        """Whether nothing was sent for so long that the receiver will take what follows for a burst.

        Messages that follow one another within a round trip are bursts too, though the last one is not
        acknowledged yet; paced, they would be timed at their own pace. A long transfer that waits for its
        window has not paused.
        """
        if self.phase is Phase.LONG or (self._was_full and self.phase is not Phase.STARTUP):
            return False
        return now - self._last_sent >= QUIET_MARGIN * quiet_before_burst(self.link.min_rtt)

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        self._sent(packet.sent_time or 0.0, packet.sent_bytes)

    def on_sent_batch(self, packets: Sequence[SentPacket], now: float, size: int) -> None:
        """Packets that went out together, all with `sent_time` now, `size` bytes in all."""
        self._sent(now, size)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self._acked(now, packet.sent_time or 0.0, packet.sent_bytes, 1)

    def on_ack_batch(self, packets: Sequence[SentPacket], now: float, recovery: object = None) -> None:
        """Newly acknowledged packets, ascending; in place of `on_packet_acked` for each of them."""
        size = sum(packet.sent_bytes for packet in packets)
        self._acked(now, packets[-1].sent_time or 0.0, size, len(packets))

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        rtt = max(rtt, 1e-5)  # a clock's grain
        self.link.on_rtt(Seconds(rtt), now)
        self._transfer.on_rtt(rtt)
        if self.phase is Phase.LONG:
            self._transfer.advance(now, self.bytes_in_flight, self.link.min_rtt)
        self._update()

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        lost = unanswered = 0
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            lost += 1
            unanswered += (packet.sent_time or 0.0) > self._loss.cut_at
        self.link.on_packets(0, lost)
        if self.phase is Phase.WINDOW:
            if unanswered:
                self._loss.cut_at = now
                self._cut(0.7)  # cubic's
        else:
            self._judge_losses(now, 0, unanswered)

    def on_persistent_congestion(self) -> None:
        self._cut(0.5)

    def statistics(self) -> ControllerStatistics:
        return ControllerStatistics(
            phase=self.phase,
            pacing_rate=None if self.pacing_rate is None else BytesPerSecond(self.pacing_rate),
            congestion_window=Bytes(self.congestion_window),
            bytes_in_flight=Bytes(self.bytes_in_flight),
            share=self._share,
            cuts=self._cuts,
        )

    # Sending and acknowledgements.

    def _sent(self, now: float, size: int) -> None:
        if self.bytes_in_flight <= 0 or self.is_quiet(now):
            self._begin_busy_period(now)
        elif not self._was_full and now - self._last_sent > self._longest_pause():
            self._meter.app_limited(self.bytes_in_flight)
        self._meter.sent(now, self.bytes_in_flight)
        self.bytes_in_flight += size
        self._busy_bytes += size
        self._last_sent = now
        self._was_full = self.bytes_in_flight + self._datagram_size > self.congestion_window

    def _begin_busy_period(self, now: float) -> None:
        self._busy_bytes = 0
        if self.phase is Phase.LONG:
            self._follow_link()
        self._update()

    def _longest_pause(self) -> float:
        """Between two packets of a sender that always has something to send."""
        if not self.pacing_rate:
            return SLACK
        return max(SLACK, 2 * QUANTUM_PACKETS * self._datagram_size / self.pacing_rate)

    def _acked(self, now: float, sent_time: float, size: int, packets: int) -> None:
        self.bytes_in_flight -= size
        self.link.on_packets(packets, 0)
        self._judge_losses(now, packets, 0)
        sample = self._meter.acked(now, sent_time, size)
        if self.phase in (Phase.STARTUP, Phase.WINDOW):
            self._grow(size)
        if sample is not None and self._transfer.take(sample, self.link.min_rtt):
            self._end_round(now)
        if self.phase is Phase.BURST and self._busy_bytes > max(LONG_TRANSFER, 2 * self._bdp()):
            self._begin_long(now)
        self._update()

    def _grow(self, size: int) -> None:
        """`size` bytes were acknowledged: a window that is used becomes larger."""
        if self.bytes_in_flight + size <= self.congestion_window / 2:
            return
        if self.ssthresh is None or self.congestion_window < self.ssthresh:
            self.congestion_window += size
        else:
            self.congestion_window += max(1, self._datagram_size * size // self.congestion_window)
        self.congestion_window = min(self.congestion_window, MOST_IN_FLIGHT)

    def _end_round(self, now: float) -> None:
        if self.phase is Phase.STARTUP and self._busy_bytes > LONG_TRANSFER:
            self._transfer.watch_growth()
            if self._transfer.is_full:
                self._leave_startup(now)
        elif self.phase is Phase.LONG:
            self._transfer.steer(now, self.link.min_rtt)
            self.link.on_delivery(BytesPerSecond(self._transfer.rate), now)

    # Phases.

    def _leave_startup(self, now: float) -> None:
        """Acknowledgements or losses say that the pipe is full."""
        if self.link.min_rtt < LAN_RTT:
            self.phase = Phase.WINDOW
        else:
            self._begin_long(now)

    def _begin_long(self, now: float) -> None:
        is_measured = self.phase is Phase.BURST
        rate = self._believed() if is_measured else None
        self._transfer.begin(now, rate, is_rough=is_measured and self.link.clarity < UNCLEAR)
        self.phase = Phase.LONG

    def _follow_link(self) -> None:
        """Start the next burst from the receiver's measurement, if there is one."""
        rate = self.link.rate
        if rate is None:
            return  # a long transfer's own figure goes on
        if self.phase is Phase.LONG and self.bytes_in_flight > 0:
            return  # acknowledgements know better by now
        if rate < NO_BOTTLENECK and self.link.clarity >= UNCLEAR:
            self.phase = Phase.BURST
        elif rate >= NO_BOTTLENECK or not self._is_under_way():
            self.phase = self._without_bottleneck()

    def _is_under_way(self) -> bool:
        """Whether a transfer that knows a rate goes on: an unclear report does not throw it back."""
        return self.phase is Phase.LONG or (self.phase is Phase.BURST and self.bytes_in_flight > 0)

    def _without_bottleneck(self) -> Phase:
        return Phase.WINDOW if self.link.min_rtt < LAN_RTT else Phase.STARTUP

    # Losses.

    def _judge_losses(self, now: float, acked: int, lost: int) -> None:
        verdict = self._loss.judge(now, acked, lost, self.link.min_rtt, self.link.has_queue)
        if verdict is None:
            return
        if verdict >= 1:
            self._share = min(1.0, self._share * RECOVERY)
            return
        if self.phase is Phase.STARTUP:
            self._leave_startup(now)
        self._cut(verdict)

    def _cut(self, factor: float) -> None:
        self._cuts += 1
        if self.phase is not Phase.LONG:
            self._share = max(LEAST_SHARE, self._share * factor)
        self._transfer.cut(factor, LEAST_SHARE * (self.link.rate or 0.0))
        if self.phase in (Phase.STARTUP, Phase.WINDOW):
            self.congestion_window = max(int(self.congestion_window * factor), self.restart_burst)
            self.ssthresh = self.congestion_window
        self._update()

    # What follows for the pacer.

    def _believed(self) -> float:
        """Bytes/s at which to send."""
        if self.phase is Phase.LONG:
            return self._transfer.rate
        return (self.link.rate or 0.0) * self._share

    def _gain(self) -> float:
        if self.phase is Phase.BURST:
            return BURST_GAIN + (SEARCH_GAIN - BURST_GAIN) * (1 - self.link.clarity)
        return self._transfer.gain

    def _bdp(self) -> float:
        min_rtt = self.link.min_rtt
        return self._believed() * min_rtt if math.isfinite(min_rtt) else math.inf

    def _update(self) -> None:
        min_rtt = self.link.min_rtt
        if not math.isfinite(min_rtt):
            return
        if self.phase is Phase.WINDOW or (self.phase is Phase.STARTUP and min_rtt < LAN_RTT):
            self.pacing_rate = None
        elif self.phase is Phase.STARTUP:
            self.pacing_rate = SEARCH_GAIN * self.congestion_window / min_rtt
        else:
            rate = self._believed()
            gain = self._gain()
            least = LEAST_PACKETS_IN_FLIGHT * self._datagram_size
            self.pacing_rate = max(gain * rate, least / max(min_rtt, LAN_RTT))
            window = int(rate * (IN_FLIGHT * min_rtt + SLACK))
            self.congestion_window = min(max(window, least), MOST_IN_FLIGHT)


def register() -> None:
    """Make `QuicConfiguration(congestion_control_algorithm=RATE_CONTROL)` mean this controller."""
    register_congestion_control(RATE_CONTROL, RateController)
