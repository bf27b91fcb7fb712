"""What a run tells about itself: frozen snapshots, which the live view and the bench read and nothing else.

Every figure that is not known yet is None, never 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bbquic.units import Bytes, BytesPerSecond, Seconds

_NO_TIME = Seconds(0.0)
_BUCKETS = 50  # a window's resolution, and what bounds a meter's memory


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


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage, lately."""

    node: str
    first_block: int
    last_block: int  # inclusive
    compute: Seconds | None  # per step
    queue: Seconds | None  # that a micro-batch waited before its compute
    busy: float | None  # share of the time spent computing, 0 to 1


@dataclass(frozen=True, slots=True)
class JobStatistics:
    """A job so far. `done`, `failed` and the tokens are this run's; `skipped` had their record before."""

    done: int = 0  # lines answered
    failed: int = 0  # lines with an error record
    skipped: int = 0
    total: int | None = None  # lines of the prompts file; None until they are counted
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_second: float | None = None  # prompt and generated, lately
    decode_tokens_per_second: float | None = None  # generated only, lately
    in_flight_sequences: int = 0
    elapsed: Seconds = _NO_TIME
    eta: Seconds | None = None
    waiting_for: str | None = None  # owner and what, while something is slow
    failures: tuple[tuple[str, int], ...] = ()  # error codes of `failed`, each with its count
    hops: tuple[HopStatistics, ...] = ()
    stages: tuple[StageStatistics, ...] = ()

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
