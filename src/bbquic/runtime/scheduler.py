"""Which rows each micro-batch carries next: continuous batching over circulating micro-batches.

Pure: requests and tokens in, packs and completions out. A micro-batch's decode rows travel in one pack, which
starts anew when its tokens are back, whatever the other micro-batches are at; packs with chunks of prompts
alone may be on their way beside it (architecture: circulating micro-batches).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bbquic.draft.drafter import Drafter, Speculation
from bbquic.draft.tree import DraftTree
from bbquic.errors import RecordError
from bbquic.kv.ranges import Tiers
from bbquic.runtime.drafting import Drafting, DraftWork
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.losses import MOST_LOST, SMALLER, Notices, blamed, gone_with, must_wait
from bbquic.runtime.pace import MeasuredPace, Pace
from bbquic.runtime.packing import Packing
from bbquic.runtime.prefixes import Prefixes
from bbquic.runtime.protocol import MAX_TREE, Lost
from bbquic.runtime.regrouping import Regrouping
from bbquic.runtime.request import Completion, Outcome, Unanswerable
from bbquic.runtime.seating import Seating
from bbquic.runtime.seats import Flight, MicroBatch, Pack
from bbquic.runtime.sequence import Sequence
from bbquic.runtime.trees import Answered, answers_by_row

__all__ = ["DEPTH", "Pack", "Scheduler", "SchedulerOptions"]

DEPTH = 4  # packs of a micro-batch on their way: one with decode rows, and chunks of prompts behind it


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """`slots` sequences in flight and `micro_batches` at most, over an arena of these tiers.

    `start` of the micro-batches are there at first, and their number then follows the pace; None: all are
    there, and only a job's tail joins them.
    """

    micro_batches: int
    slots: int
    tiers: tuple[int, ...]  # of the arena, in cells
    prefill_tokens: int = (
        512  # prompt tokens of one pack: enough to fill a device, little enough to decode beside
    )
    look_ahead: int = 256  # records read ahead, so that like lengths can share a micro-batch
    depth: int = DEPTH  # packs of a micro-batch on their way at most; the plan's, or less
    start: int | None = None
    shares_prefixes: bool = True  # what prompts begin with in common is read once, and copied
    most_guesses: int = 0  # of a row's tree: every slot has room for such trees and their holes
    kept_guesses: int | None = None  # the most probable ones that go on from the first stage; None: all
    always_guesses: bool = False  # as many as may be, whether it pays or not

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batches <= self.slots:
            raise ValueError(f"{self.slots} slots do not make {self.micro_batches} micro-batches")
        if self.start is not None and not 1 <= self.start <= self.micro_batches:
            raise ValueError(f"of {self.micro_batches} micro-batches {self.start} cannot be the first")
        if self.prefill_tokens < 1 or self.look_ahead < 1 or self.depth < 1:
            raise ValueError("prefill_tokens, look_ahead and depth are at least 1")
        if not 0 <= self.most_guesses < MAX_TREE or (self.kept_guesses is not None and self.kept_guesses < 0):
            raise ValueError(f"a tree has 0 to {MAX_TREE - 1} guesses")


class Scheduler:
    """Owns every sequence between `offer` and its completion."""

    def __init__(
        self,
        options: SchedulerOptions,
        pace: Pace | None = None,
        drafter: Drafter | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`pace` decides how many packs there are and how large; by measurements where none is given.
        `drafter` guesses what comes next, as much as `speculation` says; nothing is guessed without both."""
        self.pace: Pace = pace or MeasuredPace(
            micro_batches=options.micro_batches,
            depth=options.depth,
            prefill_tokens=options.prefill_tokens,
            start=options.start,
        )
        self.generated = 0  # tokens of answers
        self.preempted = 0  # sequences whose KV was dropped
        self.shared = 0  # tokens of prompts that were copied from other slots in place of being read
        self._came: dict[tuple[int, int], list[Answered]] = {}  # of steps that rest on others on their way
        self._drafting = Drafting(drafter, speculation, most=options.most_guesses, kept=options.kept_guesses)
        self._notices = Notices()
        self._options = options
        self._prefixes = Prefixes() if options.shares_prefixes else None
        self._seating = Seating(
            micro_batches=options.micro_batches,
            slots=options.slots,
            tiers=Tiers(options.tiers),
            start=options.start,
            shares_prefixes=options.shares_prefixes,
        )
        self._regrouping = Regrouping(self._seating)

    @property
    def moved(self) -> int:
        """Sequences that changed their micro-batch."""
        return self._regrouping.moved

    @property
    def micro_batches(self) -> int:
        """How many share the arena just now."""
        return len(self._seating.active)

    def decisions(self) -> tuple[str, ...]:
        """What was decided and why, the newest last: what each hop is to the loop, changes of the number of
        micro-batches, how it is now, what was lost or drafts no more, and what a change waits for."""
        waits = self._regrouping.waits_for
        words = (*self.pace.decisions(), *self._notices.words, *self._drafting.words)
        return (*words, *([f"waiting: {waits}"] if waits else []))

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
        share = self._seating.least_share  # room for drafts is not worth a longer slot than that
        sequence.room = self._drafting.room(share if sequence.need <= share else largest, sequence.need)
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
        return tuple(
            flight.pack
            for batch in self._seating.batches
            for step, flight in batch.flights.items()
            if (batch.index, step) not in self._came
        )

    def any_pack(self) -> Pack | None:
        """The next pack to launch, of whichever micro-batch has the fewest on their way; None: none now."""
        while True:
            changes = self._regrouping.changes
            order = sorted(self._seating.batches, key=lambda batch: len(batch.flights))
            pack = next((pack for batch in order if (pack := self.next_pack(batch.index)) is not None), None)
            if pack is not None or self._regrouping.changes == changes:
                return pack

    def next_pack(self, micro_batch: int) -> Pack | None:
        """The next step of a micro-batch; None when it has nothing to do before something comes back.

        Every pack that is given out is on its way until `take_tokens` has its answer.
        """
        batch = self._seating.batches[micro_batch]
        if len(batch.flights) - sum(index == micro_batch for index, _ in self._came) >= self._options.depth:
            return None
        self._regrouping.release()
        if self._regrouping.holds(batch, self._wanted()):
            return None
        self._seating.refill(batch)
        ready: list[int] = []
        if not batch.has_decode_rows_in_flight:
            ready = [slot for slot, seat in batch.seats() if seat.sequence.decodes]
        if ready and self._drafting.holds(micro_batch, [batch.seat(slot).sequence for slot in ready]):
            ready = []
        if not ready and not self._may_read_ahead(batch):
            return None
        return self._launch(batch, ready)

    @property
    def drafts(self) -> Drafts:
        """What drafting came to so far."""
        return self._drafting.drafts

    @property
    def drafts_beside(self) -> bool:
        """Whether the drafter works beside the loop, and `asks` tells it what to do."""
        return self._drafting.has_cycle

    def asks(self) -> DraftWork | None:
        """What is to be drafted now that the drafter is free; None: nothing. Decode rows wait for it."""
        return self._drafting.work()

    def take_drafts(self, work: DraftWork, trees: Items[DraftTree]) -> None:
        """Let those go on that wait for the trees of `work`."""
        self._drafting.take(work, trees)

    def stop_drafting(self, error: BaseException) -> None:
        """Go on without drafts: the drafter failed."""
        self._drafting.stop(error)

    def _wanted(self) -> int:
        """How many micro-batches there are to be."""
        rows = [one.live for one in self._seating.active]
        adapts = self._options.start is not None
        if not adapts and (self._seating.waiting or not self._seating.is_closed):
            return len(rows)
        most = self._options.micro_batches if adapts else len(rows)
        return max(1, min(self.pace.micro_batches(rows, most), most))

    def _may_read_ahead(self, batch: MicroBatch) -> bool:
        """Whether a pack with nothing but prompts may leave: one a micro-batch, more inside the window."""
        flying = sum(len(one.flights) for one in self._seating.batches)
        return not batch.flights or flying < self.pace.window()

    def _launch(self, batch: MicroBatch, ready: list[int]) -> Pack | None:
        """Decode rows in slot order (neighbours attend together), then prompts, the oldest first. What was
        lost once is read by itself, a chunk at a time; decode rows then leave in the pack behind."""
        packing = Packing(batch, self._prefixes)
        reading = [(slot, seat) for slot, seat in batch.seats() if seat.sequence.reads]
        decoding = max(one.decoding for one in self._seating.batches)
        suspects = [(slot, seat) for slot, seat in reading if seat.sequence.losses]
        alone = next((one for one in suspects if one[1].step not in batch.flights), None)
        if alone is not None:
            packing.add_row(*alone, max(1, self.pace.chunk(0, decoding) // SMALLER))
            flight = packing.flight()
            return flight.pack if flight else None
        guesses = self._drafting.launched(batch.index) if ready else 0
        own = 0
        for slot in ready:
            seat = batch.seat(slot)
            draft = self._drafting.draft_of(seat.sequence, guesses)
            own += packing.add_decode_row(slot, seat, draft, self._drafting.kept(draft))
        reading = [one for one in reading if one not in suspects]
        if reading:
            budget = self.pace.chunk(own, decoding)
            for slot, seat in sorted(reading, key=lambda pair: pair[1].generation):
                if budget > 0 and (
                    seat.sequence.computed or packing.begin(slot, seat, self._seating.retiring)
                ):
                    budget -= packing.add_row(slot, seat, budget)
        flight = packing.flight(guesses)
        if flight is None:
            return None
        self.shared += flight.pack.shared_tokens
        return flight.pack

    def take_tokens(
        self,
        micro_batch: int,
        step: int,
        tokens: Items[int],
        paths: Items[tuple[int, ...]] = (),
        reached: Items[int] | None = None,
    ) -> list[Completion] | None:
        """The tokens of a step, the accepted paths of its trees and how many nodes of them `reached` the last
        stage; gives the answers that ended with it and with those that waited for it. Steps come back in any
        order; their tokens count once all that they rest on is back.

        None for a step that was answered before (a repeat). Raises: ValueError when no such step was
        ever made or tokens and paths are not the step's.
        """
        flight = self._on_its_way(micro_batch, step)
        if flight is None:
            return None
        pack = flight.pack
        self._came[micro_batch, step] = answers_by_row(pack.rows, pack.tokens, tokens, paths, reached)
        return self._settle()

    def lose(self, micro_batch: int, step: int, lost: Lost) -> list[Outcome] | None:
        """A stage lost a step: whoever needs what it stored waits before all others and reads again, but for
        those that were lost too often. Gives their ends, and the answers that waited for the step.

        None for a step that was answered before. Raises: ValueError when no such step was ever made.
        """
        flight = self._on_its_way(micro_batch, step)
        if flight is None:
            return None
        self._land(flight)
        batches = self._seating.batches
        gone, causes = gone_with(batches, flight), blamed(flight)
        taken = [
            (batch, slot, seat)
            for batch in batches
            for slot, seat in batch.seats()
            if (batch.index, slot, seat.generation) in gone
        ]
        for batch, slot, seat in taken:
            self._unseat(batch, slot)
            seat.sequence.losses += seat in causes
        for batch in batches:
            for slot, seat in batch.residues.items():
                seat.left = min(seat.left, gone.get((batch.index, slot, seat.generation), seat.left))
        sequences = [seat.sequence for *_, seat in sorted(taken, key=lambda one: one[2].generation)]
        ended = [one for one in sequences if one.losses >= MOST_LOST]
        self._forget([one for one in sequences if one not in ended])
        for one in ended:
            self._drafting.forget(one)
        self._notices.add(lost, flight, again=len(sequences) - len(ended), ended=len(ended))
        outcomes = [Unanswerable(one.request.line, lost.code, lost.message) for one in ended]
        return [*outcomes, *self._settle()]

    def _on_its_way(self, micro_batch: int, step: int) -> Flight | None:
        """The pack of a step, None where it was answered. Raises: ValueError when it was never made."""
        batches = self._seating.batches
        if not 0 <= micro_batch < len(batches):
            raise ValueError(f"there is no micro-batch {micro_batch}")
        batch = batches[micro_batch]
        if step > batch.step or step < 1:
            raise ValueError(f"micro-batch {micro_batch} has no step {step} on its way")
        return None if (micro_batch, step) in self._came else batch.flights.get(step)

    def _land(self, flight: Flight) -> None:
        """A pack is on its way no more, and its moves are over."""
        batches, pack = self._seating.batches, flight.pack
        del batches[pack.micro_batch].flights[pack.step]
        for move in pack.moves:
            batches[move.micro_batch].was_read(move)

    def _settle(self) -> list[Completion]:
        """Take the tokens that rest on nothing which is on its way."""
        completions: list[Completion] = []
        batches = self._seating.batches
        while self._came:
            flights = [batches[index].flights[step] for index, step in self._came]
            flight = next((one for one in flights if not must_wait(batches, one)), None)
            if flight is None:
                break
            answers = self._came.pop((flight.pack.micro_batch, flight.pack.step))
            completions += self._commit(flight, answers)
        return completions

    def _commit(self, flight: Flight, answers: list[Answered]) -> list[Completion]:
        """Hand a pack's tokens to the sequences that still have the seats of its rows. One that ends within a
        path leaves, and what is behind its end is dropped."""
        self._land(flight)
        pack, decoding = flight.pack, len(flight.trees)
        batch = self._seating.batches[pack.micro_batch]
        rows = zip(pack.rows, flight.seats, strict=True)
        wanting = [(row.slot, seat) for row, seat in rows if row.wants_token]
        completions: list[Completion] = []
        committed = decoded = 0
        for place, ((slot, seat), (tokens, path, kept)) in enumerate(zip(wanting, answers, strict=True)):
            if not seat.is_taken:
                continue
            sequence = seat.sequence
            count = sequence.take(tokens)
            self.generated += count
            if place < decoding:
                decoded, committed = decoded + 1, committed + count
            if path is not None:
                seat.accepted = path[:count]
                self._learn(sequence, flight.trees[place], path, kept)
            if sequence.has_ended:
                completions.append(sequence.completion())
                self._drafting.forget(sequence)
                batch.leave(slot)
        self._drafting.noted(batch.index, decoded, flight.guesses, committed)
        return completions

    def _learn(self, sequence: Sequence, tree: DraftTree | None, path: tuple[int, ...], kept: int) -> None:
        assert tree is not None, "a path is of a tree that was drafted"
        self._drafting.learn(sequence, tree, path, kept)

    def preempt(self, micro_batch: int, slot: int) -> None:
        """Drop the KV of the sequence in a slot; it waits before all others, reads again and goes on.

        What is on its way for it is ignored when it comes. Raises: ValueError for a slot nobody is in.
        """
        batch = self._seating.batches[micro_batch]
        seat = batch.slots.get(slot)
        if seat is None:
            raise ValueError(f"nobody is in slot {slot} of micro-batch {micro_batch}")
        self._unseat(batch, slot)
        self._forget([seat.sequence])

    def _unseat(self, batch: MicroBatch, slot: int) -> None:
        seat = batch.leave(slot)
        if seat.move is not None:  # not made yet, and now never
            self._seating.batches[seat.move.micro_batch].was_read(seat.move)

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
        self._came.clear()
        self._drafting.clear()
        self._forget(self._seating.clear())
        self._prefixes = Prefixes() if self._options.shares_prefixes else None

    def _forget(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            sequence.forget()
        self.preempted += len(sequences)
        self._seating.return_first(sequences)

    def seats(self) -> Iterator[tuple[int, int, Sequence]]:
        """(micro-batch, slot, sequence) of all that hold a slot."""
        for batch in self._seating.batches:
            for slot, seat in batch.seats():
                yield batch.index, slot, seat.sequence
