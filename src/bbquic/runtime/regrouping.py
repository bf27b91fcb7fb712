"""The number of micro-batches changed while a job runs: one is joined to others, or one is parted in two.

Nothing drains. A micro-batch is changed between two of its own steps, when nothing of it is on its way, and
the others go on. Sequences change their micro-batch by MOVE: a copy to a free slot, or no copy at all where
ranges lie side by side and their slots are of one length, so that a slot only gets another name.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from bbquic.kv.ranges import CELL_ALIGNMENT
from bbquic.runtime.protocol import Move
from bbquic.runtime.ranges import Share, laid_out
from bbquic.runtime.regroup import Room, places
from bbquic.runtime.seating import Seating
from bbquic.runtime.seats import MicroBatch


class Regrouping:
    """Brings the number of active micro-batches nearer to what is wanted, one at a time."""

    def __init__(self, seating: Seating) -> None:
        self.moved = 0  # sequences that changed their micro-batch
        self.changes = 0  # of shares and seats: whoever had nothing to launch may have now
        self.waits_for: str | None = None  # why a change that is wanted is not made yet
        self._seating = seating

    def holds(self, batch: MicroBatch, wanted: int) -> bool:
        """Called before each step of a micro-batch; True where it makes none now.

        Either its sequences just left, or it is to be changed once its packs are back, in a loop at most.
        """
        seating = self._seating
        present = len(seating.active)
        if wanted >= present and seating.retiring is not None:
            seating.retiring = None
            self.changes += 1
        if wanted == present or seating.has_one_share:
            self.waits_for = None
            return False
        return self._part(batch) if wanted > present else self._retire(batch)

    def release(self) -> None:
        """Give the share of a micro-batch that has retired to the one below it, if there is one."""
        seating = self._seating
        if seating.retiring is None:
            return
        left = seating.batches[seating.retiring]
        if left.live or left.flights or left.readers:
            return
        below = seating.active[seating.active.index(left) - 1]
        _join_shares(below, left)
        self._retired(left)

    def _retired(self, left: MicroBatch) -> None:
        left.give_up()
        self._seating.retiring = None
        self._shared_out()

    def _shared_out(self) -> None:
        self._seating.count = len(self._seating.active)
        self.changes += 1

    # Fewer.

    def _retire(self, batch: MicroBatch) -> bool:
        """Let the smallest micro-batch go that is not the arena's first: the one below gets its cells."""
        seating, active = self._seating, self._seating.active
        if seating.retiring is None:
            last = min(range(1, len(active)), key=lambda at: (active[at].live, active[at - 1].live, -at))
            seating.retiring = active[last].index
            self.changes += 1  # an empty one gives up its share when the next micro-batch is asked
        leaving = seating.batches[seating.retiring]
        if batch is not leaving or not batch.live or batch.readers:
            return False
        if any(seat.move is not None for seat in batch.slots.values()):
            return False
        below = active[active.index(leaving) - 1]
        targets = self._targets()
        chosen = places([seat.sequence.need for _, seat in batch.seats()], [room for _, room in targets])
        bases = _bases(below, batch) if chosen is None else None
        self.waits_for = None
        if chosen is not None or bases is not None:
            if batch.flights:
                return True
            if bases is not None:
                self._join(below, batch, bases)
            elif chosen is not None:
                self._move_all(batch, [targets[place][0] for place in chosen])
            return True
        return self._move_some(batch)

    def _targets(self) -> list[tuple[MicroBatch, Room]]:
        """Who may take sequences, with the slots that are free or can be."""
        found = []
        for one in self._seating.staying:
            if one.range is not None:
                free = len(one.free) + max(0, one.most_slots - one.range.count)
                found.append((one, Room(one.range.capacity, free, one.live)))
        return found

    def _move_all(self, batch: MicroBatch, targets: Items[MicroBatch]) -> None:
        for (slot, _), target in zip(list(batch.seats()), targets, strict=True):
            self._move_to_free(batch, slot, target)

    def _move_some(self, batch: MicroBatch) -> bool:
        """Move what fits, as slots elsewhere become free; the rest goes on here until it ends."""
        flying = {seat for flight in batch.flights.values() for seat in flight.seats}
        for slot, seat in list(batch.seats()):
            rooms = [(one, room) for one, room in self._targets() if room.free]
            fitting = [(one, room) for one, room in rooms if room.capacity >= seat.sequence.need]
            if seat not in flying and fitting:
                self._move_to_free(batch, slot, min(fitting, key=lambda pair: pair[1].live)[0])
        if batch.live:
            self.waits_for = (
                f"{batch.live} sequences of micro-batch {batch.index} fit no free slot elsewhere; "
                "they move as others end, and no new ones join them"
            )
        return not batch.live

    def _move_to_free(self, batch: MicroBatch, slot: int, target: MicroBatch) -> None:
        if not target.free:
            assert target.range is not None
            target.grow(target.range.count + 1)
        self._reseat(batch, slot, target, target.free[0])

    def _join(self, below: MicroBatch, batch: MicroBatch, bases: Items[int]) -> None:
        """Make the slots of a micro-batch the last ones of the range below, in each tier from the place that
        `bases` says; no cell is copied."""
        lower, upper = below.range, batch.range
        assert lower is not None
        assert upper is not None
        _join_shares(below, batch)
        strips = zip(lower.strips, upper.strips, bases, strict=True)
        present = [max(low.slots, base + high.slots) for low, high, base in strips]
        below.range = laid_out(below.shares, lower.capacity, 0, present)
        for slot, _ in list(batch.seats()):
            tier, place = upper.tier(slot), upper.place(slot)
            self._reseat(batch, slot, below, lower.number(tier, bases[tier] + place))
        self._retired(batch)

    # More.

    def _part(self, batch: MicroBatch) -> bool:
        """Part the fullest micro-batch that can be."""
        spare = next(
            (one for one in self._seating.batches if not one.has_share and one.is_empty and not one.flights),
            None,
        )
        able = [one for one in self._seating.active if _can_part(one)]
        if spare is None or not able:
            self.waits_for = "no micro-batch has two slots to share out" if not able else None
            return False
        self.waits_for = None
        if batch is not max(able, key=lambda one: (one.live, one.cells, -one.index)):
            return False
        if not batch.is_idle:
            # a move that waits to be made goes out with the next pack
            return bool(batch.flights) and not any(seat.move for _, seat in batch.seats())
        if batch.live:
            self._part_range(batch, spare)
        else:
            batch.cut(None)
            _part_shares(batch, spare, [_half(share.cells) for share in batch.shares])
        self._shared_out()
        return False

    def _part_range(self, batch: MicroBatch, upper: MicroBatch) -> None:
        """Cut a range in two at half of its shares' slots; those above only get another name."""
        where = batch.range
        assert where is not None
        halves = _halves([share.cells // where.capacity for share in batch.shares])
        cells = [
            half * where.capacity if share.cells >= where.capacity else _half(share.cells)
            for share, half in zip(batch.shares, halves, strict=True)
        ]
        _part_shares(batch, upper, cells)
        strips = list(zip(where.strips, halves, strict=True))
        above = [max(0, strip.slots - half) for strip, half in strips]
        upper.cut(laid_out(upper.shares, where.capacity, self._seating.part(upper), above))
        for slot, _ in list(batch.seats()):
            tier, place = where.tier(slot), where.place(slot) - halves[where.tier(slot)]
            if place >= 0:
                self._reseat(batch, slot, upper, where.number(tier, place))
        staying = [min(strip.slots, half) for strip, half in strips]
        batch.shorten(laid_out(batch.shares, where.capacity, 1, staying))
        for slot, _ in reversed(list(batch.seats())):
            if batch.live > upper.live + 1 and upper.free:
                self._reseat(batch, slot, upper, upper.free[0])

    def _reseat(self, source: MicroBatch, slot: int, target: MicroBatch, place: int) -> None:
        """Seat a sequence elsewhere; the move itself travels with its next row. Until that row's pack is
        back, the source's cells belong to the move."""
        old = source.leave(slot)
        new = self._seating.new_seat(old.sequence)
        new.accepted = old.accepted  # the tree moves along, whatever was accepted of it
        if old.sequence.computed:
            new.move = Move(
                micro_batch=source.index,
                slot=slot,
                generation=old.generation,
                step=old.step,
                target=place,
                target_generation=new.generation,
                count=old.held,
            )
            source.readers[slot] += 1
            del source.residues[slot]  # the move takes it along
        target.slots[place] = new
        self.moved += 1
        self.changes += 1


def _bases(below: MicroBatch, above: MicroBatch) -> list[int] | None:
    """For each tier the place that the first slot of one has in the range of the other, were that longer.

    None where a slot that is taken is none of the other's then, or somebody is about to fetch a slot there.
    """
    lower, upper = below.range, above.range
    if lower is None or upper is None or below.readers or lower.capacity != upper.capacity:
        return None
    strips = zip(lower.strips, upper.strips, strict=True)
    found = [divmod(high.offset - low.offset, lower.capacity) for low, high in strips]
    if any(found[upper.tier(slot)][1] for slot in above.slots):
        return None
    return [base for base, _ in found]


def _join_shares(below: MicroBatch, above: MicroBatch) -> None:
    shares = zip(below.shares, above.shares, strict=True)
    below.shares = tuple(Share(low.offset, high.stop - low.offset) for low, high in shares)


def _part_shares(lower: MicroBatch, upper: MicroBatch, cells: Items[int]) -> None:
    """Leave to one the first `cells` of its share of each tier; the rest is the other's."""
    parted = [share.parted(first) for share, first in zip(lower.shares, cells, strict=True)]
    lower.shares, upper.shares = zip(*parted, strict=True)


def _half(cells: int) -> int:
    return cells // (2 * CELL_ALIGNMENT) * CELL_ALIGNMENT


def _halves(slots: Items[int]) -> list[int]:
    """Of each tier's slots half, an odd one more and one less by turns: so all halves together are one."""
    found, odd = [], 0
    for most in slots:
        odd ^= most & 1
        found.append((most + (most & odd)) // 2)
    return found


def _can_part(batch: MicroBatch) -> bool:
    """Whether there are two slots, and two sequences or none."""
    if not batch.live:
        return batch.longest >= 2 * CELL_ALIGNMENT
    return batch.live > 1 and batch.most_slots > 1
