"""How far a node's clock is from ours, and how sure that is: from the four moments of PING and PONG.

As in RFC 5905 (NTP): a PING left at `sent` by our clock, came at `received` and was answered at `replied` by
the node's, the PONG came at `came`. No leg takes less than no time, so received - sent is at least the
offset (the node's clock minus ours) and replied - came at most. These two bounds are kept apart: the least
way there and the least way back need not be of one exchange. Drift is bounded likewise, by pairs of
exchanges, and carries older bounds to the present. So the true offset lies within the stated uncertainty
whatever the asymmetry and the jitter, as long as the drift is steady over the window and below `MAX_DRIFT`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from bbquic.units import Seconds

MAX_DRIFT = 5e-4  # s/s: what NTP's discipline allows itself; bare quartz stays below 1e-4
WINDOW = Seconds(600.0)  # temperature moves a quartz by less than 1e-6 in that time
BUCKETS = 20  # of the window: the best bounds of each are kept, which bounds memory and work
SLEW = 5e-3  # s/s at most that a `SteadyClock` is bent: slices of a trace are that much too long or short
CATCH_UP = Seconds(5.0)  # in which a steady clock means to be right again
KEPT_BENDS = 256  # of a steady clock: minutes, where packs are seconds old


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """A node's clock minus ours at our moment `at`; `drift` is in seconds a second."""

    at: Seconds
    offset: Seconds
    uncertainty: Seconds
    drift: float
    drift_uncertainty: float

    def offset_at(self, now: Seconds) -> Seconds:
        return Seconds(self.offset + self.drift * (now - self.at))

    def uncertainty_at(self, now: Seconds) -> Seconds:
        return Seconds(self.uncertainty + self.drift_uncertainty * abs(now - self.at))

    def ours(self, moment: Seconds) -> Seconds:
        """A moment on the node's clock, on ours."""
        return Seconds(self.at + (moment - self.at - self.offset) / (1 + self.drift))

    def theirs(self, moment: Seconds) -> Seconds:
        """A moment on our clock, on the node's."""
        return Seconds(moment + self.offset_at(moment))


class _Bound(NamedTuple):
    """At our moment `at` the offset was at most, or at least, `value`."""

    at: float
    value: float


@dataclass(slots=True)
class _Bucket:
    """The tightest bounds of a stretch of time."""

    began: float
    upper: _Bound
    lower: _Bound


class ClockMeter:
    """Estimates one node's clock from its exchanges. Time is an argument."""

    def __init__(self, window: Seconds = WINDOW) -> None:
        self._window = window
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS + 1)
        self._drift = (-MAX_DRIFT, MAX_DRIFT)

    def add(self, sent: Seconds, received: Seconds, replied: Seconds, came: Seconds) -> bool:
        """Take an exchange; False for one that cannot be: answered before it came, or held for longer
        than it was away, as when one of the machines slept."""
        away, held = came - sent, replied - received
        if held < 0 or away < 0 or held > away * (1 + MAX_DRIFT) + 1e-6:
            return False
        at = (sent + came) / 2
        slack = MAX_DRIFT * away / 2 + 1e-6  # the offset at either end of the exchange and in its middle
        new = _Bucket(at, _Bound(at, received - sent + slack), _Bound(at, replied - came - slack))
        self._keep(new)
        if not self._narrow():  # no steady drift fits: a clock was set or stood still
            self._buckets.clear()
            self._buckets.append(new)
            self._drift = (-MAX_DRIFT, MAX_DRIFT)
        return True

    def estimate(self, now: Seconds) -> ClockEstimate | None:
        """The offset at `now`; None before the first exchange."""
        if not self._buckets:
            return None
        slow, fast = self._drift
        upper = min(_carried(one.upper, now, fast, slow) for one in self._buckets)
        lower = max(_carried(one.lower, now, slow, fast) for one in self._buckets)
        return ClockEstimate(
            at=now,
            offset=Seconds((upper + lower) / 2),
            uncertainty=Seconds(max(0.0, upper - lower) / 2),
            drift=(slow + fast) / 2,
            drift_uncertainty=(fast - slow) / 2,
        )

    def _keep(self, new: _Bucket) -> None:
        while self._buckets and new.began - self._buckets[0].began > self._window:
            self._buckets.popleft()
        last = self._buckets[-1] if self._buckets else None
        if last is None or not 0 <= new.began - last.began < self._window / BUCKETS:
            self._buckets.append(new)
            return
        slow, fast = self._drift
        if new.upper.value <= _carried(last.upper, new.began, fast, slow):
            last.upper = new.upper
        if new.lower.value >= _carried(last.lower, new.began, slow, fast):
            last.lower = new.lower

    def _narrow(self) -> bool:
        """Find the drifts that all bounds allow; False where there is none."""
        slow, fast = -MAX_DRIFT, MAX_DRIFT
        for one in self._buckets:
            for other in self._buckets:
                past = other.lower.at - one.upper.at
                most = one.upper.value - other.lower.value  # that the offset can have fallen between them
                if past > 0:
                    slow = max(slow, -most / past)
                elif past < 0:
                    fast = min(fast, -most / past)
                elif most < 0:
                    return False
        self._drift = (slow, fast)
        return slow <= fast


def _carried(bound: _Bound, now: float, later: float, earlier: float) -> float:
    """A bound at another moment, by the drift that is the worst for it."""
    past = now - bound.at
    return bound.value + (later if past >= 0 else earlier) * past


class SteadyClock:
    """A node's moments on our clock, in their order: the estimate is followed by bending, never by a jump.

    A trace needs it: two slices that do not overlap on the node must not overlap on paper because the
    estimate became better between them.
    """

    def __init__(self, estimate: ClockEstimate) -> None:
        self._theirs = deque([float(estimate.theirs(estimate.at))], maxlen=KEPT_BENDS)
        self._ours = deque([float(estimate.at)], maxlen=KEPT_BENDS)
        self._slopes = deque([1 / (1 + estimate.drift)], maxlen=KEPT_BENDS)
        self._latest = self._theirs[0]  # moment that was asked for

    def ours(self, moment: Seconds) -> Seconds:
        """A moment on the node's clock, on ours; a later one is never put before an earlier one."""
        self._latest = max(self._latest, moment)
        place = max(0, bisect_right(self._theirs, moment) - 1)
        return Seconds(self._ours[place] + self._slopes[place] * (moment - self._theirs[place]))

    def follow(self, estimate: ClockEstimate) -> None:
        """Bend towards a newer estimate, behind all that was asked for so far."""
        theirs = max(self._latest, estimate.theirs(estimate.at))
        ours = self.ours(Seconds(theirs))
        wrong = (estimate.ours(Seconds(theirs)) - ours) / CATCH_UP
        self._theirs.append(theirs)
        self._ours.append(ours)
        self._slopes.append(1 / (1 + estimate.drift) + max(-SLEW, min(SLEW, wrong)))
