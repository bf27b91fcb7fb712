"""How a long transfer steers by what is delivered: after BBR (draft-cardwell-iccrg-bbr-congestion-control).

The rate is the most that was delivered in one of the last rounds. One round trip in eight sends faster, to
see whether there is more, and the next sends slower, so that what the look queued drains.
"""

from __future__ import annotations

import math

from bbquic.transport.delivery import DeliverySample, MaxFilter
from bbquic.units import Seconds

CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # one RTT each: look for more, drain, cruise
LOOK, DRAIN, CRUISE = 0, 1, 2  # steps of it
SEARCH_GAIN = 2.0  # of a rate known badly: slow start's own pace
QUIET_CYCLES = 2  # without a look for more after a cut: whoever else lost packets gets time to grow
LONGEST_DRAIN = 4  # RTT: a queue that is still there then is not ours alone
MEMORY_ROUNDS = 10  # a cycle and two rounds, so that one look's answer outlives the next look
FULL_GROWTH, FULL_ROUNDS = 1.25, 3  # a rate that grew by less than a quarter in three rounds is the path's
STANDING = 1.5  # of the least RTT, and SLACK: a queue that our own looking does not explain
SLACK = Seconds(0.008)  # of sending: how long a stalled event loop or a delayed acknowledgement may take
GROWTH = 1.1  # a round: a look was answered in full, so the path has more
COLLAPSE = 0.75  # of the rate believed: with a standing queue, the path became slower
STILL_ARRIVING = 0.9  # of what arrives: no single cut goes lower


class Transfer:
    """The delivery rates of one connection, and the cycle of a transfer that lasts."""

    def __init__(self) -> None:
        self._fastest = MaxFilter(MEMORY_ROUNDS)
        self._round = 0
        self._round_rate = self._last_round_rate = 0.0
        self._round_rtt = math.inf
        self._last_fastest = 0.0
        self._flat_rounds = 0
        self._step, self._step_at = LOOK, 0.0
        self._ceiling = math.inf
        self._quiet_cycles = 0
        self._is_searching = False

    @property
    def rate(self) -> float:
        """Bytes/s; 0 before the first sample."""
        return self._fastest.value

    @property
    def gain(self) -> float:
        """On the rate, for the pacing."""
        return SEARCH_GAIN if self._is_searching else CYCLE[self._step]

    @property
    def is_full(self) -> bool:
        """Whether the rate stopped growing though more and more was sent."""
        return self._flat_rounds >= FULL_ROUNDS

    def begin(self, now: float, rate: float | None, *, is_rough: bool) -> None:
        """A transfer became a long one, at `rate` where that was measured, else at what was delivered.

        What came before left a queue, so it drains first. From a rough rate it searches upward first.
        """
        if rate is not None:
            self._fastest.reset(self._round, rate)
        self._is_searching = is_rough
        self._last_fastest, self._flat_rounds = math.inf, 0
        self._ceiling, self._quiet_cycles = math.inf, 0
        self._step, self._step_at = DRAIN, now

    def on_rtt(self, rtt: float) -> None:
        self._round_rtt = min(self._round_rtt, rtt)

    def take(self, sample: DeliverySample, min_rtt: float) -> bool:
        """Take a delivery rate. Whether it ends a round in which there was always something to send."""
        if sample.interval >= min_rtt:  # shorter: acknowledgements that queued up
            rate = min(sample.rate, self._ceiling)
            if not sample.is_app_limited or rate > self._fastest.value:
                self._fastest.add(self._round, rate)
            self._round_rate = max(self._round_rate, sample.rate)
        if not sample.is_round:
            return False
        self._last_round_rate, self._round_rate = self._round_rate, 0.0
        if sample.is_app_limited or not self._last_round_rate:
            self._round_rtt = math.inf
            return False
        self._round += 1
        return True

    def watch_growth(self) -> None:
        """End a round of slow start: count those that brought nothing."""
        self._round_rtt = math.inf
        if self._fastest.value >= FULL_GROWTH * self._last_fastest:
            self._last_fastest, self._flat_rounds = self._fastest.value, 0
        else:
            self._flat_rounds += 1

    def steer(self, now: float, min_rtt: float) -> None:
        """End a round of a long transfer: leave the cycle where it brought far less, or clearly more."""
        has_queue = self._round_rtt > STANDING * min_rtt + SLACK
        self._round_rtt = math.inf
        if has_queue and self._last_round_rate < COLLAPSE * self._fastest.value:
            self._fastest.reset(self._round, self._last_round_rate)
            self._step, self._step_at = DRAIN, now
        elif not has_queue and self._fastest.value > GROWTH * self._last_fastest:
            self._step, self._step_at = LOOK, now
            self._flat_rounds = 0
        else:
            self._flat_rounds += 1
            if has_queue or self.is_full:
                self._is_searching = False
        self._last_fastest = self._fastest.value

    def advance(self, now: float, in_flight: int, min_rtt: float) -> None:
        """Go to the cycle's next step when this one's time is over."""
        if now - self._step_at < min_rtt:
            return
        is_drained = in_flight <= self.rate * min_rtt
        if self._step == DRAIN and not is_drained and now - self._step_at < LONGEST_DRAIN * min_rtt:
            return
        self._step, self._step_at = (self._step + 1) % len(CYCLE), now
        if self._step == LOOK and self._quiet_cycles:
            self._quiet_cycles -= 1
            self._step = CRUISE
        elif self._step == LOOK:
            self._ceiling = math.inf

    def cut(self, factor: float, least: float) -> None:
        """Losses: go down to `factor` of the rate, though not below `least` nor far below what still arrives,
        as a queue that is lost whole cuts many times over."""
        arriving = STILL_ARRIVING * max(self._round_rate, self._last_round_rate)
        lowest = max(arriving, least) / max(self._fastest.value, 1.0)
        self._fastest.scale(min(1.0, max(factor, lowest)))
        self._ceiling = self._fastest.value or math.inf  # what is in flight was sent at the old rate
        self._quiet_cycles = QUIET_CYCLES
        if self._step == LOOK:
            self._step = DRAIN
