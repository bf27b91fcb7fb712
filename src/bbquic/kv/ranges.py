"""How an arena is cut: pure numbers, for those who plan it and those who hold it alike."""

from __future__ import annotations

from dataclasses import dataclass

CELL_ALIGNMENT = 16  # tokens; capacities are multiples of it, so that slots start on cache lines


@dataclass(frozen=True, slots=True)
class SlotRange:
    """A micro-batch's share of the arena: `slots` equal slots of `capacity` tokens from cell `offset`."""

    offset: int
    slots: int
    capacity: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.slots < 1 or self.capacity < 1:
            raise ValueError(f"not a slot range: {self}")

    @property
    def stop(self) -> int:
        """The first cell behind the range."""
        return self.offset + self.slots * self.capacity

    def overlaps(self, other: SlotRange) -> bool:
        return self.offset < other.stop and other.offset < self.stop

    def continues(self, other: SlotRange) -> bool:
        """Whether a slot of one is the same cells as that slot of the other: they differ in slots at most."""
        return (self.offset, self.capacity) == (other.offset, other.capacity)

    def cells(self, slot: int) -> range:
        """The arena's cells of a slot; of one behind the range those that it would have."""
        first = self.offset + slot * self.capacity
        return range(first, first + self.capacity)

    def with_slots(self, slots: int) -> SlotRange:
        """The same with another number of slots: grown or cut at its end, no cell changes its place."""
        return SlotRange(self.offset, slots, self.capacity)


def share_cells(one: range, other: range) -> bool:
    """Whether two stretches of the arena overlap."""
    return one.start < other.stop and other.start < one.stop


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The first `count` tokens of a slot of one range go to a slot of another, in every block of a stage."""

    source: SlotRange
    source_slot: int
    target: SlotRange
    target_slot: int
    count: int

    def __post_init__(self) -> None:
        inside = 0 <= self.source_slot < self.source.slots and 0 <= self.target_slot < self.target.slots
        fits = 1 <= self.count <= min(self.source.capacity, self.target.capacity)
        cells = self.source.cells(self.source_slot), self.target.cells(self.target_slot)
        if not inside or not fits or share_cells(*cells):
            raise ValueError(f"not a copy between two slots: {self}")
