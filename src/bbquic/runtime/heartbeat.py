"""One node's PINGs and PONGs: what it is at, its clock, and its stage's work lately. Time is an argument."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from bbquic.runtime.clocks import ClockEstimate, ClockMeter
from bbquic.runtime.protocol import PingHeader, PongHeader
from bbquic.runtime.timing import Parts, StageReport
from bbquic.units import Bytes, Seconds

INTERVAL = Seconds(1.0)  # between PINGs: 60 bytes each way, and a drift of 5e-5 is found within a minute
REPORT_WINDOW = Seconds(10.0)  # "lately", of a stage that is watched from outside
_FIRST = 1 << 32  # PINGs sent while a node loads count from 1; their late answers are none of these
_MOST_UNANSWERED = 64  # PINGs whose moment is remembered


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage did between two of its reports, by its own clock."""

    elapsed: Seconds
    steps: int
    parts: Parts  # sums, seconds
    to_wire: Seconds
    raw: Bytes
    sent: Bytes

    @property
    def split(self) -> Parts | None:
        """Of an average step; None without one."""
        return Parts(*(Seconds(value / self.steps) for value in self.parts)) if self.steps else None

    @property
    def busy(self) -> float:
        """Share of the time spent computing."""
        return self.parts.compute / self.elapsed


def work_between(before: StageReport, after: StageReport, elapsed: Seconds) -> StageWork | None:
    """None where the two are not of one stage's life, or no time passed."""
    one_life = (before.job, before.first, before.stop) == (after.job, after.first, after.stop)
    if not one_life or after.steps < before.steps or elapsed <= 0:
        return None
    parts = (new - old for new, old in zip(after.parts, before.parts, strict=True))
    return StageWork(
        elapsed,
        after.steps - before.steps,
        Parts(*(Seconds(max(0.0, value)) for value in parts)),
        Seconds(max(0.0, after.to_wire - before.to_wire)),
        Bytes(max(0, after.raw - before.raw)),
        Bytes(max(0, after.sent - before.sent)),
    )


class Pulse:
    """What is known of one node by asking it again and again."""

    def __init__(self) -> None:
        self.clock = ClockMeter()
        self.rtt: Seconds | None = None  # of the last exchange, the node's own time taken out
        self.heard: Seconds | None = None  # when the last PONG came
        self.last: PongHeader | None = None
        self._number = _FIRST
        self._asked: OrderedDict[int, Seconds] = OrderedDict()
        self._reports: deque[tuple[float, StageReport]] = deque()  # by the node's clock

    def ping(self, now: Seconds) -> PingHeader:
        """The next question, which leaves at `now`."""
        self._number += 1
        self._asked[self._number] = now
        if len(self._asked) > _MOST_UNANSWERED:
            self._asked.popitem(last=False)
        return PingHeader(self._number)

    def take(self, pong: PongHeader, now: Seconds) -> None:
        """An answer that came at `now`. One that was not asked for says what the node is at, and no more."""
        self.last, self.heard = pong, now
        sent = self._asked.pop(pong.number, None)
        received, replied = Seconds(pong.received), Seconds(pong.replied)
        if sent is not None and self.clock.add(sent, received, replied, now):
            self.rtt = Seconds(max(0.0, (now - sent) - (replied - received)))
        self._keep(pong.replied, pong.stage)

    def estimate(self, now: Seconds) -> ClockEstimate | None:
        return self.clock.estimate(now)

    @property
    def report(self) -> StageReport | None:
        """The stage's last word; None while the node has none."""
        return self.last.stage if self.last is not None else None

    @property
    def work(self) -> StageWork | None:
        """The stage's work lately; None before its second report."""
        if len(self._reports) < 2:
            return None
        (began, before), (ended, after) = self._reports[0], self._reports[-1]
        return work_between(before, after, Seconds(ended - began))

    def _keep(self, at: float, report: StageReport | None) -> None:
        reports = self._reports
        if report is None:
            reports.clear()
            return
        if reports and (at <= reports[-1][0] or work_between(reports[-1][1], report, Seconds(1.0)) is None):
            reports.clear()
        reports.append((at, report))
        while len(reports) > 2 and reports[0][0] < at - REPORT_WINDOW:
            reports.popleft()
