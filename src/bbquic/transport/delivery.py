"""Delivery rate from acknowledgements, as in draft-cheng-iccrg-delivery-rate-estimation and BBR.

Book is kept by the time of sending, which all packets of a batch share, so that it costs the same for one
packet as for forty and asks nothing of the packet's type.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bbquic.units import BytesPerSecond, Seconds


@dataclass(slots=True)
class _Sending:
    """How things stood when a batch was sent."""

    time: float
    delivered: int
    delivered_at: float
    first_sent: float
    is_app_limited: bool


@dataclass(frozen=True, slots=True)
class DeliverySample:
    """One acknowledged batch. `is_app_limited`: the sender had nothing to send, so the path may be faster."""

    rate: BytesPerSecond
    interval: Seconds
    is_app_limited: bool
    is_round: bool


class DeliveryMeter:
    """Counts what the peer has, and how fast it got it."""

    def __init__(self) -> None:
        self.delivered = 0  # bytes acknowledged so far
        self._delivered_at = 0.0
        self._first_sent = 0.0
        self._app_limited_until = 0
        self._round_end = 0
        self._sendings: deque[_Sending] = deque()

    def sent(self, now: float, in_flight: int) -> None:
        """A packet goes out; `in_flight` are the bytes before it."""
        if in_flight <= 0:
            self._first_sent = self._delivered_at = now
            self._sendings.clear()
        if not self._sendings or self._sendings[-1].time != now:
            is_app_limited = self.delivered < self._app_limited_until
            self._sendings.append(
                _Sending(now, self.delivered, self._delivered_at, self._first_sent, is_app_limited)
            )

    def app_limited(self, in_flight: int) -> None:
        """There was nothing to send though there was room: no sample counts until this flight is through."""
        self._app_limited_until = self.delivered + max(in_flight, 1)

    def acked(self, now: float, sent_time: float, size: int) -> DeliverySample | None:
        """Packets of `size` bytes arrived, the last of them sent at `sent_time`. None without a sample."""
        self.delivered += size
        self._delivered_at = now
        sendings = self._sendings
        while sendings and sendings[0].time < sent_time:
            sendings.popleft()
        if not sendings or sendings[0].time != sent_time:
            return None  # older than one already acknowledged
        sending = sendings[0]
        self._first_sent = sent_time
        is_round = sending.delivered >= self._round_end
        if is_round:
            self._round_end = self.delivered
        interval = max(now - sending.delivered_at, sent_time - sending.first_sent)
        if interval <= 0:
            return None
        rate = BytesPerSecond((self.delivered - sending.delivered) / interval)
        return DeliverySample(rate, Seconds(interval), sending.is_app_limited, is_round)


class MaxFilter:
    """The largest value of the last `length` rounds."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._values: deque[tuple[int, float]] = deque()  # rounds ascending, values descending

    @property
    def value(self) -> float:
        """0 while empty."""
        return self._values[0][1] if self._values else 0.0

    def add(self, round_number: int, value: float) -> None:
        values = self._values
        while values and values[-1][1] <= value:
            values.pop()
        values.append((round_number, value))
        while values[0][0] <= round_number - self._length:
            values.popleft()

    def scale(self, factor: float) -> None:
        self._values = deque((number, value * factor) for number, value in self._values)

    def reset(self, round_number: int, value: float) -> None:
        self._values.clear()
        self.add(round_number, value)


class RecentMin:
    """The least value of the last one to two `window`s: two buckets, so that it costs nothing to keep."""

    def __init__(self, window: Seconds) -> None:
        self._window = window
        self._turned_at: float | None = None
        self._before = self._current = float("inf")

    @property
    def value(self) -> float:
        """Infinite while empty."""
        return min(self._before, self._current)

    def add(self, now: float, value: float) -> None:
        if self._turned_at is None:
            self._turned_at = now
        elif now - self._turned_at > self._window:
            # After a silence the old bucket is still the best there is, so one sample never ends both.
            self._before, self._current = self._current, float("inf")
            self._turned_at = now
        self._current = min(self._current, value)
