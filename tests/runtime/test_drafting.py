"""Draft trees in circulation: whatever is guessed, every answer is what it is without guesses."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_simulation import Chaos, Pipeline, make_sequence, next_token
from test_circulation import any_jobs, any_options
from test_losses import SHARED, LossyPipeline, lost_at

from bbquic.draft.drafter import AlwaysGuesses, Ask
from bbquic.draft.tree import DraftTree
from bbquic.kv.ranges import SlotRange
from bbquic.runtime.losses import gone_with
from bbquic.runtime.protocol import Row
from bbquic.runtime.request import Completion
from bbquic.runtime.scheduler import Pack, Scheduler, SchedulerOptions
from bbquic.runtime.seats import Flight, MicroBatch, Seat
from paces import FixedPace, RandomPace
from random_drafter import RandomDrafter, RandomSpeculation


def following(ask: Ask, path: tuple[int, ...]) -> int | None:
    return next_token((*ask.tokens, *path))


def a_drafter(rng: random.Random, **more: object) -> RandomDrafter:
    return RandomDrafter(rng, following, range(500), **more)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    options=any_options(),
    jobs=any_jobs,
    seed=st.integers(0, 2**32),
    most=st.integers(1, 12),
    kept=st.none() | st.integers(0, 6),
    right=st.sampled_from([0.1, 0.6, 0.95]),
    is_instant=st.booleans(),
    is_chain=st.booleans(),
    preempt=st.sampled_from([0.0, 0.02]),
    restart=st.sampled_from([0.0, 0.0, 0.003]),
    lost=st.sampled_from([0.0, 0.0, 0.03]),
    delay=st.sampled_from([0.01, 1.0, 20.0]),
    restless=st.sampled_from([None, 0.02, 0.3]),
    heads=st.lists(st.sampled_from([(), SHARED, SHARED[:36]]), min_size=1, max_size=3),
    fails=st.sampled_from([0.0, 0.0, 0.02]),
)
def test_whatever_is_guessed_every_sequence_is_answered_as_if_nothing_were(
    options: SchedulerOptions,
    jobs: list[tuple[int, int]],
    seed: int,
    most: int,
    kept: int | None,
    right: float,
    is_instant: bool,
    is_chain: bool,
    preempt: float,
    restart: float,
    lost: float,
    delay: float,
    restless: float | None,
    heads: list[tuple[int, ...]],
    fails: float,
) -> None:
    """Stages check every cell that a row sees; sequences move, are dropped and lost with drafts undecided."""
    rng = random.Random(seed)
    options = replace(options, most_guesses=most, kept_guesses=kept)
    drafter = a_drafter(rng, right=right, is_instant=is_instant, is_chain=is_chain, fails=fails)
    pace = None if restless is None else RandomPace(rng, options, restless)
    scheduler = Scheduler(options, pace, drafter, RandomSpeculation(rng, most))
    chaos = Chaos(repeat=0.1, preempt=preempt, restart=restart)

    def fails_at(place: int, pack: Pack) -> bool:
        return rng.random() < lost

    longest = 60 + 40 + len(SHARED)
    if max(options.tiers) < 16 * 8 + longest:  # else a head would not fit
        heads = [()]
    if lost and not restart:
        LossyPipeline(scheduler, options, jobs, rng, chaos, heads, delay=delay, fails=fails_at).run()
    else:
        Pipeline(scheduler, options, jobs, rng, chaos, heads, delay=delay).run()


@pytest.mark.parametrize("is_instant", [True, False])
def test_guesses_that_are_right_make_fewer_rounds(is_instant: bool) -> None:
    """What the property speaks of does happen."""
    options = SchedulerOptions(2, 4, (4 * 160,), most_guesses=8, kept_guesses=6)
    jobs = [(9 + line, 40) for line in range(12)]
    rng = random.Random(1)
    drafter, speculation = a_drafter(rng, right=0.95, is_instant=is_instant), RandomSpeculation(rng, 8)
    scheduler = Scheduler(options, FixedPace(window=4), drafter, speculation)
    Pipeline(scheduler, options, jobs, rng).run()
    assert drafter.accepted > 0
    assert drafter.forgotten == set(range(12)) or not is_instant  # the last is never heard of beside the loop
    assert speculation.committed > 1.5 * speculation.rows


class Knows:
    """Drafts a chain of what it was told, and anything where it was told to break its word."""

    name = "one who knows"
    is_instant = True

    def __init__(self, guesses: Callable[[Ask], Items[int]]) -> None:
        self._guesses = guesses
        self.asked: list[Ask] = []

    def draft(self, asks: Items[Ask]) -> list[DraftTree]:
        self.asked += asks
        made = []
        for ask in asks:
            tokens = (ask.tokens[-1], *self._guesses(ask))
            count = len(tokens)
            made.append(DraftTree(tokens, (0, *range(count - 1)), (1.0,) * count))
        return made

    def learn(self, key: int, tree: DraftTree, path: Items[int]) -> None: ...
    def forget(self, key: int) -> None: ...


def a_job(
    guesses: Callable[[Ask], Items[int]], max_tokens: int = 20, stop: tuple[str, ...] = ()
) -> tuple[Scheduler, Knows, Pack]:
    """One sequence, and its first pack with a decode row, behind the token 7 = "h"."""
    options = SchedulerOptions(1, 1, (64,), most_guesses=5)
    drafter = Knows(guesses)
    scheduler = Scheduler(options, FixedPace(), drafter, AlwaysGuesses(5))
    scheduler.offer(make_sequence(0, prompt=4, max_tokens=max_tokens, stop=stop))
    scheduler.close()
    assert scheduler.take_tokens(0, launched(scheduler).step, [7]) == []
    return scheduler, drafter, launched(scheduler)


def launched(scheduler: Scheduler) -> Pack:
    pack = scheduler.next_pack(0)
    assert pack is not None
    return pack


def ended(scheduler: Scheduler, pack: Pack, tokens: Items[int], path: tuple[int, ...]) -> Completion:
    done = scheduler.take_tokens(0, pack.step, tokens, [path])
    assert done is not None
    (completion,) = done
    assert scheduler.is_done
    return completion


def test_an_end_token_within_a_path_ends_the_answer_there() -> None:
    scheduler, _, pack = a_job(lambda ask: (8, 0, 9, 10))
    answer = ended(scheduler, pack, [8, 0, 9, 10, 11], (0, 1, 2, 3, 4))
    assert (answer.tokens, answer.generated, answer.finish_reason) == ((7, 8), 3, "stop")
    assert scheduler.generated == 3


def test_a_stop_string_that_a_path_completes_ends_the_answer_there() -> None:
    scheduler, _, pack = a_job(lambda ask: (8, 9, 10, 11), stop=("ij",))
    answer = ended(scheduler, pack, [8, 9, 10, 11, 12], (0, 1, 2, 3, 4))
    assert (answer.text, answer.tokens, answer.generated) == ("h", (7, 8, 9), 3)


def test_nothing_is_guessed_beyond_the_last_token_of_an_answer() -> None:
    scheduler, drafter, pack = a_job(lambda ask: range(8, 8 + ask.depth), max_tokens=4)
    assert [(ask.guesses, ask.depth) for ask in drafter.asked] == [(5, 2)]
    assert [(row.first, row.count, row.accepted) for row in pack.rows] == [(4, 3, None)]
    assert scheduler.take_tokens(0, pack.step, [8, 30], [(0, 1)]) == []
    last = launched(scheduler)
    assert [(row.first, row.count, row.accepted) for row in last.rows] == [(6, 1, (0, 1))]
    assert last.tokens == (30,)
    (answer,) = scheduler.take_tokens(0, last.step, [31]) or []
    assert (answer.tokens, answer.finish_reason) == ((7, 8, 30, 31), "length")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_sequence_for_whose_trees_there_is_no_room_is_answered_without(micro_batches: int) -> None:
    """Room for drafts is no reason to give it more than a micro-batch's share."""
    options = SchedulerOptions(micro_batches, micro_batches, (micro_batches * 32,), most_guesses=5)
    scheduler = Scheduler(options, FixedPace(), Knows(lambda ask: (8,)), AlwaysGuesses(5))
    scheduler.offer(make_sequence(0, prompt=4, max_tokens=20))
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    assert launched(scheduler).tokens == (7,)


@pytest.mark.parametrize(
    ("tokens", "paths"),
    [
        ([8], [(0, 1)]),  # fewer tokens than nodes
        ([8, 9, 10], [(0, 1)]),
        ([8, 9], []),
        ([8, 9], [(0, 1), (0,)]),
        ([8, 9], [(0, 2)]),  # not a child of the root
        ([8, 9], [(0, 9)]),  # no such node
        ([4, 9], [(0, 1)]),  # another token was chosen
    ],
)
def test_a_verdict_that_contradicts_its_tree_is_refused(
    tokens: list[int], paths: list[tuple[int, ...]]
) -> None:
    scheduler, _, pack = a_job(lambda ask: (8, 9, 10))
    with pytest.raises(ValueError, match=r"path|tokens for"):
        scheduler.take_tokens(0, pack.step, tokens, paths)
    assert scheduler.take_tokens(0, pack.step, [8, 30], [(0, 1)]) == []


def broken(ask: Ask) -> Items[int]:
    raise RuntimeError("out of\nwords")


@pytest.mark.parametrize(
    ("guesses", "why"),
    [
        (broken, "out of words"),
        (lambda ask: range(8, 14), "a tree is not what was asked for: 5 nodes, 5 deep"),
    ],
)
def test_a_drafter_that_fails_is_heard_of_once_and_the_job_goes_on_without(
    guesses: Callable[[Ask], Items[int]], why: str
) -> None:
    scheduler, drafter, pack = a_job(guesses)
    assert pack.tokens == (7,)
    assert scheduler.decisions()[-1] == f"one who knows drafts no more: {why}"
    scheduler.take_tokens(0, pack.step, [8])
    assert launched(scheduler).tokens == (8,)
    assert len(drafter.asked) == 1


def test_rows_that_wait_for_drafts_go_on_when_the_drafter_fails() -> None:
    options = SchedulerOptions(1, 2, (128,), most_guesses=5)
    drafter = Knows(lambda ask: (8,))
    drafter.is_instant = False
    scheduler = Scheduler(options, FixedPace(), drafter, AlwaysGuesses(5))
    scheduler.offer(make_sequence(0, prompt=4, max_tokens=20))
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    assert scheduler.next_pack(0) is None
    assert scheduler.asks() is not None
    assert scheduler.next_pack(0) is None
    scheduler.stop_drafting(TimeoutError())
    assert launched(scheduler).tokens == (7,)


def test_a_draft_for_a_sequence_that_went_on_meanwhile_is_dropped() -> None:
    options = SchedulerOptions(1, 2, (128,), most_guesses=5)
    drafter = Knows(lambda ask: (8,))
    drafter.is_instant = False
    scheduler = Scheduler(options, FixedPace(), drafter, AlwaysGuesses(5))
    scheduler.offer(make_sequence(0, prompt=4, max_tokens=20))
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    assert scheduler.next_pack(0) is None
    work = scheduler.asks()
    assert work is not None
    scheduler.preempt(0, 0)
    again = launched(scheduler)
    assert [row.count for row in again.rows] == [5]
    scheduler.take_tokens(0, again.step, [9])
    scheduler.take_drafts(work, work.draft())
    assert launched(scheduler).tokens == (9,)


def test_prompts_are_read_while_decode_rows_wait_for_drafts() -> None:
    options = SchedulerOptions(1, 2, (128,), most_guesses=5)
    drafter = Knows(lambda ask: (8,))
    drafter.is_instant = False
    scheduler = Scheduler(options, FixedPace(), drafter, AlwaysGuesses(5))
    scheduler.offer(make_sequence(0, prompt=4, max_tokens=20))
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    assert scheduler.next_pack(0) is None
    work = scheduler.asks()
    assert work is not None
    scheduler.offer(make_sequence(1, prompt=4, max_tokens=20))
    assert [row.count for row in launched(scheduler).rows] == [4]
    scheduler.take_drafts(work, work.draft())
    assert launched(scheduler).tokens == (7, 8)


def test_a_tree_that_is_lost_is_nobodys_doing_beside_a_chunk() -> None:
    options = SchedulerOptions(1, 2, (256,), most_guesses=5)
    scheduler = Scheduler(options, FixedPace(), Knows(lambda ask: (8,)), AlwaysGuesses(5))
    scheduler.offer(make_sequence(0, prompt=4, max_tokens=20))
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    scheduler.offer(make_sequence(1, prompt=4, max_tokens=20))
    mixed = launched(scheduler)
    assert [row.count for row in mixed.rows] == [2, 4]
    assert scheduler.lose(0, mixed.step, lost_at(mixed.step)) == []
    launched(scheduler)
    assert [sequence.losses for _, _, sequence in scheduler.seats()] == [0, 1]


def test_what_a_lost_row_accepted_is_as_good_as_lost() -> None:
    """It lies among the other nodes of its tree where the stages did not compute the row that says so."""
    batch = MicroBatch(0, range=SlotRange.of(0, 4, 16))
    row = Row(0, 1, 9, 1, True, None, None, (0, 2))
    seat = Seat(make_sequence(0, 4, 8), 1)
    flight = Flight(Pack(0, 2, SlotRange.of(0, 4, 16), (row,), (5,), 0), (seat,), (None,))
    assert gone_with([batch], flight) == {(0, 0, 1): 7}
