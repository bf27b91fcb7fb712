"""How many packs are made and how large: the decisions of the scheduler that rest on measurements."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from bbquic.plan.controller import Grouping, Measured, hop_roles
from bbquic.plan.speculation import PLAIN, with_trees
from bbquic.runtime.chunks import chunk_size
from bbquic.runtime.costs import StepCosts
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

    def micro_batches(self, rows: Items[int], most: int) -> int:
        """In how many micro-batches, `most` at most, sequences should sit that are in `len(rows)` now, so
        many in each."""
        ...

    def decisions(self) -> tuple[str, ...]:
        """What was decided of late, and why, in words; the newest last."""
        ...

    def record(
        self, tokens: int, elapsed: Seconds, timings: Items[StageTiming], onward: int | None = None
    ) -> None:
        """A pack came back; `onward` of its tokens went on from the first stage, None: all."""
        ...

    def link_rate(self, place: int, rate: BytesPerSecond) -> None:
        """What the link from a stage to the next carries."""
        ...


class MeasuredPace:
    """Decides by what packs cost; reads prompts by `prefill_tokens` a pack until that is known."""

    def __init__(
        self, *, micro_batches: int, depth: int, prefill_tokens: int, start: int | None = None
    ) -> None:
        """`start` of the micro-batches are there at first, all where None."""
        self._depth = depth
        self._most = prefill_tokens
        self._costs = StepCosts()
        self._present = start or micro_batches
        self._grouping = Grouping(self._present)
        self._packs = 0  # that came back
        self._look_at = 0  # of them: about once a step
        self._rows = 0  # at the last look, and the most micro-batches then
        self._allowed = 1
        self.trees = PLAIN  # what a row is on average; whoever guesses says it

    @property
    def present(self) -> int:
        """Micro-batches now."""
        return self._present

    def measured(self) -> Measured | None:
        """What packs cost; None while nothing is known."""
        return self._costs.measured()

    def window(self) -> int:
        costs, size = self._costs, self._costs.typical
        return packs_in_flight(
            costs.cycle(size), costs.loop(size), micro_batches=self._present, depth=self._depth
        )

    def chunk(self, own: int, decoding: int) -> int:
        return chunk_size(
            self._costs, own=own, decoding=decoding, micro_batches=self._present, most=self._most
        )

    def micro_batches(self, rows: Items[int], most: int) -> int:
        self._present = len(rows)
        if self._packs >= self._look_at and (measured := self._for_rows()) is not None:
            self._look_at = self._packs + len(rows)
            self._rows, self._allowed = sum(rows), most
            self._grouping.look(measured, self._rows, most)
        return self._grouping.target

    def decisions(self) -> tuple[str, ...]:
        measured = self._for_rows()
        if measured is None or not self._rows:
            return ()
        roles = hop_roles(measured, self._rows, self._present)
        state = self._grouping.state(measured, self._rows, self._allowed)
        return (*roles, *self._grouping.reasons, state)

    def record(
        self, tokens: int, elapsed: Seconds, timings: Items[StageTiming], onward: int | None = None
    ) -> None:
        self._packs += 1
        self._costs.record(tokens, elapsed, timings, onward)

    def _for_rows(self) -> Measured | None:
        """The pipeline as rows meet it, of which each may be a tree."""
        measured = self._costs.measured()
        return measured if measured is None else with_trees(measured, self.trees)

    def link_rate(self, place: int, rate: BytesPerSecond) -> None:
        self._costs.link_rate(place, rate)
