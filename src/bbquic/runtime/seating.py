"""Which waiting sequence takes which slot: shares of the arena, ranges cut from them, length classes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from bbquic.runtime.ranges import aligned, cut_range, equal_shares
from bbquic.runtime.seats import MicroBatch, Seat
from bbquic.runtime.sequence import Sequence


class Seating:
    """The micro-batches, and the queue of sequences that wait for a slot, oldest first."""

    def __init__(self, *, micro_batches: int, slots: int, cells: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.is_closed = False  # no more will come
        self._slots = slots
        self._cells = cells
        self._equal = equal_shares(cells, micro_batches)
        self.batches = [MicroBatch(index, *share) for index, share in enumerate(self._equal)]
        self._generation = itertools.count(1)
        self._draining: int | None = None  # a micro-batch that refills no more until it is empty

    @property
    def largest_need(self) -> int:
        """The longest sequence that fits when it has the arena to itself."""
        return equal_shares(self._cells, 1)[0][1]

    @property
    def live(self) -> int:
        return sum(batch.live for batch in self.batches)

    def new_seat(self, sequence: Sequence) -> Seat:
        return Seat(sequence, next(self._generation))

    def return_first(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences that lost their slots wait before all others, in the order given."""
        self.waiting.extendleft(reversed(list(sequences)))

    def refill(self, batch: MicroBatch) -> None:
        """Give free slots to waiting sequences, oldest first, cutting the range anew where it is empty."""
        if self.waiting and self._share_out(batch) and not self._must_drain(batch):
            if batch.is_empty:
                needs = [sequence.need for sequence in self.waiting]
                batch.cut(cut_range(batch.offset, batch.share, self._part(batch, self._slots), needs))
            self._seat(batch, self._limit(batch))

    def _seat(self, batch: MicroBatch, limit: int) -> None:
        assert batch.range is not None
        free = batch.free
        room = min(len(free), limit - batch.live)
        passed: list[Sequence] = []
        while room > 0 and self.waiting:
            sequence = self.waiting.popleft()
            if sequence.need > batch.range.capacity:
                passed.append(sequence)
                continue
            batch.slots[free.pop(0)] = self.new_seat(sequence)
            room -= 1
        self.waiting.extendleft(reversed(passed))

    def _limit(self, batch: MicroBatch) -> int:
        """Sequences this micro-batch may take: its part of all slots, and at a job's end of what is left."""
        left = self.live + len(self.waiting)
        return self._part(batch, min(left, self._slots) if self.is_closed else self._slots)

    def _part(self, batch: MicroBatch, slots: int) -> int:
        part, extra = divmod(slots, len([one for one in self.batches if one.share]))
        return max(1, part + (batch.index < extra))

    def _share_out(self, batch: MicroBatch) -> bool:
        """See that this micro-batch's share holds the oldest waiting sequence; False: not before others end.

        A sequence larger than an equal share gets the whole arena as soon as nothing else is in it or on
        its way, and the shares are equal again as soon as that one is done.
        """
        wants_all = aligned(self.waiting[0].need) > self._equal[0][1]
        has_all = [one.share for one in self.batches] != [share for _, share in self._equal]
        if wants_all == has_all:
            return batch.share > 0
        if any(one.live or one.flights for one in self.batches):
            return False
        whole = ((0, self.largest_need),) + ((0, 0),) * (len(self._equal) - 1)
        for one, (offset, share) in zip(self.batches, whole if wants_all else self._equal, strict=True):
            one.cut(None)
            one.offset, one.share = offset, share
        return batch.share > 0

    def _must_drain(self, batch: MicroBatch) -> bool:
        """Whether this one waits until it is empty, to be cut for a sequence that fits no range as it is."""
        if self._draining is not None and self.batches[self._draining].is_empty:
            self._draining = None
        busy = [one for one in self.batches if one.share]
        longest = max((one.range.capacity for one in busy if one.range and not one.is_empty), default=0)
        if any(one.is_empty for one in busy) or self.waiting[0].need <= longest:
            return False
        if self._draining is None:
            self._draining = min(busy, key=lambda one: one.live).index
        return batch.index == self._draining

    def clear(self) -> list[Sequence]:
        """Take everybody out, and begin anew with equal shares, as if no step had ever been made."""
        seats = [seat for batch in self.batches for _, seat in batch.seats()]
        self.batches = [MicroBatch(index, *share) for index, share in enumerate(self._equal)]
        self._draining = None
        for seat in seats:
            seat.is_taken = False
        return [seat.sequence for seat in sorted(seats, key=lambda seat: seat.generation)]
