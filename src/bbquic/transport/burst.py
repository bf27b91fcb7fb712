"""The rate of a link, read off the arrival times of a burst's head.

A sender puts the first `HEAD_PACKETS` datagrams of a burst on the wire back to back, so their spacing at
the receiver is the bottleneck's serialisation time, whatever the sender's pacing or event loop did later.
Nothing here knows a clock or a socket: arrival times are the kernel's, handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from bbquic.units import Bytes, BytesPerSecond, Seconds

Arrival: TypeAlias = tuple[int, int]  # kernel arrival time in ns, bytes of UDP payload

HEAD_PACKETS = 32  # sent unpaced: 38 KB, 15 ms at 20 Mbit/s and 1.2 ms at 250, long enough to time
COMPLETE_PACKETS = 28  # of them are enough, so that four losses do not hold the estimate back
LEAST_PACKETS = 16  # of a shorter burst; fewer leave under a dozen once the first ones are skipped
SKIPPED_PACKETS = (
    4  # a train's first packets are often let through by a token bucket, or held by a sleeping NIC
)
FULL_DATAGRAM = 1000  # bytes; smaller ones are acknowledgements and tails, which begin no burst
WINDOWS = 3  # a slope spans a third of the train: one gap in it then touches under half of the slopes
LEAST_CLUSTERS = 5  # distinct arrival times, or there is no slope to speak of
MOST_SPREAD = 1.0  # slopes this far apart are the path's jitter, not its rate
SHORTEST_QUIET, LONGEST_QUIET = Seconds(0.005), Seconds(0.05)  # above a pacing quantum; below any real pause
FEW = 2.0  # over the number of arrivals, the least spread: a handful may agree by chance
NANO = 1_000_000_000


def quiet_before_burst(round_trip: float | None) -> Seconds:
    """Silence that makes what follows a burst, for its sender as for its receiver."""
    return Seconds(min(max((round_trip or 0.0) / 2, SHORTEST_QUIET), LONGEST_QUIET))


@dataclass(frozen=True, slots=True)
class BurstRate:
    """What one burst said. `spread` is the interquartile range of its slopes over their median, more where
    there were few arrivals."""

    number: int
    rate: BytesPerSecond
    packets: int
    spread: float


class BurstWatch:
    """Finds bursts in the datagrams that arrive on one connection, and times their heads."""

    def __init__(self, datagram_size: Bytes = Bytes(1200)) -> None:
        """`datagram_size` is the peer's full one: a head is counted in bytes, as a super-packet hides how
        many datagrams it was."""
        self._datagram_size = datagram_size
        self._last: int | None = None
        self._head: list[Arrival] | None = None
        self._head_bytes = 0
        self._small = 0
        self._number = 0

    def observe(self, arrivals: Iterable[Arrival], round_trip: Seconds | None) -> list[BurstRate]:
        """Take a batch of arrivals, in order. The bursts that became measurable, nearly always none or one.

        A burst begins where nothing large came for half a round trip: its sender was silent for as long, and
        so sent the head unpaced, while a paced stream pauses for milliseconds.
        """
        quiet_ns = int(quiet_before_burst(round_trip) * NANO)
        found: list[BurstRate] = []
        for time, size in arrivals:
            if size < FULL_DATAGRAM:
                self._small += size
                continue
            if self._last is None or time - self._last > quiet_ns:
                self._finish(found)
                self._head, self._head_bytes, self._small = [], 0, 0
                self._number += 1
            elif time < self._last:
                self._head = None  # the clock was set back: what was timed means nothing
            self._last = time
            if self._head is not None:
                self._head.append((time, size + self._small))
                self._head_bytes += size
                self._small = 0
                if self._head_bytes >= COMPLETE_PACKETS * self._datagram_size:
                    self._finish(found)
        return found

    def _finish(self, found: list[BurstRate]) -> None:
        """The head is complete, or the next burst begins and this one was short."""
        head, self._head = self._head, None
        if head is None or self._head_bytes < LEAST_PACKETS * self._datagram_size:
            return
        measured = link_rate(head, self._datagram_size)
        if measured is not None:
            rate, spread = measured
            packets = self._head_bytes // self._datagram_size
            found.append(BurstRate(self._number, rate, packets, spread))


def link_rate(head: Sequence[Arrival], datagram_size: int = 1200) -> tuple[BytesPerSecond, float] | None:
    """Rate and relative spread from a burst's first arrivals; None where they came in too few pieces, or
    where jitter longer than the head itself has torn them apart.

    The median of the slopes of sliding windows. Datagrams with one stamp (a GRO super-packet, a coarse clock)
    or nearly one (a polled NIC, a modem's transmission grant) count as a single arrival.
    """
    clusters = _cluster(head)
    skipped = 0
    first = 0
    while skipped < SKIPPED_PACKETS * datagram_size and first < len(clusters) // 4:
        skipped += clusters[first][1]
        first += 1
    clusters = clusters[first:]
    if len(clusters) < LEAST_CLUSTERS:
        return None
    slopes = _slopes(clusters)
    middle = median(slopes)
    quarter = len(slopes) // 4
    spread = max((slopes[-1 - quarter] - slopes[quarter]) / middle, FEW / len(clusters))
    return (BytesPerSecond(middle), spread) if spread <= MOST_SPREAD else None


def _cluster(head: Sequence[Arrival]) -> list[Arrival]:
    """Arrivals with those far closer than the average joined, at the time of the first."""
    near = (head[-1][0] - head[0][0]) // (4 * len(head))  # a quarter of the mean gap: not the bottleneck's
    clusters: list[Arrival] = []
    previous = 0
    for time, size in head:
        if clusters and time - previous <= near:
            clusters[-1] = (clusters[-1][0], clusters[-1][1] + size)
        else:
            clusters.append((time, size))
        previous = time
    return clusters


def _slopes(clusters: Sequence[Arrival]) -> list[float]:
    """Bytes a second over every window of a third of the train's bytes, ascending."""
    wanted = sum(size for _, size in clusters[1:]) / WINDOWS
    slopes = []
    end, held = 0, 0
    for start in range(len(clusters)):
        while held < wanted and end + 1 < len(clusters):
            end += 1
            held += clusters[end][1]
        if held < wanted:
            break
        slopes.append(held * NANO / (clusters[end][0] - clusters[start][0]))
        held -= clusters[start + 1][1]
    return sorted(slopes)
