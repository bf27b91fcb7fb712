"""What a run tells about itself: frozen snapshots, which the live view and the bench read and nothing else.

Every figure that is not known yet is None, never 0.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from bbquic.runtime.accounting import Loop
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.timing import Parts
from bbquic.units import Bytes, BytesPerSecond, Seconds

Value = TypeVar("Value")

_NO_TIME = Seconds(0.0)
_BUCKETS = 50  # a window's resolution, and what bounds a meter's memory
_STEP = 1.05  # from one bucket of a histogram to the next: its figures are good to 2.5 %
_LEAST = 1e-4  # seconds; what is shorter counts as that


@dataclass(frozen=True, slots=True)
class HopStatistics:
    """One directed link of the loop: coordinator to first stage, stage to stage, last stage back."""

    source: str
    target: str
    blocks: str | None  # of the target's stage, such as "10-19"; None where the target is the coordinator
    rtt: Seconds | None
    bytes_sent: Bytes
    messages: int
    bytes_per_second: BytesPerSecond | None  # lately
    link_rate: BytesPerSecond | None = None  # what the link carries, as its sender believes
    rate_is_lower_bound: bool = False  # it never was seen full
    loss: float | None = None  # share of the packets
    raw: Bytes | None = None  # bytes before compression, of those sent
    to_wire: Seconds | None = None  # T_cpu→nic of a message lately
    flight: Seconds | None = None  # T_nic→nic of a message lately, never below 0
    uncertainty: Seconds | None = None  # of the flight
    busy: float | None = None  # share of the link's rate that is used, lately
    codec: str | None = None  # how its messages are compressed now
    why: str | None = None  # the reason, with its figures

    @property
    def ratio(self) -> float | None:
        """Bytes before compression for each byte sent."""
        return self.raw / self.bytes_sent if self.raw and self.bytes_sent else None


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage, lately."""

    node: str
    first_block: int
    last_block: int  # inclusive
    compute: Seconds | None  # per step
    queue: Seconds | None  # that a micro-batch waited before its compute
    busy: float | None  # share of the time spent computing, 0 to 1
    split: Parts | None = None  # of an average step
    queued: tuple[int, int, int, int] | None = None  # packs before: decode and copy, compute, copy, send

    @property
    def bubble(self) -> float | None:
        """Share of the time in which the device had nothing to compute."""
        return None if self.busy is None else max(0.0, 1 - self.busy)


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """One node as another machine sees it. `trouble` says why it does not answer; then the rest is None."""

    name: str
    address: str
    trouble: str | None = None
    device: str | None = None
    activity: str | None = None
    since: Seconds | None = None  # how long it is at that
    job: str | None = None
    rtt: Seconds | None = None
    offset: Seconds | None = None  # its clock minus ours
    uncertainty: Seconds | None = None
    drift: float | None = None  # of its clock against ours, s/s
    steps_per_second: float | None = None
    stage: StageStatistics | None = None
    hop: HopStatistics | None = None  # to the stage after it


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """The nodes of a peers.toml, and what limits the jobs that run on them, each by its name."""

    nodes: tuple[NodeStatistics, ...]
    limits: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Time to first token over the answers so far: from a prompt's first row leaving to its first token."""

    count: int
    median: Seconds
    p95: Seconds


@dataclass(frozen=True, slots=True)
class JobStatistics:
    """A job so far. `done`, `failed` and the tokens are this run's; `skipped` had their record before."""

    done: int = 0  # lines answered
    failed: int = 0  # lines with an error record
    skipped: int = 0
    total: int | None = None  # lines of the prompts file; None until they are counted
    prompt_tokens: int = 0
    shared_tokens: int = 0  # of these: what prompts begin with in common, read once and copied
    generated_tokens: int = 0
    tokens_per_second: float | None = None  # prompt, but for shared, and generated, lately
    decode_tokens_per_second: float | None = None  # generated only, lately
    in_flight_sequences: int = 0
    elapsed: Seconds = _NO_TIME
    eta: Seconds | None = None
    waiting_for: str | None = None  # owner and what, while something is slow
    failures: tuple[tuple[str, int], ...] = ()  # error codes of `failed`, each with its count
    hops: tuple[HopStatistics, ...] = ()
    stages: tuple[StageStatistics, ...] = ()
    loop: Loop | None = None  # the average step, lately
    first_tokens: FirstTokens | None = None
    drafts: Drafts | None = None  # lately; None where nothing is guessed
    limit: str | None = None  # what sets the pace just now, with figures
    decisions: tuple[str, ...] = ()  # of the controller, each with its reason; the newest last

    @property
    def settled(self) -> int:
        """Lines that have their record, whichever run wrote it."""
        return self.done + self.failed + self.skipped

    @property
    def finished(self) -> bool:
        return self.total is not None and self.settled >= self.total


class RateMeter:
    """Counts a second over the last `window`. Takes the time as an argument, and it never goes back."""

    def __init__(self, window: Seconds, *, start: Seconds) -> None:
        if window <= 0:
            raise ValueError(f"a window is above 0, not {window}")
        self._window = window
        self._start = start
        self._counts: deque[tuple[float, float]] = deque()  # (time of a bucket, its count)

    def add(self, now: Seconds, count: float) -> None:
        bucket = self._window / _BUCKETS
        if self._counts and now - self._counts[-1][0] < bucket:
            time, before = self._counts[-1]
            self._counts[-1] = (time, before + count)
        else:
            self._counts.append((now, count))
        self._drop_old(now)

    def rate(self, now: Seconds) -> float | None:
        """None until some time has passed since the start."""
        elapsed = min(self._window, now - self._start)
        if elapsed <= 0:
            return None
        self._drop_old(now)
        return sum(count for _, count in self._counts) / elapsed

    def _drop_old(self, now: Seconds) -> None:
        while self._counts and self._counts[0][0] <= now - self._window:
            self._counts.popleft()


def remaining_time(settled_now: int, left: int, elapsed: Seconds) -> Seconds | None:
    """The time that `left` lines take at the pace of the `settled_now` so far; None before the first."""
    if left <= 0:
        return _NO_TIME
    return Seconds(elapsed / settled_now * left) if settled_now > 0 and elapsed > 0 else None


class Quantiles:
    """A histogram of durations with buckets that grow by 5 %: small, whatever it counts."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0

    def add(self, duration: float) -> None:
        place = math.floor(math.log(min(max(duration, _LEAST), 1e9) / _LEAST) / math.log(_STEP))
        self._counts[place] += 1
        self.count += 1

    def at(self, share: float) -> Seconds | None:
        """The duration that a `share` of all do not exceed, to 2.5 %; None without any."""
        wanted = max(1, math.ceil(share * self.count))
        for place in sorted(self._counts):
            wanted -= self._counts[place]
            if wanted <= 0:
                return Seconds(_LEAST * _STEP ** (place + 0.5))
        return None

    def first_tokens(self) -> FirstTokens | None:
        median, p95 = self.at(0.5), self.at(0.95)
        return None if median is None or p95 is None else FirstTokens(self.count, median, p95)


class Window(Generic[Value]):
    """Cumulative figures of the last while: differences to the present are what happened lately."""

    def __init__(self, length: Seconds, now: Seconds, value: Value) -> None:
        self._length = length
        self._kept: deque[tuple[Seconds, Value]] = deque([(now, value)])

    def add(self, now: Seconds, value: Value) -> None:
        if now - self._kept[-1][0] >= self._length / _BUCKETS:
            self._kept.append((now, value))
        while len(self._kept) > 1 and self._kept[1][0] <= now - self._length:
            self._kept.popleft()

    @property
    def before(self) -> tuple[Seconds, Value]:
        """The moment at which the window begins, and the figures then."""
        return self._kept[0]
