"""Beginnings that prompts share: read once, whoever reads them, and answers as without it."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipeline_simulation import Chaos, Pipeline, make_sequence

from bbquic.kv.ranges import CELL_ALIGNMENT
from bbquic.runtime.prefixes import LEAST_SHARED, common_tokens
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from bbquic.runtime.seats import Pack
from paces import FixedPace, RandomPace

HEADER = tuple(range(2000, 2100))  # a few shots, of which SYSTEM is the system prompt
SYSTEM = HEADER[:40]
OTHER = (*HEADER[:35], *range(3000, 3030))


@st.composite
def any_options(draw: st.DrawFn) -> SchedulerOptions:
    """Any sequence fits in the last tier."""
    micro_batches = draw(st.integers(1, 4))
    units = [*draw(st.lists(st.integers(0, 40), max_size=1)), draw(st.integers(11, 80))]
    return SchedulerOptions(
        micro_batches=micro_batches,
        slots=micro_batches + draw(st.integers(0, 8)),
        tiers=tuple(CELL_ALIGNMENT * one for one in units),
        prefill_tokens=draw(st.integers(1, 96)),
        look_ahead=draw(st.integers(1, 12)),
        depth=draw(st.integers(1, 5)),
        start=draw(st.none() | st.integers(1, micro_batches)),
    )


@settings(max_examples=60)
@given(
    options=any_options(),
    jobs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=16),
    heads=st.lists(st.sampled_from([(), SYSTEM, OTHER, HEADER]), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    preempt=st.sampled_from([0.0, 0.01, 0.05]),
    restart=st.sampled_from([0.0, 0.0, 0.003]),
    delay=st.sampled_from([0.01, 1.0, 20.0]),
    restless=st.sampled_from([None, 0.002, 0.02, 0.3]),
)
def test_prompts_that_begin_alike_are_answered_as_if_each_were_alone(
    options: SchedulerOptions,
    jobs: list[tuple[int, int]],
    heads: list[tuple[int, ...]],
    seed: int,
    preempt: float,
    restart: float,
    delay: float,
    restless: float | None,
) -> None:
    """Whatever is dropped, moved, cut or overtaken: the stages look at every token of every row's slot."""
    rng = random.Random(seed)
    scheduler = Scheduler(options, None if restless is None else RandomPace(rng, options, restless))
    chaos = Chaos(repeat=0.1, preempt=preempt, restart=restart)
    Pipeline(scheduler, options, jobs, rng, chaos, heads, delay=delay).run()


def launched(scheduler: Scheduler, micro_batch: int = 0) -> Pack:
    pack = scheduler.next_pack(micro_batch)
    assert pack is not None
    return pack


def rows(pack: Pack) -> list[tuple[int, int]]:
    return [(row.first, row.count) for row in pack.rows]


def begin(scheduler: Scheduler, lines: range, head: tuple[int, ...] = HEADER, max_tokens: int = 9) -> None:
    for line in lines:
        scheduler.offer(make_sequence(line, 5, max_tokens, head=head))


@pytest.mark.parametrize(("micro_batches", "slots"), [(1, 1), (1, 8), (3, 12)])
@pytest.mark.parametrize("shares", [True, False])
def test_what_all_prompts_begin_with_is_sent_once_at_any_batch(
    micro_batches: int, slots: int, shares: bool
) -> None:
    """Though with a batch of one nobody who has read it is there any more."""
    options = SchedulerOptions(micro_batches, slots, (192 * slots,), 64, shares_prefixes=shares)
    scheduler = Scheduler(options)
    jobs = [(1 + line % 7, 9 + line % 5) for line in range(24)]
    pipeline = Pipeline(scheduler, options, jobs, random.Random(1), heads=[HEADER])
    pipeline.run()
    own = sum(prompt for prompt, _ in jobs) + sum(one.generated - 1 for one in pipeline.done)
    headers = 1 if shares else len(jobs)
    assert pipeline.sent == own + headers * len(HEADER)
    assert scheduler.shared == (len(jobs) - headers) * len(HEADER)


def test_the_next_in_a_slot_keeps_what_its_own_prompt_begins_with() -> None:
    scheduler = Scheduler(SchedulerOptions(1, 1, (128,)), FixedPace())
    begin(scheduler, range(2), max_tokens=1)
    first = launched(scheduler)
    scheduler.take_tokens(0, first.step, [7])
    second = launched(scheduler)
    (move,) = second.moves
    assert (move.slot, move.generation, move.count, move.keeps) == (0, first.rows[0].generation, 100, True)
    assert (move.target, move.target_generation) == (0, second.rows[0].generation)
    assert rows(second) == [(100, 5)]
    assert (second.prompt_tokens, second.shared_tokens) == (5, 100)


def test_the_same_prompt_again_computes_its_last_token_alone() -> None:
    scheduler = Scheduler(SchedulerOptions(1, 1, (128,)), FixedPace())
    for _ in range(2):
        scheduler.offer(make_sequence(3, 5, 1, head=HEADER))
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    assert rows(launched(scheduler)) == [(104, 1)]


@pytest.mark.parametrize(("length", "shared"), [(LEAST_SHARED - 1, 0), (LEAST_SHARED, LEAST_SHARED)])
def test_beginnings_are_shared_from_a_length_on_that_is_worth_it(length: int, shared: int) -> None:
    scheduler = Scheduler(SchedulerOptions(1, 1, (128,)), FixedPace())
    begin(scheduler, range(2), HEADER[:length], max_tokens=1)
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    assert launched(scheduler).shared_tokens == shared


def test_the_others_wait_while_one_reads_and_take_the_longest_beginning_there_is() -> None:
    """A row of the pack that shares comes behind the copy, so what it adds to its slot is not there yet."""
    scheduler = Scheduler(SchedulerOptions(1, 4, (4 * 128,)), FixedPace(window=9, chunk=64))
    begin(scheduler, range(2))
    begin(scheduler, range(2, 3), OTHER)
    assert rows(launched(scheduler)) == [(0, 64)], "the others begin with the same tokens"
    second = launched(scheduler)
    assert rows(second) == [(64, 41), (35, 23)], "one has what it shares, the other waits for more of it"
    assert second.moves[0].step == 1
    assert rows(launched(scheduler)) == [(100, 5), (58, 12)]


def test_a_leader_that_leaves_is_followed_from_where_it_was_and_its_slot_is_nobodys_till_then() -> None:
    scheduler = Scheduler(SchedulerOptions(2, 2, (256,)), FixedPace(window=9, chunk=40))
    begin(scheduler, range(2))
    leader = launched(scheduler, 0)
    assert scheduler.next_pack(1) is None, "it waits for the leader"
    scheduler.preempt(0, leader.rows[0].slot)
    follower = launched(scheduler, 1)
    (move,) = follower.moves
    assert (move.micro_batch, move.step, move.count, move.keeps) == (0, leader.step, 40, True)
    assert rows(follower) == [(40, 40)]
    assert scheduler.next_pack(0) is None, "a slot that is yet to be read is not refilled"
    scheduler.take_tokens(0, leader.step, [])
    assert scheduler.next_pack(0) is None
    scheduler.take_tokens(1, follower.step, [])
    assert rows(launched(scheduler, 0)) == [(80, 25)], "for so few more tokens it does not wait"
    assert rows(launched(scheduler, 1)) == [(80, 25)]


def test_a_dropped_sequence_goes_on_from_its_own_slot_where_nobody_took_it() -> None:
    scheduler = Scheduler(SchedulerOptions(1, 1, (128,)), FixedPace())
    begin(scheduler, range(1))
    for token in (7, 8, 9):
        scheduler.take_tokens(0, launched(scheduler).step, [token])
    scheduler.preempt(0, 0)
    again = launched(scheduler)
    assert (rows(again), again.tokens, again.shared_tokens) == ([(107, 1)], (9,), 0)


def test_nothing_is_shared_after_a_restart_before_it_is_read_again() -> None:
    scheduler = Scheduler(SchedulerOptions(1, 1, (128,)), FixedPace())
    begin(scheduler, range(2))
    launched(scheduler)
    scheduler.restart()
    pack = launched(scheduler)
    assert (rows(pack), pack.moves) == ([(0, 105)], ())


def test_of_the_free_slots_that_one_is_taken_that_holds_the_prompts_beginning() -> None:
    """Though the range could be shorter for those who wait now."""
    scheduler = Scheduler(SchedulerOptions(1, 2, (256,)), FixedPace())
    mine, others = HEADER, tuple(range(5000, 5090))
    begin(scheduler, range(1), others, max_tokens=1)
    begin(scheduler, range(1, 2), mine, max_tokens=1)
    scheduler.take_tokens(0, launched(scheduler).step, [7, 7])
    begin(scheduler, range(2, 3), mine[:50], max_tokens=1)
    pack = launched(scheduler)
    assert [(row.slot, row.first, row.count) for row in pack.rows] == [(1, 50, 5)]


tokens = st.lists(st.integers(0, 2), max_size=40)


@given(one=tokens, other=tokens)
@example(one=[], other=[])
def test_the_common_beginning_is_that_of_the_tokens(one: list[int], other: list[int]) -> None:
    pairs = zip(one, other, strict=False)
    length = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    assert common_tokens(array("i", one).tobytes(), array("i", other).tobytes()) == length
