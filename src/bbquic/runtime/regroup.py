"""The tail of a job: in how many micro-batches the last sequences should sit, and who moves where. Pure."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bbquic.units import Seconds

WORTH = 0.95  # of the step as it is: a smaller gain is within what the fit may err by

Cost = Callable[[float], Seconds]  # seconds for a pack of so many rows


@dataclass(frozen=True, slots=True)
class Room:
    """A micro-batch that may take others' sequences: slot length, free slots, sequences in it."""

    capacity: int
    free: int
    live: int


def best_count(rows: Items[int], *, cycle: Cost, loop: Cost) -> int:
    """How many of the micro-batches, which have `rows` each, the sequences should sit in.

    The step of M micro-batches of equal size is max(M cycle(R/M), loop(R/M)), R being all rows: fewer cost
    less where each pack has a price of its own and the pipeline is full; more where the loop is long.
    `len(rows)` where no smaller number makes the step shorter by 1 - WORTH.
    """
    if len(rows) < 2:
        return len(rows)
    total = sum(rows)
    now = max(sum(cycle(count) for count in rows), max(loop(count) for count in rows))
    steps = {m: max(m * cycle(total / m), loop(total / m)) for m in range(1, len(rows))}
    best = min(steps, key=lambda m: steps[m])
    return best if steps[best] <= WORTH * now else len(rows)


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
