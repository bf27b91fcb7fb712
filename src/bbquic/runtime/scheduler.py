"""Which rows each micro-batch carries next: continuous batching over circulating micro-batches.

Pure: requests and tokens in, packs and completions out. A micro-batch has at most one step on its way;
when its tokens are back, slots whose sequence ended are refilled and its next step is made, whatever
the other micro-batches are at (architecture: circulating micro-batches).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bbquic.errors import RecordError
from bbquic.kv.ranges import SlotRange
from bbquic.runtime.protocol import Row, WireSampling
from bbquic.runtime.ranges import aligned, cut_range, equal_shares
from bbquic.runtime.request import Completion
from bbquic.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """`slots` sequences in flight at most, in `micro_batches`, over an arena of `cells` tokens a block."""

    micro_batches: int
    slots: int
    cells: int
    prefill_tokens: int = (
        512  # prompt tokens of one pack: enough to fill a device, little enough to decode beside
    )
    look_ahead: int = 256  # records read ahead, so that like lengths can share a micro-batch

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batches <= self.slots:
            raise ValueError(f"{self.slots} slots do not make {self.micro_batches} micro-batches")
        if self.prefill_tokens < 1 or self.look_ahead < 1:
            raise ValueError("prefill_tokens and look_ahead are at least 1")

    @property
    def largest_need(self) -> int:
        """The longest sequence, prompt and answer together, that fits when it has the arena to itself."""
        return equal_shares(self.cells, 1)[0][1]


@dataclass(frozen=True, slots=True)
class Pack:
    """One step of one micro-batch: rows in the order their tokens stand in `tokens`."""

    micro_batch: int
    step: int
    range: SlotRange
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int  # of `tokens`; the others were generated


class _MicroBatch:
    """A share of the arena, the range cut from it, who sits in its slots, and the step on its way."""

    def __init__(self, index: int, share: tuple[int, int]) -> None:
        self.index = index
        self.offset, self.share = share
        self.range: SlotRange | None = None
        self.slots: list[Sequence | None] = []
        self.generations: list[int] = []
        self.step = 0
        self.in_flight: Pack | None = None

    @property
    def live(self) -> int:
        return sum(sequence is not None for sequence in self.slots)


class Scheduler:
    """Owns every sequence between `offer` and its completion."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        shares = equal_shares(options.cells, options.micro_batches)
        self._batches = [_MicroBatch(index, share) for index, share in enumerate(shares)]
        self._waiting: deque[Sequence] = deque()
        self._generation = itertools.count(1)
        self._closed = False
        self._draining: int | None = None  # a micro-batch that refills no more until it is empty

    @property
    def room(self) -> int:
        """How many more sequences the look-ahead takes."""
        return max(0, self._options.look_ahead - len(self._waiting))

    @property
    def live(self) -> int:
        """Sequences that hold a slot."""
        return sum(batch.live for batch in self._batches)

    @property
    def is_done(self) -> bool:
        return self._closed and not self._waiting and not self.live

    def offer(self, sequence: Sequence) -> None:
        """Take a sequence. Raises: RecordError `does_not_fit` when no arena share could ever hold it."""
        largest = self._options.largest_need
        if sequence.need > largest:
            raise RecordError(
                "does_not_fit",
                f"prompt and answer need {sequence.need} tokens of KV memory, the nodes hold {largest}",
            )
        self._waiting.append(sequence)

    def close(self) -> None:
        """No more sequences will be offered."""
        self._closed = True

    def in_flight(self) -> tuple[Pack, ...]:
        """The steps that are on their way just now."""
        return tuple(batch.in_flight for batch in self._batches if batch.in_flight is not None)

    def next_pack(self, micro_batch: int) -> Pack | None:
        """The next step of a micro-batch that has none on its way; None when it has nothing to do."""
        batch = self._batches[micro_batch]
        assert batch.in_flight is None, f"micro-batch {micro_batch} is on its way already"
        self._refill(batch)
        if batch.range is None:
            return None
        decoding = [slot for slot, sequence in enumerate(batch.slots) if sequence and not sequence.unread]
        rows, tokens = self._rows(batch)
        if not rows:
            return None
        batch.step += 1
        batch.in_flight = Pack(
            micro_batch, batch.step, batch.range, tuple(rows), tuple(tokens), len(tokens) - len(decoding)
        )
        return batch.in_flight

    def take_tokens(self, micro_batch: int, step: int, tokens: Items[int]) -> list[Completion] | None:
        """The tokens of a step; gives the answers that ended with it.

        None for a step that was answered before (a repeat). Raises: ValueError when no such step is on
        its way or the count of tokens is not the step's.
        """
        if not 0 <= micro_batch < len(self._batches):
            raise ValueError(f"there is no micro-batch {micro_batch}")
        batch = self._batches[micro_batch]
        pack = batch.in_flight
        if step < batch.step or (step == batch.step and pack is None):
            return None
        if pack is None or step != pack.step:
            raise ValueError(f"micro-batch {micro_batch} has no step {step} on its way")
        wanting = [row for row in pack.rows if row.wants_token]
        if len(tokens) != len(wanting):
            raise ValueError(f"{len(tokens)} tokens for {len(wanting)} rows")
        batch.in_flight = None
        completions = []
        for row, token in zip(wanting, tokens, strict=True):
            sequence = batch.slots[row.slot]
            assert sequence is not None, "a slot is only freed by its own row"
            if sequence.push(token) is not None:
                completions.append(sequence.completion())
                batch.slots[row.slot] = None
        return completions

    def _rows(self, batch: _MicroBatch) -> tuple[list[Row], list[int]]:
        """Decode rows in slot order (neighbours attend together), then prompts up to the budget."""
        rows: list[Row] = []
        tokens: list[int] = []
        reading: list[int] = []
        for slot, sequence in enumerate(batch.slots):
            if sequence is None:
                continue
            if sequence.unread:
                reading.append(slot)
            else:
                self._add_row(batch, slot, sequence, 1, rows, tokens)
        budget = self._options.prefill_tokens
        for slot in reading:
            if budget <= 0:
                break
            sequence = batch.slots[slot]
            assert sequence is not None
            budget -= self._add_row(batch, slot, sequence, budget, rows, tokens)
        return rows, tokens

    def _add_row(
        self,
        batch: _MicroBatch,
        slot: int,
        sequence: Sequence,
        budget: int,
        rows: list[Row],
        tokens: list[int],
    ) -> int:
        new = sequence.next_tokens(budget)
        first = sequence.computed
        sequence.computed += len(new)
        wants = sequence.unread == 0
        sampling = WireSampling.of(sequence.request.sampling) if wants else None
        rows.append(Row(slot, batch.generations[slot], first, len(new), wants, sampling))
        tokens.extend(new)
        return len(new)

    def _refill(self, batch: _MicroBatch) -> None:
        """Give free slots to waiting sequences, oldest first, cutting the range anew where it is empty."""
        if self._waiting and self._share_out(batch) and not self._must_drain(batch):
            limit = self._slots_for(batch)
            if batch.live == 0:
                needs = [sequence.need for sequence in self._waiting]
                batch.range = cut_range(batch.offset, batch.share, limit, needs)
                count = batch.range.slots if batch.range else 0
                batch.slots, batch.generations = [None] * count, [0] * count
            self._seat(batch, limit)

    def _seat(self, batch: _MicroBatch, limit: int) -> None:
        assert batch.range is not None
        free = [slot for slot, sequence in enumerate(batch.slots) if sequence is None]
        room = min(len(free), limit - batch.live)
        passed: list[Sequence] = []
        while room > 0 and self._waiting:
            sequence = self._waiting.popleft()
            if sequence.need > batch.range.capacity:
                passed.append(sequence)
                continue
            slot = free.pop(0)
            batch.slots[slot], batch.generations[slot] = sequence, next(self._generation)
            room -= 1
        self._waiting.extendleft(reversed(passed))

    def _slots_for(self, batch: _MicroBatch) -> int:
        """Sequences this micro-batch may hold: its part of all slots, and at a job's end of what is left."""
        count = len([one for one in self._batches if one.share])
        part, extra = divmod(self._options.slots, count)
        if self._closed and (left := self.live + len(self._waiting)) < self._options.slots:
            part, extra = divmod(left, count)
        return max(1, part + (batch.index < extra))

    def _share_out(self, batch: _MicroBatch) -> bool:
        """See that this micro-batch's share holds the oldest waiting sequence; False: not before others end.

        A sequence larger than an equal share gets the whole arena as soon as nothing else is in it, and
        the shares are equal again as soon as that one is done.
        """
        equal = equal_shares(self._options.cells, self._options.micro_batches)
        wants_all = aligned(self._waiting[0].need) > equal[0][1]
        has_all = [one.share for one in self._batches] != [share for _, share in equal]
        if wants_all == has_all:
            return batch.share > 0
        if self.live:
            return False
        shares = ((0, self._options.largest_need),) + ((0, 0),) * (len(equal) - 1) if wants_all else equal
        for one, (offset, share) in zip(self._batches, shares, strict=True):
            one.offset, one.share, one.range, one.slots = offset, share, None, []
        return batch.share > 0

    def _must_drain(self, batch: _MicroBatch) -> bool:
        """Whether this one waits until it is empty, to be cut for a sequence that fits no range as it is."""
        if self._draining is not None and self._batches[self._draining].live == 0:
            self._draining = None
        busy = [one for one in self._batches if one.share]
        longest = max((one.range.capacity for one in busy if one.range is not None and one.live), default=0)
        if any(one.live == 0 for one in busy) or self._waiting[0].need <= longest:
            return False
        if self._draining is None:
            self._draining = min(busy, key=lambda one: one.live).index
        return batch.index == self._draining
