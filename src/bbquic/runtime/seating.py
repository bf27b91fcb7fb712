"""Which waiting sequence takes which slot: shares of the arena, ranges cut from them, length classes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

from bbquic.kv.ranges import SlotRange, Tiers
from bbquic.runtime.prefixes import LEAST_SHARED, beginning_of, common_tokens
from bbquic.runtime.ranges import aligned, cut_range, equal_shares, longest_slot, most_slots
from bbquic.runtime.seats import MicroBatch, Seat
from bbquic.runtime.sequence import Sequence


class Seating:
    """The micro-batches, and the queue of sequences that wait for a slot, oldest first.

    Of `micro_batches` those that have a share of the arena are active; `regrouping` joins and parts them.
    """

    def __init__(
        self,
        *,
        micro_batches: int,
        slots: int,
        tiers: Tiers,
        start: int | None = None,
        shares_prefixes: bool = True,
    ) -> None:
        """`start` of the micro-batches are active at first, all where None."""
        self.waiting: deque[Sequence] = deque()
        self.is_closed = False  # no more will come
        self.retiring: int | None = None  # a micro-batch that refills no more, for others take its rows
        self.count = start or micro_batches  # in equal shares when the arena is next shared out
        self._most = micro_batches
        self._slots = slots
        self._tiers = tiers
        self._shares_prefixes = shares_prefixes
        self._generation = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        self.batches = [MicroBatch(index) for index in range(self._most)]
        self.has_one_share = False  # all of the arena is one sequence's, which fits no equal share
        self.retiring = None
        self._draining: int | None = None  # a micro-batch that refills no more until it is empty
        self._share_equally()

    @property
    def largest_need(self) -> int:
        """The longest sequence that fits when it has the arena to itself: one tier of it."""
        return longest_slot(equal_shares(self._tiers, 1)[0])

    @property
    def least_share(self) -> int:
        """The longest slot of a micro-batch where there are as many of these as there can be."""
        return longest_slot(equal_shares(self._tiers, self._most)[0])

    @property
    def live(self) -> int:
        return sum(batch.live for batch in self.batches)

    @property
    def active(self) -> list[MicroBatch]:
        """Those with a share, in the order of their shares, which lie side by side in every tier."""
        shared = [one for one in self.batches if one.has_share]
        return sorted(shared, key=lambda one: [share.offset for share in one.shares])

    @property
    def staying(self) -> list[MicroBatch]:
        return [one for one in self.active if one.index != self.retiring]

    def new_seat(self, sequence: Sequence) -> Seat:
        return Seat(sequence, next(self._generation))

    def return_first(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences that lost their slots wait before all others, in the order given."""
        self.waiting.extendleft(reversed(list(sequences)))

    def refill(self, batch: MicroBatch) -> None:
        """Give free slots to waiting sequences, oldest first, cutting the range anew where it is empty."""
        if not self.waiting or batch.is_full or self.live >= self._slots or batch.index == self.retiring:
            return
        if not self._share_out() or not batch.has_share or self._must_drain(batch):
            return
        allowed = self._allowed(batch)
        if batch.is_empty:
            needs = [one.need for one in self.waiting if aligned(one.need) <= batch.longest]
            where = cut_range(batch.shares, self.part(batch), needs)
            if not self._serves(batch, where):
                batch.cut(where)
        batch.grow(min(allowed, batch.most_slots))
        self._seat(batch, min(len(batch.free) - self._reserved(batch), allowed - batch.live))

    def _seat(self, batch: MicroBatch, room: int) -> None:
        if batch.range is None:
            return
        free = batch.free
        passed: list[Sequence] = []
        while room > 0 and self.waiting:
            sequence = self.waiting.popleft()
            if sequence.need > batch.range.capacity:
                passed.append(sequence)
                continue
            slot = self._choose(batch, free, sequence)
            free.remove(slot)
            batch.slots[slot] = self.new_seat(sequence)
            room -= 1
        self.waiting.extendleft(reversed(passed))

    def _serves(self, batch: MicroBatch, where: SlotRange | None) -> bool:
        """Whether the slots that a micro-batch has do as well as those of `where`, and hold what prompts that
        wait begin with: a new range would hold nothing."""
        present = batch.range
        if not self._shares_prefixes or where is None or present is None or present.capacity < where.capacity:
            return False
        if most_slots(batch.shares, present.capacity) < where.count:
            return False
        held = {beginning_of(seat.sequence.prompt) for seat in batch.residues.values()} - {None}
        return any(beginning_of(one.prompt) in held for one in self.waiting)

    def _choose(self, batch: MicroBatch, free: Items[int], sequence: Sequence) -> int:
        """Of the first tier with room the slot that holds most of what a sequence begins with, else nothing
        that another may want."""
        if batch.range is None or not self._shares_prefixes or not batch.residues:
            return free[0]

        def worth(slot: int) -> tuple[int, bool]:
            seat = batch.residues.get(slot)
            common = common_tokens(sequence.prompt, seat.sequence.prompt) if seat else 0
            return common if common >= LEAST_SHARED else 0, seat is None

        tier = batch.range.tier(free[0])
        return max((slot for slot in free if batch.range.tier(slot) == tier), key=worth)

    def _allowed(self, batch: MicroBatch) -> int:
        """Sequences this micro-batch may have: its part of all slots, and at a job's end of what is left.

        More where no other can take them: ranges of unequal length, after they were joined, lose no slot.
        """
        live = self.live
        left = min(live + len(self.waiting), self._slots) if self.is_closed else self._slots
        room = batch.live + self._slots - live
        others = [one for one in self.staying if one is not batch]
        if others and not any(self._takes_more(one, self.part(one, left)) for one in others):
            return room
        return min(self.part(batch, left), room)

    @staticmethod
    def _takes_more(batch: MicroBatch, part: int) -> bool:
        if batch.is_empty or batch.range is None:
            return True
        return batch.live < part and (bool(batch.free) or batch.most_slots > batch.range.count)

    def _reserved(self, batch: MicroBatch) -> int:
        """Free slots of this one that are for sequences of the micro-batch that retires."""
        if self.retiring is None or batch.range is None:
            return 0
        leaving = self.batches[self.retiring]
        fitting = sum(seat.sequence.need <= batch.range.capacity for seat in leaving.slots.values())
        elsewhere = sum(len(one.free) for one in self.staying if one is not batch)
        return max(0, fitting - elsewhere)

    def part(self, batch: MicroBatch, slots: int | None = None) -> int:
        """A micro-batch's part of `slots`, of all where None: equal but for one."""
        slots = self._slots if slots is None else slots
        indices = sorted(one.index for one in self.staying)
        part, extra = divmod(slots, len(indices))
        return max(1, part + (batch.index in indices[:extra]))

    def _share_out(self) -> bool:
        """See that some share holds the oldest waiting sequence; False: not before others end.

        A sequence larger than any share gets the whole arena as soon as nothing else is in it or on
        its way, and the shares are equal again as soon as that one is done.
        """
        need = aligned(self.waiting[0].need)
        fits = need <= longest_slot(equal_shares(self._tiers, self.count)[0])
        if fits and self.has_one_share:
            pass  # equal shares again
        elif self.has_one_share or need <= max((one.longest for one in self.staying), default=0):
            return True
        if any(one.live or one.flights or one.readers for one in self.batches):
            return False
        self.retiring = None
        self.has_one_share = not fits
        self._share_equally()
        return True

    def _share_equally(self) -> None:
        """Among `count`, or all for the first. Nobody is in any."""
        shares = equal_shares(self._tiers, 1 if self.has_one_share else self.count)
        for one in self.batches:
            one.cut(None)
            one.shares = shares[one.index] if one.index < len(shares) else ()

    def _must_drain(self, batch: MicroBatch) -> bool:
        """Whether this one waits until it is empty, to be cut for a sequence that fits no range as it is."""
        need = self.waiting[0].need
        busy = self.staying
        large = [one for one in busy if one.longest >= aligned(need)]
        if self._draining is not None:
            draining = self.batches[self._draining]
            if draining.is_empty or draining not in large:
                self._draining = None
        longest = max((one.range.capacity for one in busy if one.range and not one.is_empty), default=0)
        if any(one.is_empty for one in large) or need <= longest:
            return False
        if self._draining is None:
            self._draining = min(large, key=lambda one: one.live).index
        return batch.index == self._draining

    def clear(self) -> list[Sequence]:
        """Take everybody out, and begin anew with equal shares, as if no step had ever been made."""
        seats = [seat for batch in self.batches for seat in batch.slots.values()]
        self._begin()
        for seat in seats:
            seat.is_taken = False
        return [seat.sequence for seat in sorted(seats, key=lambda seat: seat.generation)]
