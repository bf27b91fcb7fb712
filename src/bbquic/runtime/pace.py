"""How many packs are made and how large: the decisions of the scheduler that rest on measurements."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from bbquic.runtime.chunks import chunk_size
from bbquic.runtime.costs import StepCosts
from bbquic.runtime.regroup import best_count
from bbquic.runtime.timing import StageTiming
from bbquic.runtime.window import packs_in_flight
from bbquic.units import BytesPerSecond, Seconds


class Pace(Protocol):
    """What the scheduler asks, and what it is told of packs that came back."""

    def window(self) -> int:
        """Packs on their way in all above which none is made for prompts alone."""
        ...

    def chunk(self, own: int, decoding: int) -> int:
        """Prompt tokens of a pack with `own` decode rows, the fullest micro-batch having `decoding`."""
        ...

    def micro_batches(self, rows: Items[int]) -> int:
        """In how many micro-batches sequences should sit that are in `len(rows)` now, so many in each."""
        ...

    def record(self, tokens: int, elapsed: Seconds, timings: Items[StageTiming]) -> None:
        """A pack came back."""
        ...

    def link_rate(self, place: int, rate: BytesPerSecond) -> None:
        """What the link from a stage to the next carries."""
        ...


class MeasuredPace:
    """Decides by what packs cost; reads prompts by `prefill_tokens` a pack until that is known."""

    def __init__(self, *, micro_batches: int, depth: int, prefill_tokens: int) -> None:
        self._micro_batches = micro_batches
        self._depth = depth
        self._most = prefill_tokens
        self._costs = StepCosts()

    def window(self) -> int:
        costs, size = self._costs, self._costs.typical
        return packs_in_flight(
            costs.cycle(size), costs.loop(size), micro_batches=self._micro_batches, depth=self._depth
        )

    def chunk(self, own: int, decoding: int) -> int:
        return chunk_size(
            self._costs, own=own, decoding=decoding, micro_batches=self._micro_batches, most=self._most
        )

    def micro_batches(self, rows: Items[int]) -> int:
        if self._costs.cycle(1) is None:
            return len(rows)
        return best_count(
            rows,
            cycle=lambda count: self._costs.cycle(count) or Seconds(0.0),
            loop=lambda count: self._costs.loop(count) or Seconds(0.0),
        )

    def record(self, tokens: int, elapsed: Seconds, timings: Items[StageTiming]) -> None:
        self._costs.record(tokens, elapsed, timings)

    def link_rate(self, place: int, rate: BytesPerSecond) -> None:
        self._costs.link_rate(place, rate)
