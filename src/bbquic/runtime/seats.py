"""Who sits where: the slots of a micro-batch, and the packs that are on their way for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from bbquic.kv.ranges import SlotRange
from bbquic.runtime.protocol import Move, Row
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


@dataclass(slots=True, eq=False)
class Seat:
    """A sequence in a slot, for one generation of it: rows in flight belong to it, not to the slot."""

    sequence: Sequence
    generation: int
    step: int = 0  # the last that carried a row of it
    move: Move | None = None  # what has to be made before its next row, in the same pack
    is_taken: bool = True  # False once the sequence has left: what comes back for it is dropped
    left: int = 0  # tokens that its slot holds since then

    @property
    def held(self) -> int:
        """Tokens that its slot holds, or will by packs on their way; only of a seat that had a row."""
        return self.sequence.computed if self.is_taken else self.left


@dataclass(frozen=True, slots=True)
class Flight:
    """A pack on its way, and the seats that its rows belong to."""

    pack: Pack
    seats: tuple[Seat, ...]
    decodes: bool


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A share of the arena, the range cut from it, who sits in its slots, and the packs on their way."""

    index: int
    offset: int
    share: int  # cells
    range: SlotRange | None = None
    slots: list[Seat | None] = field(default_factory=list)
    readers: Counter[int] = field(default_factory=Counter)  # moves that are yet to read a slot's tokens
    residues: dict[int, Seat] = field(default_factory=dict)  # whose tokens a slot holds that nobody is in
    step: int = 0
    flights: dict[int, Flight] = field(default_factory=dict)  # by step

    @property
    def live(self) -> int:
        """Sequences in its slots."""
        return sum(seat is not None for seat in self.slots)

    @property
    def decoding(self) -> int:
        """Those of them that are past their prompts."""
        return sum(seat.sequence.has_read for _, seat in self.seats())

    @property
    def is_empty(self) -> bool:
        """Whether nothing keeps its range from being cut anew. Packs of those who left may still be on
        their way: stages apply the steps of a micro-batch in order."""
        return not self.live and not self.readers

    @property
    def is_full(self) -> bool:
        """Whether all its slots are taken and its range has no room for more."""
        return None not in self.slots and self.range is not None and self.most_slots <= self.range.count

    @property
    def has_decode_rows_in_flight(self) -> bool:
        return any(flight.decodes for flight in self.flights.values())

    @property
    def free(self) -> list[int]:
        return [slot for slot, seat in enumerate(self.slots) if seat is None and slot not in self.readers]

    def seats(self) -> Iterator[tuple[int, Seat]]:
        """The taken slots, in order."""
        return ((slot, seat) for slot, seat in enumerate(self.slots) if seat is not None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is on its way and no move is yet to be made, to it or from it."""
        return not self.flights and not self.readers and all(seat.move is None for _, seat in self.seats())

    @property
    def most_slots(self) -> int:
        """Slots that its range may grow to within its share."""
        return self.share // self.range.capacity if self.range else 0

    def seat(self, slot: int) -> Seat:
        """Who sits in a slot that is taken."""
        seat = self.slots[slot]
        assert seat is not None, f"nobody is in slot {slot} of micro-batch {self.index}"
        return seat

    def leave(self, slot: int) -> Seat:
        """Take a sequence out of its slot; what comes back for that seat is dropped."""
        seat = self.seat(slot)
        seat.left, seat.is_taken = seat.sequence.computed, False
        self.slots[slot] = None
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
        continues = where is not None and self.range is not None and where.continues(self.range)
        self.residues = {slot: seat for slot, seat in self.residues.items() if continues and slot in where}
        self.range = where
        self.slots = [None] * (where.count if where else 0)

    def grow(self, slots: int) -> None:
        """Have `slots` slots, where that is more: the present ones stay where they are."""
        if self.range is not None and slots > self.range.count:
            self.slots += [None] * (slots - self.range.count)
            self.range = self.range.with_slots(0, slots)

    def give_up(self) -> None:
        """Have no share of the arena: its cells are another's, and whoever sat there has a seat elsewhere."""
        self.share, self.range, self.slots, self.residues = 0, None, [], {}
