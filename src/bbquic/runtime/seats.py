"""Who sits where: the slots of a micro-batch, and the packs that are on their way for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from bbquic.draft.tree import DraftTree
from bbquic.kv.ranges import SlotRange
from bbquic.runtime.protocol import Move, Row
from bbquic.runtime.ranges import Shares, laid_out, longest_slot, most_slots
from bbquic.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Pack:
    """One step of one micro-batch: rows in the order their tokens stand in `tokens`."""

    micro_batch: int
    step: int
    range: SlotRange
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int  # of `tokens`: those of prompts that go out for the first time
    moves: tuple[Move, ...] = ()
    shared_tokens: int = 0  # of prompts, that no row carries: they are copied from other slots

    def onward_tokens(self, reached: Items[int]) -> int:
        """Those that went on from the first stage, `reached` being how many nodes of each tree did."""
        return len(self.tokens) - sum(row.count for row in self.rows if row.tree is not None) + sum(reached)


@dataclass(slots=True, eq=False)
class Seat:
    """A sequence in a slot, for one generation of it: rows in flight belong to it, not to the slot."""

    sequence: Sequence
    generation: int
    step: int = 0  # the last that carried a row of it
    move: Move | None = None  # what has to be made before its next row, in the same pack
    is_taken: bool = True  # False once the sequence has left: what comes back for it is dropped
    left: int = 0  # tokens that its slot holds since then
    accepted: tuple[int, ...] | None = None  # of the tree in its slot, for its next row to tell

    @property
    def held(self) -> int:
        """Tokens that its slot holds in their places, or will by packs on their way; only of a seat that had
        a row. What is accepted of a tree lies among its other nodes until the next row."""
        return self.sequence.computed - len(self.accepted or ()) if self.is_taken else self.left


@dataclass(frozen=True, slots=True)
class Flight:
    """A pack on its way, and the seats that its rows belong to.

    The decode rows are the first: `trees` has what was drafted for each, None of a plain one, where `guesses`
    were wanted for each.
    """

    pack: Pack
    seats: tuple[Seat, ...]
    trees: tuple[DraftTree | None, ...]
    guesses: int = 0

    @property
    def decodes(self) -> bool:
        return bool(self.trees)


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Its shares of the arena, the range cut from them, who sits in its slots, and the packs on their way."""

    index: int
    shares: Shares = ()  # none where others have the arena among them
    range: SlotRange | None = None
    slots: dict[int, Seat] = field(default_factory=dict)  # those that are taken
    readers: Counter[int] = field(default_factory=Counter)  # moves that are yet to read a slot's tokens
    residues: dict[int, Seat] = field(default_factory=dict)  # whose tokens a slot holds that nobody is in
    step: int = 0
    flights: dict[int, Flight] = field(default_factory=dict)  # by step

    @property
    def live(self) -> int:
        """Sequences in its slots."""
        return len(self.slots)

    @property
    def decoding(self) -> int:
        """Those of them that are past their prompts."""
        return sum(seat.sequence.has_read for seat in self.slots.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing keeps its range from being cut anew. Packs of those who left may still be on
        their way: stages apply the steps of a micro-batch in order."""
        return not self.live and not self.readers

    @property
    def is_full(self) -> bool:
        """Whether all its slots are taken and its range has no room for more."""
        return self.range is not None and self.live == self.range.count >= self.most_slots

    @property
    def has_decode_rows_in_flight(self) -> bool:
        return any(flight.decodes for flight in self.flights.values())

    @property
    def free(self) -> list[int]:
        """Tier after tier, the lowest first."""
        slots = self.range.slots() if self.range else ()
        return [slot for slot in slots if slot not in self.slots and slot not in self.readers]

    def seats(self) -> Iterator[tuple[int, Seat]]:
        """The taken slots, tier after tier: neighbours in memory follow one another."""
        slots = self.range.slots() if self.range else ()
        return ((slot, self.slots[slot]) for slot in slots if slot in self.slots)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is on its way and no move is yet to be made, to it or from it."""
        return (
            not self.flights and not self.readers and all(seat.move is None for seat in self.slots.values())
        )

    @property
    def has_share(self) -> bool:
        return any(share.cells for share in self.shares)

    @property
    def cells(self) -> int:
        """Of its shares together."""
        return sum(share.cells for share in self.shares)

    @property
    def longest(self) -> int:
        """The cells of the longest slot that its shares allow."""
        return longest_slot(self.shares)

    @property
    def most_slots(self) -> int:
        """Slots that its range may grow to within its shares."""
        return most_slots(self.shares, self.range.capacity) if self.range else 0

    def seat(self, slot: int) -> Seat:
        """Who sits in a slot that is taken."""
        assert slot in self.slots, f"nobody is in slot {slot} of micro-batch {self.index}"
        return self.slots[slot]

    def leave(self, slot: int) -> Seat:
        """Take a sequence out of its slot; what comes back for that seat is dropped."""
        seat = self.seat(slot)
        seat.left, seat.is_taken = seat.held, False
        del self.slots[slot]
        if seat.step:
            self.residues[slot] = seat
        return seat

    def was_read(self, move: Move) -> None:
        """A move that reads one of its slots was made, or never will be."""
        self.readers[move.slot] -= 1
        if not self.readers[move.slot]:
            del self.readers[move.slot]

    def cut(self, where: SlotRange | None) -> None:
        """Take another range of the arena, or none."""
        assert self.is_empty, "a range is cut when nobody is in it"
        if where is None or self.range is None or not where.continues(self.range):
            self.residues = {}
        self.shorten(where)

    def shorten(self, where: SlotRange | None) -> None:
        """Have no slots but those of `where`; nobody is in the others."""
        self.range = where
        self.residues = {slot: seat for slot, seat in self.residues.items() if where and slot in where}

    def grow(self, slots: int) -> None:
        """Have `slots` slots, where that is more: the present ones stay where they are."""
        if self.range is not None and slots > self.range.count:
            present = [strip.slots for strip in self.range.strips]
            self.range = laid_out(self.shares, self.range.capacity, slots, present)

    def give_up(self) -> None:
        """Have no share of the arena: its cells are another's, and whoever sat there has a seat elsewhere."""
        self.shares, self.range, self.slots, self.residues = (), None, {}, {}
