"""The arena's tiers from how many slots each stage keeps in host memory: pure numbers.

All stages number the cells alike. A stage that keeps more slots on the host has more tiers there, always the
last ones: with K of 4, 0 and 12 of 32 slots tiers are of 20, 8 and 4 slots, and the stages have the last 1, 0
and 2 of them on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bbquic.kv.ranges import CELL_ALIGNMENT, MAX_TIERS
from bbquic.plan.cost import whole_slots


@dataclass(frozen=True, slots=True)
class Room:
    """Cells that a stage has memory for: on its device and, for offloaded slots, on its host. `host` None:
    both are one memory, of `device` cells."""

    device: int
    host: int | None

    def slot(self, offloaded: int, batch: int) -> int:
        """The longest slots, `offloaded` of `batch` on the host, that fit."""
        if self.host is None:
            return self.device // batch
        sides = ((self.device, batch - offloaded), (self.host, offloaded))
        return min(cells // slots for cells, slots in sides if slots)

    def takes(self, on_device: int, on_host: int) -> bool:
        """Whether so many cells fit on either side."""
        if self.host is None:
            return on_device + on_host <= self.device
        return on_device <= self.device and on_host <= self.host


@dataclass(frozen=True, slots=True)
class Tiering:
    """Cells of each tier, and how many of the last tiers each stage has on its host."""

    sizes: tuple[int, ...]
    on_host: tuple[int, ...]

    def on_device(self, stage: int) -> int:
        """Cells of a stage's device."""
        return sum(self.sizes) - self.beside(stage)

    def beside(self, stage: int) -> int:
        """Cells in a stage's host memory."""
        return sum(self.sizes[len(self.sizes) - self.on_host[stage] :])


def longest_slot(rooms: Sequence[Room], offloaded: Sequence[int], batch: int, wish: int) -> int:
    """Tokens of a slot, `wish` at most, such that every stage holds all slots; a multiple of CELL_ALIGNMENT,
    0 where not even such a short one fits."""
    fits = min(room.slot(slots, batch) for room, slots in zip(rooms, offloaded, strict=True))
    return min(fits, wish) // CELL_ALIGNMENT * CELL_ALIGNMENT


def tiers_of(
    offloaded: Sequence[int], rooms: Sequence[Room], *, batch: int, slot: int, micro_batches: int
) -> Tiering:
    """Tiers for `batch` slots of `slot` cells in equal micro-batches, `offloaded` of them at each stage.

    A stage never has more on its device than the slots that it keeps there, nor less on its host than was
    asked for. Where host memory allows, what is there is rounded up, so that each micro-batch has whole slots
    in every tier. `rooms` hold what is asked for (`longest_slot`).
    """
    sides = list(zip(offloaded, rooms, strict=True))
    held = [_evenly(slots, room, batch, slot, micro_batches) for slots, room in sides]
    levels = _few(sorted({slots for slots in held if slots}))
    held = [next((level for level in levels if level >= slots > 0), 0) for slots in held]
    steps = [after - before for before, after in pairwise([0, *levels])]
    rest = batch - sum(steps)
    spare = -batch % micro_batches  # what the last tier lacks for whole slots of each micro-batch
    if spare and all(
        slots and room.takes((batch - slots) * slot, (slots + spare) * slot)
        for slots, room in zip(held, rooms, strict=True)
    ):
        steps[0] += spare
    sizes = [slots * slot for slots in (*([rest] if rest else []), *reversed(steps))]
    return Tiering(tuple(sizes), tuple(sum(level <= slots for level in levels) for slots in held))


def _evenly(slots: int, room: Room, batch: int, slot: int, micro_batches: int) -> int:
    """As many slots of each micro-batch, where the host has the memory."""
    more = whole_slots(slots, batch, micro_batches)
    return more if room.takes((batch - more) * slot, more * slot) else slots


def _few(levels: list[int]) -> list[int]:
    """No more than there can be tiers: those between go up to the next, where that is least."""
    while len(levels) > MAX_TIERS - 1:
        widths = [after - before for before, after in zip([0, *levels], levels[1:], strict=False)]
        place = widths.index(min(widths))
        levels = [*levels[:place], *levels[place + 1 :]]
    return levels
