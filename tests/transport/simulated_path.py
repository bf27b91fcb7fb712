"""A clock and a bottleneck in simulated time: hours of protocol in seconds, the same every run."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

MBIT = 1e6 / 8  # bytes/s
PACKET = 1200  # bytes


class Simulation:
    """A clock and what is to happen."""

    def __init__(self) -> None:
        self.now = 100.0  # not 0, so that nothing takes the start of time for "never"
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (max(time, self.now), self._number, action))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until and not done():
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if not done():
            self.now = max(self.now, until)


@dataclass
class Path:
    """One direction: a queue of `limit` seconds at `rate` (bytes/s), then `delay` and up to `jitter` more,
    in order. `loss` strikes in runs of `loss_run` packets; `swap` is the share that arrives 5 ms late."""

    simulation: Simulation
    rate: float
    delay: float
    jitter: float = 0.0
    loss: float = 0.0
    loss_run: int = 1
    swap: float = 0.0
    limit: float = 0.1
    seed: int = 1
    dropped: int = 0
    lost: int = 0
    carried: int = 0
    _free_at: float = 0.0
    _last_arrival: float = 0.0
    _run: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def backlog(self) -> float:
        """Bytes that wait."""
        return max(0.0, self._free_at - self.simulation.now) * self.rate

    def set_rate(self, rate: float) -> None:
        """From now on, for what waits too."""
        self._free_at = self.simulation.now + self.backlog / rate
        self.rate = rate

    def carry(self, size: int, arrive: Callable[[], None]) -> None:
        now = self.simulation.now
        if self.backlog + size > max(self.limit * self.rate, 30 * PACKET):
            self.dropped += 1
            return
        if self._is_lost():
            self.lost += 1
            return
        self._free_at = max(now, self._free_at) + size / self.rate
        self.carried += size
        arrival = self._free_at + self.delay + self._random.random() * self.jitter
        if self.swap and self._random.random() < self.swap:
            arrival += 0.005
        else:
            arrival = self._last_arrival = max(arrival, self._last_arrival)
        self.simulation.at(arrival, arrive)

    def _is_lost(self) -> bool:
        if self._run:
            self._run -= 1
            return True
        if self.loss and self._random.random() < self.loss / self.loss_run:
            self._run = self.loss_run - 1
            return True
        return False
