"""What is known of one directed link, and how it was learnt: reports of bursts, acknowledgements, losses."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from bbquic.transport.delivery import RecentMin
from bbquic.transport.report import RateReport
from bbquic.units import BytesPerSecond, Seconds

CLEAR_SPREAD = 0.1  # of a report: below it, its figure is good to a percent or two
CLEAR_REPORTS = 3  # the middle one counts: one odd burst changes nothing, a new rate holds from the second on
LEAST_EVIDENCE = 0.4  # of a clear report: less may be jitter that happened to look like a rate
AGREEING = 0.05  # between reports that are unclear in themselves: jitter does not repeat itself that well
MOST_REPORTS = 12  # where jitter makes each of them weigh less
MIN_RTT_WINDOW = Seconds(10.0)  # a least round trip is believed for 10 to 20 s: routes change, others queue
QUEUE = 1.2  # times the least round trip: our own pacing queues less than that
LOSS_DECAY = 0.5 ** (1 / 4096)  # a packet: losses of the last few thousand packets count


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """One directed link. None is "not known yet"; `loss` is a share of the packets sent; `age` is how old
    the rate is. `is_lower_bound`: no burst was timed, the link is at least this fast."""

    rate: BytesPerSecond | None
    is_lower_bound: bool
    min_rtt: Seconds | None
    rtt_variation: Seconds | None
    loss: float | None
    reports: int
    rtt_samples: int
    packets: int
    age: Seconds | None


class LinkMeter:
    """Gathers what the traffic of one connection shows of its link. Time is an argument."""

    def __init__(self) -> None:
        self._reports: deque[RateReport] = deque(maxlen=MOST_REPORTS)
        self._last_burst = 0
        self._report_count = 0
        self._rate: float | None = None
        self.clarity = 1.0  # 0 to 1: how far the reports behind the rate agree within themselves
        self._rate_at: float | None = None
        self._delivered: tuple[float, float] | None = None  # greatest rate and when
        self._min_rtt = RecentMin(MIN_RTT_WINDOW)
        self._rtt = self._variation = 0.0
        self._rtt_samples = 0
        self._packets = 0
        self._sent_weight = self._lost_weight = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes/s by the last reports, or what was remembered until there is one; None without either."""
        return self._rate

    @property
    def min_rtt(self) -> float:
        """Infinite before the first sample."""
        return self._min_rtt.value

    @property
    def has_queue(self) -> bool:
        """Whether round trips have been long for a while, beyond what a burst of ours queues by itself."""
        return self._rtt > QUEUE * self.min_rtt + 0.002

    def remember(self, rate: BytesPerSecond | None, min_rtt: Seconds | None, now: float) -> None:
        """Start from an earlier connection's figures; the first measurement replaces them."""
        self._rate = rate
        if min_rtt is not None:
            self._min_rtt.add(now, min_rtt)

    def on_report(self, report: RateReport, now: float) -> bool:
        """Take a burst's report; False for one that is not newer than the last."""
        if report.burst <= self._last_burst:
            return False
        self._last_burst = report.burst
        self._reports.append(report)
        self._report_count += 1
        self._rate_at = now  # even one that changes nothing confirms
        self._weigh()
        return True

    def on_delivery(self, rate: BytesPerSecond, now: float) -> None:
        """A transfer was carried at this rate for some round trips."""
        if self._delivered is None or rate > self._delivered[0]:
            self._delivered = (rate, now)

    def on_rtt(self, rtt: Seconds, now: float) -> None:
        self._min_rtt.add(now, rtt)
        self._rtt_samples += 1
        if self._rtt_samples == 1:
            self._rtt, self._variation = rtt, rtt / 2
            return
        self._variation += (abs(rtt - self._rtt) - self._variation) / 4  # RFC 9002's weights
        self._rtt += (rtt - self._rtt) / 8

    def on_packets(self, acked: int, lost: int) -> None:
        """Packets whose fate became known."""
        self._packets += acked + lost
        fade = LOSS_DECAY ** (acked + lost)
        self._sent_weight = self._sent_weight * fade + acked + lost
        self._lost_weight = self._lost_weight * fade + lost

    def _weigh(self) -> None:
        """Believe the median of the latest reports, as many of them as make up `CLEAR_REPORTS` clear ones."""
        weighted: list[tuple[float, float]] = []
        total = 0.0
        for report in reversed(self._reports):
            weight = min(1.0, CLEAR_SPREAD * 1000 / max(report.spread, 1))
            weighted.append((report.rate, weight))
            total += weight
            if total >= CLEAR_REPORTS:
                break
        if total >= LEAST_EVIDENCE:
            self._rate = weighted_median(weighted)
            self.clarity = max(total / len(weighted), self._agreement(self._rate))

    def _agreement(self, rate: float) -> float:
        """0.5 where two of the last three reports say this rate, 1 where all do; else 0."""
        last = list(self._reports)[-CLEAR_REPORTS:]
        agreeing = sum(abs(report.rate / rate - 1) <= AGREEING for report in last)
        return max(0, agreeing - 1) / (CLEAR_REPORTS - 1)

    def statistics(self, now: float) -> LinkEstimate:
        rate, at = self.rate, self._rate_at
        is_lower_bound = rate is None
        if rate is None and self._delivered is not None:
            rate, at = self._delivered
        has_rtt = math.isfinite(self.min_rtt)
        return LinkEstimate(
            rate=None if rate is None else BytesPerSecond(rate),
            is_lower_bound=is_lower_bound and rate is not None,
            min_rtt=Seconds(self.min_rtt) if has_rtt else None,
            rtt_variation=Seconds(self._variation) if self._rtt_samples else None,
            loss=self._lost_weight / self._sent_weight if self._sent_weight else None,
            reports=self._report_count,
            rtt_samples=self._rtt_samples,
            packets=self._packets,
            age=None if at is None else Seconds(now - at),
        )


def weighted_median(values: list[tuple[float, float]]) -> float:
    """The value up to which half the weight lies, from (value, weight) pairs."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]
