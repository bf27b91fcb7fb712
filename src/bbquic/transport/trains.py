"""Trains of datagrams: what a kernel takes or gives in one call, as one buffer cut into equal pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

MOST_SEGMENTS = 64  # datagrams a train; Linux before 6.9 takes no more at once
MOST_BYTES = 65_000  # a train goes through the kernel as one IP packet, which has 65,535 with its headers


class Train(NamedTuple):
    """Datagrams to one address. Each has `segment` bytes, the last one perhaps fewer."""

    data: bytes
    segment: int
    address: Any

    def datagrams(self) -> list[bytes]:
        return cut(self.data, self.segment)


class Arrival(NamedTuple):
    """Datagrams that the kernel handed over as one."""

    datagrams: list[bytes]
    address: Any
    time: int | None  # ns since the epoch, by the kernel's clock when they came; None where it tells nothing


Batch = list[Arrival]
Stamp = tuple[int, int]  # an arrival's time as above, and its bytes


def arrival_of(place: int, datagrams: Sequence[bytes], stamps: Sequence[Stamp]) -> int:
    """The time of the stamp, of those of `datagrams` together, that the one at `place` came with."""
    if len(stamps) > 1:
        reach = sum(map(len, datagrams[: place + 1]))
        for time, size in stamps:
            reach -= size
            if reach <= 0:
                return time
    return stamps[-1][0]


def cut(data: bytes, segment: int) -> list[bytes]:
    """The pieces of `segment` bytes that `data` consists of; the last one may be shorter."""
    if segment <= 0 or segment >= len(data):
        return [data]
    return [data[start : start + segment] for start in range(0, len(data), segment)]


def couple(parts: Sequence[bytes], address: Any, limit: int = MOST_BYTES) -> list[Train]:
    """Trains of datagrams given as two parts each (header, rest, header, rest ...), their order kept.

    No train has over `limit` bytes, unless it is a single datagram.
    """
    limit = min(limit, MOST_BYTES)
    trains: list[Train] = []
    place, count = 0, len(parts)
    while place < count:
        start = place
        segment = total = len(parts[place]) + len(parts[place + 1])
        place += 2
        while place < count and place - start < 2 * MOST_SEGMENTS:
            size = len(parts[place]) + len(parts[place + 1])
            if size == 0 or size > segment or total + size > limit:
                break
            total += size
            place += 2
            if size < segment:
                break  # only the last may be shorter
        trains.append(Train(b"".join(parts[start:place]), segment, address))
    return trains


def couple_whole(datagrams: Sequence[tuple[bytes, Any]]) -> list[Train]:
    """Trains of datagrams in one piece each, given with their addresses; their order is kept."""
    return [
        train
        for address, group in groupby(datagrams, key=lambda datagram: datagram[1])
        for train in couple([part for data, _ in group for part in (data, b"")], address)
    ]
