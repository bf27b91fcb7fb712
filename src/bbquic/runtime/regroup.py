"""Which sequence moves into which micro-batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """A micro-batch that may take others' sequences: slot length, free slots, sequences in it."""

    capacity: int
    free: int
    live: int


def places(needs: Items[int], rooms: Items[Room]) -> list[int] | None:
    """For each sequence the index of the room that takes it; None where not all of them fit.

    The longest is placed first, among those that fit in the one with the fewest rows: whatever a longer
    one took, a shorter one could have used too, so no choice made here shuts another out.
    """
    free = [room.free for room in rooms]
    live = [room.live for room in rooms]
    chosen = [0] * len(needs)
    for index in sorted(range(len(needs)), key=lambda one: -needs[one]):
        fitting = [at for at, room in enumerate(rooms) if free[at] and room.capacity >= needs[index]]
        if not fitting:
            return None
        at = min(fitting, key=lambda one: live[one])
        chosen[index] = at
        free[at] -= 1
        live[at] += 1
    return chosen
