"""Packs that a stage loses: their lines are read again and answered as ever, or have their error, once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_simulation import (
    STAGES,
    Chaos,
    Pipeline,
    SimulatedStage,
    Trip,
    header,
    make_sequence,
    noted,
    passed_on,
)

from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange
from bbquic.runtime.ledger import Due
from bbquic.runtime.losses import gone_with, must_wait
from bbquic.runtime.protocol import Lost, Move, PackHeader, Row, TokensHeader
from bbquic.runtime.request import Outcome, Unanswerable
from bbquic.runtime.scheduler import Pack, Scheduler, SchedulerOptions
from bbquic.runtime.seats import Flight, MicroBatch, Seat
from bbquic.runtime.trees import verdicts
from paces import FixedPace, RandomPace

SHARED = tuple(range(2000, 2044))  # what prompts begin with
Fails = Callable[[int, Pack], bool]  # whether a stage has no memory for a pack


@dataclass(frozen=True)
class LossyTrip(Trip):
    """A pack on its way that may be lost already."""

    lost: Lost | None = None


class LossyStage(SimulatedStage):
    """Fails where it is told to. A row that rests on what was lost becomes WRONG."""

    def __init__(self, place: int, fails: Fails, pipeline: LossyPipeline) -> None:
        super().__init__(pipeline.options, pipeline.known)
        self.fails = partial(fails, place)
        self.name = f"node-{place}"
        self._gone: dict[int, int] = {}  # generations, and how many of their tokens are there

    def take(self, due: Due[Trip]) -> tuple[Lost | None, list[int]]:
        trip, pack = due.load, due.load.pack
        assert isinstance(trip, LossyTrip)
        for move in pack.moves:
            if move.count > (good := self._gone.get(move.generation, move.count)):
                self._gone[move.target_generation] = good
        lost = trip.lost
        if lost is None and self.fails(pack):
            lost = Lost(self.name, "0-0", "out_of_memory", f"{self.name} has none left")
        if lost is not None:
            for row in pack.rows:
                good = row.first - len(row.accepted or ())
                good = 0 if row.slot in {move.target for move in pack.moves} else good
                self._gone[row.generation] = min(good, self._gone.get(row.generation, good))
            return lost, []
        return None, self.compute(due)

    def holds(self, row: Row) -> bool:
        return row.generation not in self._gone

    def good(self, move: Move) -> int:
        return min(move.count, self._gone.get(move.generation, move.count))


@dataclass
class LossyPipeline(Pipeline):
    """A pipeline of such stages."""

    fails: Fails = lambda place, pack: False
    errors: list[Unanswerable] = field(default_factory=list)

    @property
    def known(self) -> dict[int, list[int]]:
        return self._known

    def _new_stage(self, place: int) -> SimulatedStage:
        return LossyStage(place, self.fails, self)

    def _send(self, pack: Pack) -> None:
        self._check_launch(pack, self.scheduler.in_flight())
        self._deliver(partial(self._arrive, 0, LossyTrip(pack, self.now)))

    def _arrive(self, place: int, trip: Trip) -> None:
        stage, arrived = self.stages[place], self.now
        assert isinstance(stage, LossyStage)
        for due in stage.ledger.admit(header(trip.pack, self.epoch), trip):
            here = due.load
            lost, tokens = stage.take(due)
            assert isinstance(here, LossyTrip)
            began = max(self.now, stage.busy_until)
            stage.busy_until = ended = began if lost else began + 0.5 + 0.05 * len(here.pack.tokens)
            timing = noted(place, arrived, began, ended, len(here.pack.tokens))
            went = replace(here, lost=lost, timings=here.timings if lost else (*here.timings, timing))
            if place + 1 < STAGES:
                happen = partial(self._arrive, place + 1, replace(went, pack=passed_on(here.pack)))
            else:
                answers = ((), ()) if lost else verdicts(header(here.pack), tokens.__getitem__)
                happen = partial(self._return, went, *answers)
            self._at(ended, partial(self._deliver, happen))

    def _return(self, trip: Trip, tokens: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        assert isinstance(trip, LossyTrip)
        pack, scheduler = trip.pack, self.scheduler
        outcomes: list[Outcome] | None
        if trip.lost is None:
            came = scheduler.take_tokens(pack.micro_batch, pack.step, tokens, paths)
            outcomes = None if came is None else [*came]
        else:
            outcomes = scheduler.lose(pack.micro_batch, pack.step, trip.lost)
        if outcomes is None:
            return
        for one in outcomes:
            if isinstance(one, Unanswerable):
                self.errors.append(one)
            else:
                self.done.append(one)
        for row in pack.rows:
            self._waiting_rows[row.generation] -= row.wants_token
        assert scheduler.take_tokens(pack.micro_batch, pack.step, tokens, paths) is None, "a repeat"

    def _check_answers(self) -> None:
        lines = Counter([*(one.line for one in self.done), *(one.line for one in self.errors)])
        assert lines == Counter(range(len(self.jobs)))
        self._check_completions()
        assert {one.code for one in self.errors} <= {"out_of_memory"}
        assert all(one.message.endswith("has none left") for one in self.errors)


@st.composite
def any_options(draw: st.DrawFn) -> SchedulerOptions:
    micro_batches = draw(st.integers(1, 4))
    return SchedulerOptions(
        micro_batches=micro_batches,
        slots=micro_batches + draw(st.integers(0, 8)),
        tiers=(CELL_ALIGNMENT * draw(st.integers(9, 60)),),
        prefill_tokens=draw(st.integers(1, 64)),
        look_ahead=draw(st.integers(1, 12)),
        depth=draw(st.integers(1, 5)),
        start=draw(st.none() | st.integers(1, micro_batches)),
    )


any_jobs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12)


def run_lossy(
    options: SchedulerOptions,
    jobs: list[tuple[int, int]],
    seed: int,
    fails: Fails,
    restless: float | None,
    preempt: float = 0.0,
    delay: float = 1.0,
    heads: list[tuple[int, ...]] | None = None,
) -> LossyPipeline:
    rng = random.Random(seed)
    scheduler = Scheduler(options, None if restless is None else RandomPace(rng, options, restless))
    chaos = Chaos(repeat=0.1, preempt=preempt)
    heads = heads or [()]
    pipeline = LossyPipeline(scheduler, options, jobs, rng, chaos, heads, delay=delay, fails=fails)
    pipeline.run()
    return pipeline


@settings(max_examples=40)
@given(
    options=any_options(),
    jobs=any_jobs,
    seed=st.integers(0, 2**32),
    often=st.sampled_from([0.01, 0.1, 0.5]),
    restless=st.sampled_from([None, 0.02, 0.3]),
    preempt=st.sampled_from([0.0, 0.02]),
    delay=st.sampled_from([0.01, 1.0, 20.0]),
    heads=st.lists(st.sampled_from([(), SHARED, SHARED[:36]]), max_size=3),
)
def test_whatever_is_lost_wherever_every_line_is_answered_right_or_has_its_error_once(
    options: SchedulerOptions,
    jobs: list[tuple[int, int]],
    seed: int,
    often: float,
    restless: float | None,
    preempt: float,
    delay: float,
    heads: list[tuple[int, ...]],
) -> None:
    """A token that rests on what was lost is a wrong one, and no answer has it, whatever overtakes what."""
    draw = random.Random(seed + 1)
    run_lossy(options, jobs, seed, lambda place, pack: draw.random() < often, restless, preempt, delay, heads)


@settings(max_examples=40)
@given(
    options=any_options(),
    jobs=any_jobs,
    seed=st.integers(0, 2**32),
    cursed=st.sets(st.integers(0, 11), max_size=4),
    restless=st.sampled_from([None, 0.02, 0.3]),
)
def test_a_line_that_cannot_be_read_costs_no_other_its_answer(
    options: SchedulerOptions,
    jobs: list[tuple[int, int]],
    seed: int,
    cursed: set[int],
    restless: float | None,
) -> None:
    """Whichever packs it shares with others: these are read again, and it alone is given up."""

    def fails(place: int, pack: Pack) -> bool:
        begun = 0
        for row in pack.rows:
            tokens = pack.tokens[begun : begun + row.count]
            begun += row.count
            if place == 1 and row.count > 1 and any(1000 + line in tokens for line in cursed):
                return True
        return False

    pipeline = run_lossy(options, jobs, seed, fails, restless)
    assert {one.line for one in pipeline.errors} <= cursed


def lost_at(step: int) -> Lost:
    return Lost("node-2", "2-3", "out_of_memory", f"step {step}")


def a_scheduler(lines: int, prompt: int = 8, offered: int | None = None) -> Scheduler:
    options = SchedulerOptions(micro_batches=1, slots=lines, tiers=(lines * 64,), depth=3)
    scheduler = Scheduler(options, FixedPace(window=9, chunk=8 * lines))
    for line in range(lines if offered is None else offered):
        scheduler.offer(make_sequence(line, prompt=prompt, max_tokens=9))
    return scheduler


def launched(scheduler: Scheduler) -> Pack:
    pack = scheduler.next_pack(0)
    assert pack is not None
    return pack


def test_tokens_that_come_before_what_they_rest_on_wait_for_it_and_a_loss_takes_them_along() -> None:
    scheduler = a_scheduler(1, prompt=16)
    first, second = launched(scheduler), launched(scheduler)
    assert [row.count for row in (*first.rows, *second.rows)] == [8, 8]
    assert scheduler.take_tokens(0, 2, [7]) == []
    assert scheduler.generated == 0
    assert scheduler.take_tokens(0, 2, [7]) is None
    assert scheduler.lose(0, 1, lost_at(1)) == []
    assert scheduler.generated == 0
    again = launched(scheduler)
    assert (again.rows[0].first, again.rows[0].generation) == (0, first.rows[0].generation + 1)


def test_decode_rows_beside_a_lost_chunk_are_read_again_and_not_blamed() -> None:
    scheduler = a_scheduler(3, offered=2)
    scheduler.take_tokens(0, launched(scheduler).step, [7, 7])
    scheduler.offer(make_sequence(2, prompt=8, max_tokens=9))
    mixed = launched(scheduler)
    assert [row.count for row in mixed.rows] == [1, 1, 8]
    assert scheduler.lose(0, mixed.step, lost_at(mixed.step)) == []
    assert scheduler.decisions()[-1] == (
        "node-2 ran out of memory at micro-batch 0, step 2; 3 lines are read again"
    )
    launched(scheduler)
    assert [sequence.losses for _, _, sequence in scheduler.seats()] == [0, 0, 1]


def test_who_copies_from_what_is_lost_is_lost_too_and_who_copied_before_is_not() -> None:
    """The first row of slot 0 is good, its second one lost: with it goes a copy of both, and one of that."""
    where = SlotRange.of(0, 4, 16)
    batches = [MicroBatch(index, range=where) for index in range(2)]

    def fly(micro_batch: int, step: int, row: Row, *moves: Move) -> Flight:
        seat = Seat(make_sequence(0, 4, 4), row.generation)
        flight = Flight(Pack(micro_batch, step, where, (row,), (), 0, moves), (seat,), trees=())
        batches[micro_batch].flights[step] = flight
        return flight

    lost = fly(0, 2, Row(0, 1, 4, 4, False, None))
    fly(0, 3, Row(1, 2, 8, 1, True, None), Move(0, 0, 1, 2, 1, 2, 8, keeps=True))
    fly(1, 1, Row(0, 3, 4, 1, True, None), Move(0, 0, 1, 1, 0, 3, 4, keeps=True))
    pending = Seat(make_sequence(1, 4, 4), 4, move=Move(0, 1, 2, 3, 1, 4, 8, keeps=True))
    batches[1].slots = {1: pending}
    assert set(gone_with(batches, lost)) == {(0, 0, 1), (0, 1, 2), (1, 1, 4)}
    assert must_wait(batches, batches[0].flights[3])
    assert not must_wait(batches, batches[1].flights[1])


def test_who_was_lost_is_read_alone_in_smaller_chunks_and_given_up_when_that_is_lost_too() -> None:
    scheduler = a_scheduler(3)
    first = launched(scheduler)
    assert len(first.rows) == 3
    assert scheduler.lose(0, first.step, lost_at(1)) == []
    packs = [launched(scheduler) for _ in range(3)]
    assert [[row.count for row in pack.rows] for pack in packs] == [[6], [6], [6]], "8 · 3 / 4 tokens"
    assert scheduler.next_pack(0) is None, "a chunk of each at a time"
    ended = scheduler.lose(0, packs[0].step, lost_at(2))
    assert ended == [Unanswerable(0, "out_of_memory", "step 2")]
    assert scheduler.decisions()[-1].endswith("step 2; 1 line is given up")
    assert scheduler.live == 2


def test_what_was_never_launched_cannot_be_lost_and_nothing_is_lost_twice() -> None:
    scheduler = a_scheduler(1)
    with pytest.raises(ValueError, match="no step 1"):
        scheduler.lose(0, 1, lost_at(1))
    with pytest.raises(ValueError, match="no micro-batch 1"):
        scheduler.lose(1, 1, lost_at(1))
    step = launched(scheduler).step
    assert scheduler.lose(0, step, lost_at(step)) == []
    assert scheduler.lose(0, step, lost_at(step)) is None
    assert scheduler.take_tokens(0, step, [7]) is None


def test_a_lost_pack_has_nothing_but_its_rows() -> None:
    row = (Row(0, 1, 0, 1, True, None),)
    assert PackHeader("0" * 16, 0, 0, 1, (0, 1, 16), row, lost=lost_at(1)).lost is not None
    with pytest.raises(ValueError, match="nothing but its rows"):
        PackHeader("0" * 16, 0, 0, 1, (0, 1, 16), row, b"\1\0\0\0", lost=lost_at(1))
    with pytest.raises(ValueError, match="nothing but its rows"):
        PackHeader("0" * 16, 0, 0, 1, (0, 1, 16), row, frame=b"\0" * 32, lost=lost_at(1))
    with pytest.raises(ValueError, match="no tokens"):
        TokensHeader("0" * 16, 0, 0, 1, (7,), lost=lost_at(1))
