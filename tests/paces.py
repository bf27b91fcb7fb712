"""Paces that decide what a test wants, or anything at all."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

from bbquic.runtime.scheduler import SchedulerOptions
from bbquic.runtime.timing import StageTiming
from bbquic.units import BytesPerSecond, Seconds


class FixedPace:
    """Decides what it was told. `count`: micro-batches that sequences should sit in, all where None."""

    def __init__(self, *, window: int = 1, chunk: int = 512, count: int | None = None) -> None:
        self.window_size, self.chunk_size, self.count = window, chunk, count

    def window(self) -> int:
        return self.window_size

    def chunk(self, own: int, decoding: int) -> int:
        return self.chunk_size

    def micro_batches(self, rows: Items[int], most: int) -> int:
        return len(rows) if self.count is None else self.count

    def decisions(self) -> tuple[str, ...]:
        return ()

    def record(
        self, tokens: int, elapsed: Seconds, timings: Items[StageTiming], onward: int | None = None
    ) -> None: ...
    def link_rate(self, place: int, rate: BytesPerSecond) -> None: ...


class RandomPace:
    """Decides anything that a pace may decide, so that what is right does not rest on good decisions."""

    def __init__(self, rng: random.Random, options: SchedulerOptions, restless: float = 0.5) -> None:
        """`restless`: how often, when it is asked for the number of micro-batches, it thinks anew."""
        self._rng = rng
        self._options = options
        self._restless = restless
        self._count = rng.randint(1, options.micro_batches)

    def window(self) -> int:
        return self._rng.randint(1, self._options.micro_batches * self._options.depth)

    def chunk(self, own: int, decoding: int) -> int:
        return self._rng.randint(1, self._options.prefill_tokens)

    def micro_batches(self, rows: Items[int], most: int) -> int:
        """Another number now and then; for a while the same, so that it is carried out."""
        if self._rng.random() < self._restless:
            self._count = self._rng.randint(1, most)
        return self._count

    def decisions(self) -> tuple[str, ...]:
        return ()

    def record(
        self, tokens: int, elapsed: Seconds, timings: Items[StageTiming], onward: int | None = None
    ) -> None: ...
    def link_rate(self, place: int, rate: BytesPerSecond) -> None: ...
