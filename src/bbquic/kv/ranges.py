"""How an arena is cut: pure numbers, for those who plan it and those who hold it alike.

An arena's cells are numbered tier after tier. A tier is what a stage has either on its device or in host
memory, as a whole: every micro-batch has a share of each tier, so that what is offloaded is spread evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

CELL_ALIGNMENT = 16  # tokens; capacities are multiples of it, so that slots start on cache lines
MAX_TIERS = 16  # stages that offload unequal shares have a tier more


@dataclass(frozen=True, slots=True)
class Strip:
    """Neighbouring slots of a range in one tier, from cell `offset`. There may be none."""

    offset: int
    slots: int


@dataclass(frozen=True, slots=True)
class SlotRange:
    """A micro-batch's share of the arena: equal slots of `capacity` tokens, in each tier a strip of them.

    Slots are numbered round the tiers: slot s is the (s // tiers)-th of tier s % tiers. So a strip can grow,
    or another range be joined to this one, without any slot getting another number.
    """

    strips: tuple[Strip, ...]
    capacity: int

    def __post_init__(self) -> None:
        wrong = any(strip.offset < 0 or strip.slots < 0 for strip in self.strips)
        if wrong or self.capacity < 1 or not self.count or len(self.strips) > MAX_TIERS:
            raise ValueError(f"not a slot range: {self}")

    @classmethod
    def of(cls, offset: int, slots: int, capacity: int, *more: int) -> SlotRange:
        """From numbers as packs carry them: a strip's offset and slots, the capacity, further strips.

        Raises: ValueError when they make no range.
        """
        if len(more) % 2:
            raise ValueError("a strip is an offset and a number of slots")
        further = (Strip(*pair) for pair in zip(more[::2], more[1::2], strict=True))
        return cls((Strip(offset, slots), *further), capacity)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What `of` takes."""
        first, *further = self.strips
        return first.offset, first.slots, self.capacity, *(n for s in further for n in (s.offset, s.slots))

    @property
    def tiers(self) -> int:
        return len(self.strips)

    @property
    def count(self) -> int:
        """Slots in all tiers together."""
        return sum(strip.slots for strip in self.strips)

    def __contains__(self, slot: int) -> bool:
        return slot >= 0 and slot // self.tiers < self.strips[slot % self.tiers].slots

    def slots(self) -> Iterator[int]:
        """The numbers of its slots, tier after tier: neighbours in memory follow one another."""
        for tier, strip in enumerate(self.strips):
            yield from range(tier, tier + strip.slots * self.tiers, self.tiers)

    def tier(self, slot: int) -> int:
        return slot % self.tiers

    def place(self, slot: int) -> int:
        """Where a slot is within its tier's strip, from 0."""
        return slot // self.tiers

    def number(self, tier: int, place: int) -> int:
        """The slot that is the `place`-th of a tier's strip."""
        return place * self.tiers + tier

    def cells(self, slot: int) -> range:
        """The arena's cells of a slot; of one behind a strip those that it would have."""
        first = self.strips[slot % self.tiers].offset + slot // self.tiers * self.capacity
        return range(first, first + self.capacity)

    def span(self, tier: int) -> range:
        """The cells of a tier's strip."""
        strip = self.strips[tier]
        return range(strip.offset, strip.offset + strip.slots * self.capacity)

    def overlaps(self, other: SlotRange) -> bool:
        """Whether they share a cell. Both are of one arena."""
        return any(share_cells(self.span(tier), other.span(tier)) for tier in range(self.tiers))

    def continues(self, other: SlotRange) -> bool:
        """Whether a slot of one is the same cells as that slot of the other: they differ in slots at most."""
        offsets = [strip.offset for strip in self.strips]
        return self.capacity == other.capacity and offsets == [strip.offset for strip in other.strips]

    def with_slots(self, tier: int, slots: int) -> SlotRange:
        """The same with another number of slots in a tier: grown or cut at its end, no cell moves."""
        strips = list(self.strips)
        strips[tier] = replace(strips[tier], slots=slots)
        return SlotRange(tuple(strips), self.capacity)

    def holding(self, slot: int) -> SlotRange:
        """The same, as long as a slot needs that is behind the end of its strip."""
        tier, place = self.tier(slot), self.place(slot)
        return self.with_slots(tier, max(self.strips[tier].slots, place + 1))


@dataclass(frozen=True, slots=True)
class Tiers:
    """An arena's tiers by their cells, one behind the other."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= MAX_TIERS or min(self.sizes) < 0 or not self.cells:
            raise ValueError(f"not the tiers of an arena: {self.sizes}")

    @property
    def cells(self) -> int:
        return sum(self.sizes)

    def span(self, tier: int) -> range:
        """A tier's cells."""
        stop = list(accumulate(self.sizes))[tier]
        return range(stop - self.sizes[tier], stop)

    def hold(self, where: SlotRange) -> bool:
        """Whether each strip of a range is within its tier."""
        if where.tiers != len(self.sizes):
            return False
        spans = [(self.span(tier), where.span(tier)) for tier in range(where.tiers)]
        return all(outer.start <= inner.start and inner.stop <= outer.stop for outer, inner in spans)


def share_cells(one: range, other: range) -> bool:
    """Whether two stretches of the arena overlap."""
    return max(one.start, other.start) < min(one.stop, other.stop)


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The first `count` cells of a slot of one range go to another slot, in every block of a stage."""

    source: SlotRange
    source_slot: int
    target: SlotRange
    target_slot: int
    count: int

    def __post_init__(self) -> None:
        inside = self.source_slot in self.source and self.target_slot in self.target
        fits = 1 <= self.count <= min(self.source.capacity, self.target.capacity)
        if not inside or not fits:
            raise ValueError(f"not a copy between two slots: {self}")
        if share_cells(self.source.cells(self.source_slot), self.target.cells(self.target_slot)):
            raise ValueError(f"not a copy between two slots: {self}")
