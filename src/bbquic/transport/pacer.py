"""When bytes may leave: a token bucket filled at the rate the congestion controller asks for.

aioquic paces packet by packet, and asyncio's timers come 1-2 ms late: at 100 Mbit/s that is ten packets.
So here bytes are counted, timers aim at a quantum of a millisecond, and lateness is made up for.
"""

from __future__ import annotations

from aioquic.quic.congestion.base import QuicCongestionControl

QUANTUM = 0.001  # seconds of sending worth a wake-up; timers are no finer
CATCH_UP = 0.010  # seconds that may be made up for: a loop that shares its cores stalls for about that long
SLOW_START_GAIN, GAIN = 2.0, 1.25  # times window / round trip, where no rate is named (RFC 9002, 7.7)
SHORTEST_ROUND_TRIP = 1e-4  # seconds; below it the clock's grain, not the path, would set the rate


class Pacer:
    """Has the methods by which aioquic paces (`update_rate`, `next_send_time`, `update_after_send`), and
    `allowance`, `consume` and `next_time`, by which the packetiser does.

    A controller may have `pacing_rate` (bytes/s, None for no opinion), `restart_burst` (bytes that go unpaced
    when nothing is in flight) and `is_quiet(now)` (whether they do so although something is).
    """

    def __init__(self, controller: QuicCongestionControl, datagram_size: int) -> None:
        self.rate: float | None = None  # bytes/s; None before the first round trip is known: nothing waits
        self.is_open = False  # set while packets are made that nothing may hold back
        self._controller = controller
        self._datagram_size = datagram_size
        self._tokens = 0.0
        self._filled_at = 0.0

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        controller = self._controller
        rate: float | None = getattr(controller, "pacing_rate", None)
        if rate is None:
            threshold = controller.ssthresh
            gain = SLOW_START_GAIN if threshold is None or congestion_window < threshold else GAIN
            rate = gain * congestion_window / max(smoothed_rtt, SHORTEST_ROUND_TRIP)
        self.rate = rate

    @property
    def quantum(self) -> int:
        """Bytes that leave together: a millisecond's, and never below two datagrams."""
        return max(2 * self._datagram_size, int((self.rate or 0.0) * QUANTUM))

    def allowance(self, now: float) -> int:
        """Bytes that may leave now."""
        named: float | None = getattr(self._controller, "pacing_rate", None)
        if named is not None:
            self.rate = named  # it may know one before the first round trip, and change it between ACKs
        if self.rate is None:
            return 1 << 30
        capacity = max(self.quantum, int(self.rate * CATCH_UP))
        self._tokens = min(capacity, self._tokens + max(0.0, now - self._filled_at) * self.rate)
        self._filled_at = now
        if self._controller.bytes_in_flight <= 0 or self._is_quiet(now):
            self._tokens = max(self._tokens, getattr(self._controller, "restart_burst", 0))
        return int(self._tokens)

    def _is_quiet(self, now: float) -> bool:
        is_quiet = getattr(self._controller, "is_quiet", None)
        return is_quiet is not None and bool(is_quiet(now))

    def consume(self, size: int) -> None:
        if self.rate is not None:
            self._tokens -= size

    def next_time(self, now: float) -> float:
        """When a quantum may leave."""
        if not self.rate:
            return now
        return now + max(0.0, self.quantum - self._tokens) / self.rate

    def next_send_time(self, now: float) -> float | None:
        """aioquic's question: None for at once, else when to ask again."""
        if self.is_open or self.allowance(now) >= self._datagram_size:
            return None
        return self.next_time(now)

    def update_after_send(self, now: float) -> None:
        """aioquic's notice that a datagram left."""
        if not self.is_open:
            self.consume(self._datagram_size)
