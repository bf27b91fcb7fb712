"""aioquic's loss recovery with cheap bookkeeping: an acknowledgement costs what it newly acknowledges.

aioquic lists every packet in flight for each ACK, and tells a stream of each packet by itself. Here the
walk ends at the largest acknowledged number, and neighbouring ranges of a stream are told as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.stream import QuicStreamSender
from aioquic.tls import Epoch

from bbquic.transport.pacer import Pacer

ACKED = QuicDeliveryState.ACKED
SHORTEST_ROUND_TRIP = 0.001  # seconds; aioquic's floor, which its loss timer counts on


class SentFrames:
    """A 1-RTT packet with one STREAM frame, or, without a sender, one DATAGRAM frame. To aioquic it is a
    QuicSentPacket; a tenth of one to make.

    `is_first` tells that nothing was in flight when it left: a burst begins with it. The three attributes
    after it belong to the congestion controller.
    """

    __slots__ = (
        "delivered",
        "delivered_time",
        "fin",
        "first_sent",
        "is_first",
        "packet_number",
        "sender",
        "sent_bytes",
        "sent_time",
        "start",
        "stop",
    )
    epoch = Epoch.ONE_RTT
    packet_type = QuicPacketType.ONE_RTT
    in_flight = is_ack_eliciting = True
    is_crypto_packet = False
    quic_logger_frames = ()

    def __init__(
        self,
        packet_number: int,
        sent_time: float,
        sent_bytes: int,
    ) -> None:
        """A DATAGRAM frame's; who writes a STREAM frame sets the rest."""
        self.packet_number = packet_number
        self.sent_time = sent_time
        self.sent_bytes = sent_bytes
        self.sender: QuicStreamSender | None = None
        self.start = self.stop = 0
        self.fin = self.is_first = False

    @property
    def delivery_handlers(self) -> tuple[tuple[Any, tuple[int, int, bool]], ...]:
        if self.sender is None:
            return ()  # DATAGRAM frames are not sent again
        return ((self.sender.on_data_delivery, (self.start, self.stop, self.fin)),)


Sent = SentFrames | QuicSentPacket


class FastRecovery(QuicPacketRecovery):
    """A controller with `on_ack_batch(packets, now, recovery)` gets the packets of an ACK at once, in the
    order they were sent; any other gets aioquic's `on_packet_acked` for each."""

    def __init__(self, *, max_datagram_size: int, **settings: Any) -> None:
        super().__init__(max_datagram_size=max_datagram_size, **settings)
        self.pacer = Pacer(self._cc, max_datagram_size)
        self._pacer = self.pacer  # type: ignore[assignment]

    def on_ack_received(
        self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace
    ) -> None:
        largest = ack_rangeset[-1].stop - 1
        space.largest_acked_packet = max(space.largest_acked_packet, largest)
        newly = _newly_acked(space, ack_rangeset)
        if not newly:
            return
        is_eliciting = self._settle(newly, space, now)
        last = newly[-1]
        if last.packet_number == largest and is_eliciting:
            assert last.sent_time is not None
            self._measure(now - last.sent_time, ack_delay, now)
        batched = getattr(self._cc, "on_ack_batch", None)
        in_flight = [packet for packet in newly if packet.in_flight]
        if batched is not None and in_flight:
            batched(in_flight, now, self)
        self.pacer.update_rate(self._cc.congestion_window, self._rtt_smoothed)
        self._detect_loss(now=now, space=space)
        if self.peer_completed_address_validation:
            self._pto_count = 0

    def on_batch_sent(self, packets: Sequence[SentFrames], space: QuicPacketSpace, now: float) -> None:
        """Take note of packets that leave now. A controller with `on_sent_batch(packets, now, bytes)` gets
        them at once, any other by aioquic's `on_packet_sent`."""
        controller = self._cc
        packets[0].is_first = controller.bytes_in_flight <= 0
        space.sent_packets.update({packet.packet_number: packet for packet in packets})  # type: ignore[misc]
        space.ack_eliciting_in_flight += len(packets)
        self._time_of_last_sent_ack_eliciting_packet = now
        batched = getattr(controller, "on_sent_batch", None)
        if batched is not None:
            batched(packets, now, sum([packet.sent_bytes for packet in packets]))
            return
        for packet in packets:
            controller.on_packet_sent(packet=packet)  # type: ignore[arg-type]

    def _settle(self, newly: list[Sent], space: QuicPacketSpace, now: float) -> bool:
        """Tell controller and streams; whether any packet asked for this acknowledgement."""
        controller = self._cc
        is_batched = hasattr(controller, "on_ack_batch")
        eliciting = 0
        sender: QuicStreamSender | None = None  # of the ranges that are being joined:
        start = stop = 0
        fin = False
        for packet in newly:
            del space.sent_packets[packet.packet_number]
            eliciting += packet.is_ack_eliciting
            if packet.in_flight and not is_batched:
                controller.on_packet_acked(packet=packet, now=now)  # type: ignore[arg-type]
            if isinstance(packet, SentFrames):
                if packet.sender is sender and packet.start == stop:
                    stop, fin = packet.stop, packet.fin
                    continue
                if sender is not None:
                    sender.on_data_delivery(ACKED, start, stop, fin)
                sender, start, stop, fin = packet.sender, packet.start, packet.stop, packet.fin
                continue
            for handler, arguments in packet.delivery_handlers:
                handler(ACKED, *arguments)
        if sender is not None:
            sender.on_data_delivery(ACKED, start, stop, fin)
        space.ack_eliciting_in_flight -= eliciting
        return eliciting > 0

    def _measure(self, round_trip: float, ack_delay: float, now: float) -> None:
        """RFC 9002, 5."""
        ack_delay = min(ack_delay, self.max_ack_delay)
        self._rtt_latest = max(round_trip, SHORTEST_ROUND_TRIP)
        self._rtt_min = min(self._rtt_min, self._rtt_latest)
        if self._rtt_latest > self._rtt_min + ack_delay:
            self._rtt_latest -= ack_delay
        if not self._rtt_initialized:
            self._rtt_first_sample_time = now
            self._rtt_initialized = True
            self._rtt_variance, self._rtt_smoothed = round_trip / 2, round_trip
        else:
            deviation = abs(self._rtt_min - self._rtt_latest)
            self._rtt_variance = 0.75 * self._rtt_variance + 0.25 * deviation
            self._rtt_smoothed = 0.875 * self._rtt_smoothed + 0.125 * self._rtt_latest
        self._cc.on_rtt_measurement(now=now, rtt=round_trip)


def _newly_acked(space: QuicPacketSpace, ranges: RangeSet) -> list[Sent]:
    """Packets in flight within the ranges, by number. Older ones in flight are few: all but the last three
    before the largest acknowledged are declared lost by then."""
    newly: list[Sent] = []
    largest = ranges[-1].stop - 1
    rest = iter(ranges)
    current = next(rest)
    for number, packet in space.sent_packets.items():
        if number > largest:
            break
        while number >= current.stop:
            current = next(rest)
        if number >= current.start:
            newly.append(packet)
    return newly
