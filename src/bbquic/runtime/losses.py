"""Packs that a stage lost: whose KV is gone with one, and whose tokens wait until it is known. Pure.

A loss can be heard of after the tokens of a pack behind the lost one, for messages overtake one another.
Those tokens rest on KV that is not there, so a pack's tokens count once all it rests on has come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from bbquic.runtime.protocol import Lost
from bbquic.runtime.seats import Flight, MicroBatch, Seat

# A sequence whose rows were lost reads again by itself and in smaller chunks: it harms nobody then, and when
# that fails too it is its own doing, or the node has nothing left for anybody.
MOST_LOST = 2
SMALLER = 4  # times; what a pack needs beside its KV grows with its tokens
_NOTICES = 3  # that are kept for who watches

_Seat = tuple[int, int, int]  # micro-batch, slot, generation


def must_wait(batches: Items[MicroBatch], flight: Flight) -> bool:
    """Whether a pack is on its way that this one rests on: with earlier rows of its seats, or of the slots
    that its moves take from."""
    pack = flight.pack
    if any(move.step in batches[move.micro_batch].flights for move in pack.moves):
        return True
    before = [one for step, one in batches[pack.micro_batch].flights.items() if step < pack.step]
    seats = set(flight.seats) if before else set()
    return any(not seats.isdisjoint(one.seats) for one in before)


def gone_with(batches: Items[MicroBatch], flight: Flight) -> dict[_Seat, int]:
    """The seats that a lost pack leaves without their KV, and how many tokens are still good: those of its
    rows, and whoever fetches theirs from these, by moves that are on their way or are yet to be made."""
    pack = flight.pack
    good = {
        (pack.micro_batch, row.slot, row.generation): row.first - len(row.accepted or ()) for row in pack.rows
    }
    for move in pack.moves:  # not made on the stages behind
        good[pack.micro_batch, move.target, move.target_generation] = 0
    moves = [
        (batch.index, move) for batch in batches for one in batch.flights.values() for move in one.pack.moves
    ]
    moves += [(batch.index, seat.move) for batch in batches for _, seat in batch.seats() if seat.move]
    known = 0
    while known < len(good):
        known = len(good)
        for index, move in moves:
            first = good.get((move.micro_batch, move.slot, move.generation))
            if first is not None and move.count > first:
                good.setdefault((index, move.target, move.target_generation), first)
    return good


def blamed(flight: Flight) -> set[Seat]:
    """Whose doing a loss may be: chunks of prompts are what takes memory, so not decode rows beside them."""
    rows = list(zip(flight.pack.rows, flight.seats, strict=True))
    chunks = {seat for row, seat in rows if row.count > 1 and row.tree is None}
    return chunks or {seat for _, seat in rows}


class Notices:
    """What was lost of late, in words."""

    def __init__(self) -> None:
        self.words: deque[str] = deque(maxlen=_NOTICES)

    def add(self, lost: Lost, flight: Flight, *, again: int, ended: int) -> None:
        """`again` lines are read once more, `ended` have an error record."""
        what = "ran out of memory" if lost.code == "out_of_memory" else f"lost a pack ({lost.code})"
        pack = flight.pack
        parts = [f"{_lines(again)} read again"] if again or not ended else []
        parts += [f"{_lines(ended)} given up"] if ended else []
        self.words.append(
            f"{lost.node} {what} at micro-batch {pack.micro_batch}, step {pack.step}; {', '.join(parts)}"
        )


def _lines(count: int) -> str:
    return "1 line is" if count == 1 else f"{count} lines are"
