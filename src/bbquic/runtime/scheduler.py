"""Which rows each micro-batch carries next: continuous batching over circulating micro-batches.

Pure: requests and tokens in, packs and completions out. A micro-batch's decode rows travel in one pack, which
starts anew when its tokens are back, whatever the other micro-batches are at; packs with chunks of prompts
alone may be on their way beside it (architecture: circulating micro-batches).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bbquic.errors import RecordError
from bbquic.runtime.pace import MeasuredPace, Pace
from bbquic.runtime.packing import Packing
from bbquic.runtime.protocol import Move
from bbquic.runtime.regroup import Room, places
from bbquic.runtime.request import Completion
from bbquic.runtime.seating import Seating
from bbquic.runtime.seats import MicroBatch, Pack, Seat
from bbquic.runtime.sequence import Sequence

__all__ = ["DEPTH", "Pack", "Scheduler", "SchedulerOptions"]

DEPTH = 4  # packs of a micro-batch on their way: one with decode rows, and chunks of prompts behind it


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """`slots` sequences in flight at most, in `micro_batches`, over an arena of `cells` tokens a block."""

    micro_batches: int
    slots: int
    cells: int
    prefill_tokens: int = (
        512  # prompt tokens of one pack: enough to fill a device, little enough to decode beside
    )
    look_ahead: int = 256  # records read ahead, so that like lengths can share a micro-batch
    depth: int = DEPTH  # packs of a micro-batch on their way at most; the plan's, or less

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batches <= self.slots:
            raise ValueError(f"{self.slots} slots do not make {self.micro_batches} micro-batches")
        if self.prefill_tokens < 1 or self.look_ahead < 1 or self.depth < 1:
            raise ValueError("prefill_tokens, look_ahead and depth are at least 1")


class Scheduler:
    """Owns every sequence between `offer` and its completion."""

    def __init__(self, options: SchedulerOptions, pace: Pace | None = None) -> None:
        """`pace` decides how many packs there are and how large; by measurements where none is given."""
        self.pace: Pace = pace or MeasuredPace(
            micro_batches=options.micro_batches, depth=options.depth, prefill_tokens=options.prefill_tokens
        )
        self.generated = 0  # tokens of answers
        self.moved = 0  # sequences that changed their micro-batch
        self.preempted = 0  # sequences whose KV was dropped
        self._options = options
        self._seating = Seating(micro_batches=options.micro_batches, slots=options.slots, cells=options.cells)

    @property
    def room(self) -> int:
        """How many more sequences the look-ahead takes."""
        return max(0, self._options.look_ahead - len(self._seating.waiting))

    @property
    def live(self) -> int:
        """Sequences that hold a slot."""
        return self._seating.live

    @property
    def is_done(self) -> bool:
        return self._seating.is_closed and not self._seating.waiting and not self.live

    def offer(self, sequence: Sequence) -> None:
        """Take a sequence. Raises: RecordError `does_not_fit` when no arena share could ever hold it."""
        largest = self._seating.largest_need
        if sequence.need > largest:
            raise RecordError(
                "does_not_fit",
                f"prompt and answer need {sequence.need} tokens of KV memory, the nodes hold {largest}",
            )
        self._seating.waiting.append(sequence)

    def close(self) -> None:
        """No more sequences will be offered."""
        self._seating.is_closed = True

    def in_flight(self) -> tuple[Pack, ...]:
        """The packs that are on their way just now."""
        return tuple(flight.pack for batch in self._seating.batches for flight in batch.flights.values())

    def any_pack(self) -> Pack | None:
        """The next pack to launch, of whichever micro-batch has the fewest on their way; None: none now."""
        order = sorted(self._seating.batches, key=lambda batch: len(batch.flights))
        return next((pack for batch in order if (pack := self.next_pack(batch.index)) is not None), None)

    def next_pack(self, micro_batch: int) -> Pack | None:
        """The next step of a micro-batch; None when it has nothing to do before something comes back.

        Every pack that is given out is on its way until `take_tokens` has its answer.
        """
        batch = self._seating.batches[micro_batch]
        if len(batch.flights) >= self._options.depth:
            return None
        self._seating.refill(batch)
        ready: list[int] = []
        if not batch.has_decode_rows_in_flight:
            ready = [slot for slot, seat in batch.seats() if seat.sequence.decodes]
            if ready and self._dissolve(batch):
                return None
        if not ready and not self._may_read_ahead(batch):
            return None
        return self._launch(batch, ready)

    def _may_read_ahead(self, batch: MicroBatch) -> bool:
        """Whether a pack with nothing but prompts may leave: one a micro-batch, more inside the window."""
        flying = sum(len(one.flights) for one in self._seating.batches)
        return not batch.flights or flying < self.pace.window()

    def _launch(self, batch: MicroBatch, ready: list[int]) -> Pack | None:
        """Decode rows in slot order (neighbours attend together), then prompts, the oldest first."""
        packing = Packing(batch)
        for slot in ready:
            packing.add_row(slot, _seat(batch, slot), 1)
        reading = [(slot, seat) for slot, seat in batch.seats() if seat.sequence.reads]
        if reading:
            budget = self.pace.chunk(len(ready), max(one.decoding for one in self._seating.batches))
            for slot, seat in sorted(reading, key=lambda pair: pair[1].generation):
                if budget > 0:
                    budget -= packing.add_row(slot, seat, budget)
        flight = packing.flight(decodes=bool(ready))
        return flight.pack if flight else None

    def take_tokens(self, micro_batch: int, step: int, tokens: Items[int]) -> list[Completion] | None:
        """The tokens of a step; gives the answers that ended with it. Steps come back in any order.

        None for a step that was answered before (a repeat). Raises: ValueError when no such step was
        ever made or the count of tokens is not the step's.
        """
        batches = self._seating.batches
        if not 0 <= micro_batch < len(batches):
            raise ValueError(f"there is no micro-batch {micro_batch}")
        batch = batches[micro_batch]
        if step > batch.step or step < 1:
            raise ValueError(f"micro-batch {micro_batch} has no step {step} on its way")
        flight = batch.flights.get(step)
        if flight is None:
            return None
        wanting = [
            (row.slot, seat)
            for row, seat in zip(flight.pack.rows, flight.seats, strict=True)
            if row.wants_token
        ]
        if len(tokens) != len(wanting):
            raise ValueError(f"{len(tokens)} tokens for {len(wanting)} rows")
        del batch.flights[step]
        for move in flight.pack.moves:
            batches[move.micro_batch].leaving.discard(move.slot)
        completions = []
        for (slot, seat), token in zip(wanting, tokens, strict=True):
            if not seat.is_taken:
                continue
            self.generated += 1
            if seat.sequence.push(token) is not None:
                completions.append(seat.sequence.completion())
                self._leave(batch, slot)
        return completions

    def preempt(self, micro_batch: int, slot: int) -> None:
        """Drop the KV of the sequence in a slot; it waits before all others, reads again and goes on.

        What is on its way for it is ignored when it comes. Raises: ValueError for a slot nobody is in.
        """
        batch = self._seating.batches[micro_batch]
        seat = batch.slots[slot] if 0 <= slot < len(batch.slots) else None
        if seat is None:
            raise ValueError(f"nobody is in slot {slot} of micro-batch {micro_batch}")
        if seat.move is not None:  # not made yet, and now never
            self._seating.batches[seat.move.micro_batch].leaving.discard(seat.move.slot)
        self._leave(batch, slot)
        self._forget([seat.sequence])

    def preempt_line(self, line: int) -> bool:
        """The same by the job's line; False when that line holds no slot."""
        for batch in self._seating.batches:
            for slot, seat in batch.seats():
                if seat.sequence.request.line == line:
                    self.preempt(batch.index, slot)
                    return True
        return False

    def restart(self) -> None:
        """Drop all KV and all that is on its way: the stages begin a new epoch, at step 1 and with nothing.

        The caller keeps tokens of the epoch before from coming here.
        """
        self._forget(self._seating.clear())

    def _forget(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            sequence.forget()
        self.preempted += len(sequences)
        self._seating.return_first(sequences)

    @staticmethod
    def _leave(batch: MicroBatch, slot: int) -> None:
        _seat(batch, slot).is_taken = False
        batch.slots[slot] = None

    def _dissolve(self, batch: MicroBatch) -> bool:
        """In a job's tail, move all sequences of the smallest micro-batch into others, where that pays.

        They wait for the next decode rows of the micro-batch they go to. Only a sequence whose newest token
        is back is moved, so every stage has applied all its rows.
        """
        if self._seating.waiting or not self._seating.is_closed:
            return False
        peers = [one for one in self._seating.batches if one.live]
        rows = [one.live for one in peers]
        leaving = [seat for _, seat in batch.seats()]
        can_leave = all(seat.sequence.decodes and seat.move is None for seat in leaving)
        if not can_leave or batch.live > min(rows) or self.pace.micro_batches(rows) >= len(peers):
            return False
        others = [one for one in peers if one is not batch and one.range is not None]
        rooms = [Room(one.range.capacity, len(one.free), one.live) for one in others if one.range is not None]
        chosen = places([seat.sequence.need for seat in leaving], rooms)
        if chosen is None:
            return False
        for (slot, _), place in zip(list(batch.seats()), chosen, strict=True):
            self._move(batch, slot, others[place])
        return True

    def _move(self, source: MicroBatch, slot: int, target: MicroBatch) -> None:
        """Reseat a sequence; the move itself travels with its next row. Until that row's pack is back, the
        source's cells belong to the move."""
        old = _seat(source, slot)
        new = self._seating.new_seat(old.sequence)
        place = target.free[0]
        new.move = Move(
            micro_batch=source.index,
            slot=slot,
            generation=old.generation,
            step=old.step,
            target=place,
            target_generation=new.generation,
            count=old.sequence.computed,
        )
        self._leave(source, slot)
        source.leaving.add(slot)
        target.slots[place] = new
        self.moved += 1

    def seats(self) -> Iterator[tuple[int, int, Sequence]]:
        """(micro-batch, slot, sequence) of all that hold a slot."""
        for batch in self._seating.batches:
            for slot, seat in batch.seats():
                yield batch.index, slot, seat.sequence


def _seat(batch: MicroBatch, slot: int) -> Seat:
    seat = batch.slots[slot]
    assert seat is not None, f"nobody is in slot {slot} of micro-batch {batch.index}"
    return seat
