"""A scheduler and three stages in simulated time: packs and tokens overtake one another and come twice.

A stage is a real ledger and a KV store of one block in which a cell holds one token. The model is a hash of
all tokens of a sequence, so an answer is right only if every stage held exactly them.
"""

from __future__ import annotations

import heapq
import random
import struct
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

from bbquic.kv.ranges import SlotCopy, SlotRange, Tiers
from bbquic.kv.regions import Moving
from bbquic.kv.rows import RowSpan
from bbquic.model.sampling import Sampling
from bbquic.runtime.ledger import Due, Ledger
from bbquic.runtime.protocol import Move, PackHeader, Row
from bbquic.runtime.request import Completion, Request
from bbquic.runtime.scheduler import Pack, Scheduler, SchedulerOptions
from bbquic.runtime.sequence import Sequence
from bbquic.runtime.timing import StageTiming
from bbquic.runtime.trees import kept_places, onward, verdicts
from bbquic.units import Seconds

END = 0
WRONG = 1000  # what a row becomes whose KV is not there; no answer has it
JOB = "0" * 16
STAGES = 3


class Letters:
    """A text stream in which every token is one letter."""

    def push(self, token: int) -> str:
        return chr(97 + token % 26)

    def finish(self) -> str:
        return ""


def make_sequence(
    line: int, prompt: int, max_tokens: int, stop: tuple[str, ...] = (), head: tuple[int, ...] = ()
) -> Sequence:
    """A sequence whose first token behind `head` tells its line."""
    tokens = (1000 + line, *(1 + (line + place) % 500 for place in range(1, prompt)))
    request = Request(line, head + tokens, max_tokens, Sampling(), stop)
    return Sequence(request, ends=frozenset({END}), text=Letters())


def next_token(held: tuple[int, ...]) -> int:
    """A deterministic answer that depends on all tokens so far; END for about one in twenty."""
    mixed = hash(held) % 1000
    return END if mixed < 50 else mixed


def alone(request: Request) -> list[int]:
    """What is answered when nobody else is there."""
    held = list(request.tokens)
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        token = next_token(tuple(held))
        answer.append(token)
        held.append(token)
        if token == END:
            break
    return answer


def header(pack: Pack, epoch: int = 0) -> PackHeader:
    tokens = struct.pack(f"<{len(pack.tokens)}i", *pack.tokens)
    return PackHeader(
        JOB, epoch, pack.micro_batch, pack.step, pack.range.numbers, pack.rows, tokens, moves=pack.moves
    )


def passed_on(pack: Pack) -> Pack:
    """The pack as the stage behind gets it; here every stage needs all its tokens."""
    before = header(pack)
    places = kept_places(before)
    tokens = pack.tokens if places is None else tuple(pack.tokens[place] for place in places)
    return replace(pack, rows=onward(before).rows, tokens=tokens)


@dataclass(frozen=True)
class Trip:
    """A pack on its way with its tokens, the time it left, and what the stages noted."""

    pack: Pack
    left: float
    timings: tuple[StageTiming, ...] = ()


class SimulatedStage:
    """Applies what its ledger lets through; a cell is (generation, token)."""

    def __init__(self, options: SchedulerOptions, known: dict[int, list[int]]) -> None:
        """`known`: all tokens of a sequence, by the generation of its slot."""
        self.ledger: Ledger[Trip] = Ledger(
            tiers=options.tiers, micro_batches=options.micro_batches, depth=options.depth
        )
        self.busy_until = 0.0
        self.copied = self.renamed = self.kept = self.between_tiers = 0
        self._cells: list[tuple[int, int] | None] = [None] * sum(options.tiers)
        self._known = known

    def compute(self, due: Due[Trip]) -> list[int]:
        """The tokens for rows that want one. Fails where a row sees another token than its own."""
        pack, place, answers = due.load.pack, 0, list[int]()
        self._move_all(due)
        for index, row in enumerate(pack.rows):
            span = RowSpan(row.slot, row.first, row.count, due.placement.layouts.get(index))
            span.check(pack.range)
            new = pack.tokens[place : place + row.count]
            place += row.count
            if not self.holds(row):
                answers += [WRONG] * (row.count if row.tree else int(row.wants_token))
                continue
            texts = self._texts(pack.range.cells(row.slot).start, row, span, new)
            answers += [next_token(text) for text in (texts if row.tree else texts[-1:]) if row.wants_token]
        assert place == len(pack.tokens)
        for compaction in due.placement.compactions:
            self._move(compaction)
        return answers

    def holds(self, row: Row) -> bool:
        """Whether the row's slot has what it should."""
        return True

    def good(self, move: Move) -> int:
        """How many of a move's tokens are there."""
        return move.count

    def _texts(self, first: int, row: Row, span: RowSpan, new: Items[int]) -> list[tuple[int, ...]]:
        """Store a row of the slot that begins at `first`; what each of its tokens sees, with itself."""
        start = first + span.start
        self._cells[start : start + row.count] = [(row.generation, token) for token in new]
        places = [*range(first, first + span.compact), *(first + cell for cell in span.tail)]
        before = [self._cells[place] for place in places]
        assert all(cell is not None and cell[0] == row.generation for cell in before)
        text = [cell[1] for cell in before if cell is not None]
        parents = span.parents or tuple(max(0, place - 1) for place in range(row.count))
        seen: list[tuple[int, ...]] = []
        for token, parent in zip(new, parents, strict=True):
            seen.append((*(seen[parent] if seen else text), token))
        sure = seen[0 if row.tree else -1]  # of a tree the root alone is a token of the sequence
        assert list(sure) == self._known[row.generation][: len(sure)]
        return seen

    def _move_all(self, due: Due[Trip]) -> None:
        """What is to be moved first, cell by cell; then the cells are of the generations that they go to."""
        pack = due.load.pack
        for moving in due.copies:
            self._move(moving)
        copied = {copy.target_slot: copy for copy in due.copies if isinstance(copy, SlotCopy)}
        assert copied.keys() <= {move.target for move in pack.moves}
        for move in pack.moves:
            copy = copied.get(move.target)  # none: the slot stays where it is under another name
            if copy is not None:
                tiers = copy.source.tier(copy.source_slot), copy.target.tier(copy.target_slot)
                self.between_tiers += tiers[0] != tiers[1]
            self._rename(pack.range.cells(move.target), move)
            self.kept += move.keeps
            self.copied += copy is not None and not move.keeps
            self.renamed += copy is None and not move.keeps

    def _rename(self, target: range, move: Move) -> None:
        held = self._cells[target.start : target.stop]
        good = held[: self.good(move)]
        assert all(cell is not None and cell[0] == move.generation for cell in good)
        for place, cell in zip(target, good if move.keeps else held, strict=False):
            if cell is not None and cell[0] == move.generation:
                self._cells[place] = (move.target_generation, cell[1])

    def _move(self, moving: Moving) -> None:
        if isinstance(moving, SlotCopy):
            source = moving.source.cells(moving.source_slot).start
            target = moving.target.cells(moving.target_slot).start
            self._cells[target : target + moving.count] = self._cells[source : source + moving.count]
            return
        first = moving.where.cells(moving.slot).start
        held = [self._cells[first + cell] for cell in moving.sources]
        self._cells[first + moving.target : first + moving.target + len(held)] = held


@dataclass
class Chaos:
    """How often, at an event, what happens that nobody asked for."""

    repeat: float = 0.05
    preempt: float = 0.0
    restart: float = 0.0
    left: int = 60  # so often at most, or a job would never end


@dataclass
class Pipeline:
    """Runs a job's lines to their end; `jobs` are (prompt, max_tokens) of each, and `heads` what they begin
    with, in turn."""

    scheduler: Scheduler
    options: SchedulerOptions
    jobs: Items[tuple[int, int]]
    rng: random.Random
    chaos: Chaos = field(default_factory=Chaos)
    heads: Items[tuple[int, ...]] = ((),)
    delay: float = 1.0  # mean of a message's time on its way
    price: tuple[float, float] = (0.5, 0.05)  # of a pack in a stage: by itself, and for each token
    done: list[Completion] = field(default_factory=list)
    most_in_flight: int = 0
    counts: set[int] = field(default_factory=set)  # of micro-batches with a share
    copied: int = 0  # moves by the first stage, of all epochs
    renamed: int = 0
    kept: int = 0  # beginnings that were shared
    sent: int = 0  # tokens in packs
    between_tiers: int = 0  # of those copied
    ranges: set[tuple[int, SlotRange]] = field(default_factory=set)  # of packs, and how many there were then
    taken: list[int] = field(default_factory=list)  # slots, at each event at which more sequences waited
    epoch: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        lines = [self._sequence(line).request for line in range(len(self.jobs))]
        self._answers = [alone(request) for request in lines]
        self._texts = [
            [*request.tokens, *answer] for request, answer in zip(lines, self._answers, strict=True)
        ]
        self._known: dict[int, list[int]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._offered = 0
        self._waiting_rows: Counter[int] = Counter()
        self._renew()

    def _sequence(self, line: int) -> Sequence:
        prompt, max_tokens = self.jobs[line]
        return make_sequence(line, prompt, max_tokens, head=self.heads[line % len(self.heads)])

    def _note(self) -> None:
        self.counts.add(self.scheduler.micro_batches)
        if self.scheduler.room < self.options.look_ahead:
            self.taken.append(self.scheduler.live)

    def _count_moves(self) -> None:
        self.copied += self.stages[0].copied
        self.renamed += self.stages[0].renamed
        self.kept += self.stages[0].kept
        self.between_tiers += self.stages[0].between_tiers

    def _new_stage(self, place: int) -> SimulatedStage:
        return SimulatedStage(self.options, self._known)

    def _renew(self) -> None:
        self.stages = [self._new_stage(place) for place in range(STAGES)]
        self._events.clear()
        self._waiting_rows.clear()
        self._is_drafting = False

    def run(self) -> None:
        for _ in range(200_000):
            self._offer()
            self._launch()
            self._draft()
            self._note()
            if self.scheduler.is_done:
                break
            assert self._events, "nothing is on its way and the job is not done"
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            self._disturb()
        self._count_moves()
        assert self.scheduler.is_done
        assert self.scheduler.live == 0
        self._check_answers()

    def _check_answers(self) -> None:
        assert Counter(one.line for one in self.done) == Counter(range(len(self.jobs)))
        self._check_completions()

    def _check_completions(self) -> None:
        for one in self.done:
            expected = self._answers[one.line]
            assert one.generated == len(expected)
            assert list(one.tokens) == [token for token in expected if token != END]
            assert one.finish_reason == ("stop" if expected[-1] == END else "length")

    def _offer(self) -> None:
        while self._offered < len(self.jobs) and self.scheduler.room:
            if self._events and self.rng.random() < 0.5:
                return
            self.scheduler.offer(self._sequence(self._offered))
            self._offered += 1
            if self._offered == len(self.jobs):
                self.scheduler.close()

    def _launch(self) -> None:
        if self.rng.random() < 0.2:  # any micro-batch may come first
            pack = self.scheduler.next_pack(self.rng.randrange(self.options.micro_batches))
            if pack is not None:
                self._send(pack)
        while (pack := self.scheduler.any_pack()) is not None:
            self._send(pack)

    def _send(self, pack: Pack) -> None:
        flying = self.scheduler.in_flight()
        self._check_launch(pack, flying)
        self.most_in_flight = max(self.most_in_flight, len(flying))
        self.sent += len(pack.tokens)
        trip = Trip(pack, self.now)
        self._deliver(partial(self._arrive, 0, trip))

    def _check_launch(self, pack: Pack, flying: Items[Pack]) -> None:
        packs = Counter(one.micro_batch for one in flying)
        assert max(packs.values()) <= self.options.depth
        assert self.scheduler.live <= self.options.slots
        assert 1 <= self.scheduler.micro_batches <= self.options.micro_batches
        assert Tiers(self.options.tiers).hold(pack.range)
        self.ranges.add((self.scheduler.micro_batches, pack.range))
        assert not any(
            one.range.overlaps(pack.range) for one in flying if one.micro_batch != pack.micro_batch
        )
        lines = {(batch, slot): one.request.line for batch, slot, one in self.scheduler.seats()}
        for row in pack.rows:
            self._known[row.generation] = self._texts[lines[pack.micro_batch, row.slot]]
            assert not self._waiting_rows[row.generation], "a sequence with a token to come has no more rows"
            self._waiting_rows[row.generation] += row.wants_token

    def _deliver(self, happen: Callable[[], None]) -> None:
        for _ in range(2 if self.rng.random() < self.chaos.repeat else 1):
            self._at(self.now + self.rng.expovariate(1 / self.delay), happen)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, happen))

    def _arrive(self, place: int, trip: Trip) -> None:
        stage, arrived = self.stages[place], self.now
        for due in stage.ledger.admit(header(trip.pack, self.epoch), trip):
            pack = due.load.pack
            began = max(self.now, stage.busy_until)
            a, b = self.price
            stage.busy_until = ended = began + a + b * len(pack.tokens)
            tokens = stage.compute(due)
            timings = (*due.load.timings, noted(place, arrived, began, ended, len(pack.tokens)))
            if place + 1 < STAGES:
                onward = Trip(passed_on(pack), due.load.left, timings)
                happen = partial(self._arrive, place + 1, onward)
            else:
                back = Trip(pack, due.load.left, timings)
                happen = partial(self._return, back, *verdicts(header(pack), tokens.__getitem__))
            self._at(ended, partial(self._deliver, happen))

    def _return(self, trip: Trip, tokens: Items[int], paths: Items[tuple[int, ...]]) -> None:
        pack = trip.pack
        completions = self.scheduler.take_tokens(pack.micro_batch, pack.step, tokens, paths)
        if completions is None:
            return
        self.done.extend(completions)
        self.scheduler.pace.record(len(pack.tokens), Seconds(self.now - trip.left), trip.timings)
        for row in pack.rows:
            self._waiting_rows[row.generation] -= row.wants_token
        assert self.scheduler.take_tokens(pack.micro_batch, pack.step, tokens, paths) is None

    def _draft(self) -> None:
        """Let a drafter that works beside the loop begin, where it has something to do."""
        if self._is_drafting or (work := self.scheduler.asks()) is None:
            return
        self._is_drafting = True

        def done() -> None:
            self._is_drafting = False
            try:
                trees = work.draft()
            except RuntimeError as error:
                self.scheduler.stop_drafting(error)
            else:
                self.scheduler.take_drafts(work, trees)

        self._at(self.now + self.rng.expovariate(1 / self.delay), done)

    def _disturb(self) -> None:
        seats = list(self.scheduler.seats())
        if not self.chaos.left:
            return
        if seats and self.rng.random() < self.chaos.preempt:
            self.chaos.left -= 1
            micro_batch, slot, sequence = self.rng.choice(seats)
            if self.rng.random() < 0.5:
                self.scheduler.preempt(micro_batch, slot)
            else:
                assert self.scheduler.preempt_line(sequence.request.line)
        if self.rng.random() < self.chaos.restart:
            self.chaos.left -= 1
            self.scheduler.restart()
            self.epoch += 1
            self._count_moves()
            self._renew()


def noted(place: int, arrived: float, began: float, ended: float, tokens: int) -> StageTiming:
    """What a stage notes that did nothing but compute."""
    began_at, ended_at = (round((moment - arrived) * 1e6) for moment in (began, ended))
    marks = (0, 0, 0, 0, began_at, ended_at, ended_at, ended_at, ended_at, ended_at)
    return StageTiming(f"node-{place}", arrived, marks, tokens * 8, tokens * 8, 0.0)
