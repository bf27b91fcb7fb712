"""The scheduler's rules one by one; whole jobs are in test_circulation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_simulation import make_sequence

from bbquic.errors import RecordError
from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange, Tiers
from bbquic.runtime.ranges import Share, aligned, cut_range, equal_shares
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from bbquic.runtime.seats import Pack
from paces import FixedPace


def test_a_sequence_larger_than_the_arena_is_refused_by_name() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=2, slots=4, tiers=(64,)))
    with pytest.raises(RecordError) as refused:
        scheduler.offer(make_sequence(1, prompt=60, max_tokens=5))
    assert refused.value.code == "does_not_fit"
    scheduler.offer(make_sequence(2, prompt=60, max_tokens=4))


def test_few_sequences_are_spread_over_all_micro_batches() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=4, slots=32, tiers=(32 * 64,)))
    for line in range(8):
        scheduler.offer(make_sequence(line, prompt=4, max_tokens=4))
    scheduler.close()
    packs = [scheduler.next_pack(micro_batch) for micro_batch in range(4)]
    assert [len(pack.rows) for pack in packs if pack is not None] == [2, 2, 2, 2]


def test_a_prompt_is_read_in_chunks_beside_decode_rows() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=1, slots=2, tiers=(2 * 64,), prefill_tokens=4))
    scheduler.offer(make_sequence(0, prompt=3, max_tokens=20))
    first = scheduler.next_pack(0)
    assert first is not None
    scheduler.take_tokens(0, first.step, [7])
    scheduler.offer(make_sequence(1, prompt=10, max_tokens=9))
    second = scheduler.next_pack(0)
    assert second is not None
    assert [(row.first, row.count, row.wants_token) for row in second.rows] == [(3, 1, True), (0, 4, False)]
    assert second.prompt_tokens == 4


def test_tokens_for_a_step_that_was_never_sent_are_an_error() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=1, slots=1, tiers=(64,)))
    scheduler.offer(make_sequence(0, prompt=3, max_tokens=9))
    pack = scheduler.next_pack(0)
    assert pack is not None
    for micro_batch, step, tokens in ((0, 2, [1]), (0, 1, [1, 2]), (0, 1, []), (1, 1, [1])):
        with pytest.raises(ValueError, match=r"micro-batch|tokens"):
            scheduler.take_tokens(micro_batch, step, tokens)
    assert scheduler.take_tokens(0, 1, [5]) == []


@given(
    cells=st.lists(st.integers(0, 100).map(lambda n: n * CELL_ALIGNMENT), min_size=1, max_size=3),
    slots=st.integers(1, 20),
    needs=st.lists(st.integers(1, 600), max_size=30),
)
def test_a_range_holds_the_oldest_record_and_stays_in_its_share_of_each_tier(
    cells: list[int], slots: int, needs: list[int]
) -> None:
    shares = tuple(Share(5000 * tier + 32, size) for tier, size in enumerate(cells))
    where = cut_range(shares, slots, needs)
    if not needs or aligned(needs[0]) > max(cells):
        assert where is None
        return
    assert where is not None
    assert where.capacity >= needs[0]
    assert 1 <= where.count <= slots
    spans = [where.span(tier) for tier in range(where.tiers)]
    assert [span.start for span in spans] == [share.offset for share in shares]
    assert all(span.stop <= share.stop for span, share in zip(spans, shares, strict=True))
    most = [size // where.capacity for size in cells]
    used = [strip.slots for strip in where.strips]
    assert all(used[tier] == most[tier] for tier in range(len(used)) if any(used[tier + 1 :]))
    longest = range(CELL_ALIGNMENT, aligned(max(needs)) + 1, CELL_ALIGNMENT)
    holding = [length for length in longest if sum(size // length for size in cells) >= where.count]
    assert where.capacity == max(holding)


@given(sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=3), micro_batches=st.integers(1, 9))
def test_shares_of_a_tier_are_equal_and_do_not_overlap(sizes: list[int], micro_batches: int) -> None:
    tiers = Tiers(tuple(sizes))
    for tier, shares in enumerate(zip(*equal_shares(tiers, micro_batches), strict=True)):
        assert len({share.cells for share in shares}) == 1
        assert all(one.stop == other.offset for one, other in pairwise(shares))
        assert shares[0].offset == tiers.span(tier).start
        assert shares[-1].stop <= tiers.span(tier).stop


def test_a_stop_string_ends_the_answer_before_it() -> None:
    sequence = make_sequence(0, prompt=1, max_tokens=9, stop=("cd", "zz"))
    assert [sequence.push(token) for token in (26, 27, 28, 29)] == [None, None, None, "stop"]
    assert sequence.completion().text == "ab"
    assert sequence.completion().generated == 4


def test_a_range_of_nothing_cannot_be_made() -> None:
    for numbers in ((-1, 1, 1), (0, 0, 1), (0, 1, 0)):
        with pytest.raises(ValueError, match="slot range"):
            SlotRange.of(*numbers)


def launched(scheduler: Scheduler, micro_batch: int = 0) -> Pack:
    pack = scheduler.next_pack(micro_batch)
    assert pack is not None
    return pack


def shape(pack: Pack) -> list[tuple[int, int, bool]]:
    return [(row.first, row.count, row.wants_token) for row in pack.rows]


def test_several_chunks_of_a_prompt_are_on_their_way_in_order_up_to_the_depth() -> None:
    options = SchedulerOptions(micro_batches=1, slots=1, tiers=(64,), depth=3)
    scheduler = Scheduler(options, FixedPace(window=9, chunk=4))
    scheduler.offer(make_sequence(0, prompt=20, max_tokens=5))
    packs = [launched(scheduler) for _ in range(3)]
    assert [shape(pack) for pack in packs] == [[(0, 4, False)], [(4, 4, False)], [(8, 4, False)]]
    assert scheduler.next_pack(0) is None, "three on their way are the depth"
    assert scheduler.take_tokens(0, 2, []) == []
    assert shape(launched(scheduler)) == [(12, 4, False)]


def test_prompts_alone_are_read_ahead_only_inside_the_window_and_one_pack_always() -> None:
    options = SchedulerOptions(micro_batches=2, slots=2, tiers=(128,))
    scheduler = Scheduler(options, FixedPace(window=3, chunk=4))
    for line in range(2):
        scheduler.offer(make_sequence(line, prompt=40, max_tokens=5))
    assert [pack.micro_batch for _ in range(9) if (pack := scheduler.any_pack())] == [0, 1, 0]
    scheduler.pace = FixedPace(window=1, chunk=4)
    for step in (1, 2):
        scheduler.take_tokens(0, step, [])
    assert launched(scheduler).micro_batch == 0, "the window never leaves a micro-batch without any"


def test_decode_rows_leave_whatever_the_window_and_only_once_together() -> None:
    options = SchedulerOptions(micro_batches=1, slots=2, tiers=(128,))
    scheduler = Scheduler(options, FixedPace(window=2, chunk=8))
    scheduler.offer(make_sequence(0, prompt=8, max_tokens=9))
    scheduler.offer(make_sequence(1, prompt=16, max_tokens=9))
    for _ in range(2):
        launched(scheduler)
    scheduler.take_tokens(0, 1, [7])
    third = launched(scheduler)
    assert shape(third) == [(8, 1, True), (8, 8, True)]
    scheduler.take_tokens(0, 2, [])
    assert scheduler.next_pack(0) is None, "both wait for their tokens"
    scheduler.take_tokens(0, 3, [7, 7])
    assert shape(launched(scheduler)) == [(9, 1, True), (16, 1, True)]


def test_a_prompt_that_ends_in_another_pack_joins_the_decode_rows_when_these_are_back() -> None:
    options = SchedulerOptions(micro_batches=1, slots=2, tiers=(128,))
    scheduler = Scheduler(options, FixedPace(window=3, chunk=8))
    scheduler.offer(make_sequence(0, prompt=8, max_tokens=9))
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    decode = launched(scheduler)
    scheduler.offer(make_sequence(1, prompt=8, max_tokens=9))
    prompt = launched(scheduler)
    assert (shape(decode), shape(prompt)) == ([(8, 1, True)], [(0, 8, True)])
    scheduler.take_tokens(0, prompt.step, [7])
    assert scheduler.next_pack(0) is None, "two packs of a few rows would cost as much as two micro-batches"
    scheduler.take_tokens(0, decode.step, [7])
    assert shape(launched(scheduler)) == [(9, 1, True), (8, 1, True)]


def test_a_dropped_sequence_reads_prompt_and_answer_again_before_all_others() -> None:
    options = SchedulerOptions(micro_batches=1, slots=1, tiers=(64,), depth=2)
    scheduler = Scheduler(options, FixedPace(window=2, chunk=6))
    for line in range(2):
        scheduler.offer(make_sequence(line, prompt=4, max_tokens=9))
    for token in (11, 12, 13):
        scheduler.take_tokens(0, launched(scheduler).step, [token])
    late = launched(scheduler)
    assert late.tokens == (13,)
    scheduler.preempt(0, 0)
    assert scheduler.live == 0
    again = launched(scheduler)
    assert again.tokens == (*make_sequence(0, 4, 9).request.tokens, 11, 12)
    assert shape(again) == [(0, 6, False)]
    assert again.prompt_tokens == 0, "a prompt counts once"
    assert again.rows[0].generation > late.rows[0].generation
    assert scheduler.take_tokens(0, late.step, [14]) == [], "the token of a row that was dropped"
    last = launched(scheduler)
    assert (last.tokens, shape(last)) == ((13,), [(6, 1, True)])
    assert scheduler.generated == 3
    with pytest.raises(ValueError, match="nobody is in slot 5"):
        scheduler.preempt(0, 5)
    assert not scheduler.preempt_line(1), "it waits still"


def moving_scheduler(pace: FixedPace, slots: int = 8) -> tuple[Scheduler, list[Pack]]:
    """Two sequences in micro-batch 0, one in 1, all past their prompts; the packs that are on their way."""
    scheduler = Scheduler(SchedulerOptions(micro_batches=2, slots=slots, tiers=(256,)), pace)
    for line in range(3):
        scheduler.offer(make_sequence(line, prompt=4, max_tokens=9))
    scheduler.close()
    for micro_batch in range(2):
        pack = launched(scheduler, micro_batch)
        scheduler.take_tokens(micro_batch, pack.step, [7] * len(pack.rows))
    return scheduler, [launched(scheduler, micro_batch) for micro_batch in range(2)]


def test_the_tail_moves_the_smallest_micro_batch_with_the_next_rows_of_another() -> None:
    pace = FixedPace()
    scheduler, (first, second) = moving_scheduler(pace)
    assert [len(first.rows), len(second.rows)] == [2, 1]
    pace.count = 1
    scheduler.take_tokens(1, second.step, [8])
    assert scheduler.next_pack(1) is None, "its sequence waits for the rows it is to travel with"
    assert scheduler.moved == 1
    scheduler.take_tokens(0, first.step, [8, 8])
    pack = launched(scheduler)
    (move,) = pack.moves
    assert (move.micro_batch, move.slot, move.step, move.count) == (1, 0, second.step, 5)
    assert (pack.rows[-1].slot, pack.rows[-1].generation) == (move.target, move.target_generation)
    assert shape(pack)[-1] == (5, 1, True)
    scheduler.take_tokens(0, pack.step, [9, 9, 9])
    assert launched(scheduler).moves == (), "a move is made once"


def test_a_micro_batch_that_is_not_the_smallest_stays() -> None:
    pace = FixedPace()
    scheduler, (first, _) = moving_scheduler(pace)
    pace.count = 1
    scheduler.take_tokens(0, first.step, [8, 8])
    assert len(launched(scheduler).rows) == 2
    assert scheduler.moved == 0


def test_the_place_a_sequence_left_is_nobodys_until_the_move_is_back() -> None:
    pace = FixedPace(window=9)
    scheduler, (first, second) = moving_scheduler(pace)
    pace.count = 1
    scheduler.take_tokens(1, second.step, [8])
    scheduler.next_pack(1)
    scheduler.take_tokens(0, first.step, [8, 8])
    pack = launched(scheduler)
    (move,) = pack.moves
    scheduler.offer(make_sequence(8, prompt=90, max_tokens=9))
    scheduler.preempt(0, 0)  # this one waits before it
    taken = launched(scheduler, 1)
    assert taken.range == second.range, "cells that a move is yet to read are not cut anew"
    assert [row.slot for row in taken.rows] == [move.slot + 1]
    scheduler.take_tokens(0, pack.step, [9, 9, 9])
    scheduler.preempt(1, taken.rows[0].slot)
    assert launched(scheduler, 1).range != second.range


def test_a_move_that_was_not_made_yet_ends_with_the_sequence_that_was_to_move() -> None:
    pace = FixedPace()
    scheduler, (first, second) = moving_scheduler(pace)
    pace.count = 1
    scheduler.take_tokens(1, second.step, [8])
    scheduler.next_pack(1)
    assert scheduler.preempt_line(2)
    scheduler.take_tokens(0, first.step, [8, 8])
    pack = launched(scheduler)
    assert pack.moves == ()
    assert shape(pack) == [(5, 1, True), (5, 1, True), (0, 6, True)], "it reads again"


@pytest.mark.parametrize("waiting", [2, 9])
def test_nobody_moves_while_others_wait_where_the_number_of_micro_batches_was_asked_for(waiting: int) -> None:
    pace = FixedPace()
    scheduler, (_, second) = moving_scheduler(pace)
    pace.count = 1
    for line in range(waiting):
        scheduler.offer(make_sequence(3 + line, prompt=90, max_tokens=9))
    scheduler.take_tokens(1, second.step, [8])
    assert launched(scheduler, 1).moves == ()
    assert scheduler.moved == 0


def adapting_scheduler(
    needs: list[tuple[int, int]], *, tiers: tuple[int, ...], slots: int, start: int, most: int = 4
) -> tuple[Scheduler, FixedPace]:
    """Sequences of (prompt, max_tokens); those with a slot are past their prompts, nothing is on its way."""
    pace = FixedPace(window=99)
    options = SchedulerOptions(micro_batches=most, slots=slots, tiers=tiers, start=start)
    scheduler = Scheduler(options, pace)
    for line, (prompt, most_tokens) in enumerate(needs):
        scheduler.offer(make_sequence(line, prompt=prompt, max_tokens=most_tokens))
    go_on(scheduler)
    assert all(sequence.decodes for _, _, sequence in scheduler.seats())
    return scheduler, pace


def by_batch(scheduler: Scheduler) -> list[int]:
    counted: dict[int, int] = {}
    for batch, _, _ in scheduler.seats():
        counted[batch] = counted.get(batch, 0) + 1
    return sorted(counted.values())


def go_on(scheduler: Scheduler) -> list[Pack]:
    """Every micro-batch makes a step, and all of them come back."""
    packs = []
    while (pack := scheduler.any_pack()) is not None:
        packs.append(pack)
    for pack in packs:
        scheduler.take_tokens(pack.micro_batch, pack.step, [8] * sum(row.wants_token for row in pack.rows))
    return packs


def test_a_full_arena_is_parted_and_joined_without_a_copy() -> None:
    """Each slot keeps its cells, so the first cell of a row's slot never changes."""
    scheduler, pace = adapting_scheduler([(2, 14)] * 8, tiers=(8 * 16,), slots=8, start=1)
    for count, shares in ((4, [2, 2, 2, 2]), (2, [4, 4]), (1, [8]), (3, [2, 2, 4])):
        pace.count = count
        for _ in range(3):
            packs = go_on(scheduler)
        assert by_batch(scheduler) == shares
        cells = [pack.range.cells(row.slot).start for pack in packs for row in pack.rows]
        assert sorted(cells) == list(range(0, 128, 16))
        assert scheduler.decisions() == ()


def test_two_tiers_are_parted_and_joined_without_a_copy_and_evenly() -> None:
    """Twelve slots of a stage are on its device and four in host memory, a fourth of each micro-batch's."""
    tiers = (12 * 16, 4 * 16)
    scheduler, pace = adapting_scheduler([(2, 14)] * 16, tiers=tiers, slots=16, start=1)
    parts = ((4, [(3, 1)] * 4), (2, [(6, 2)] * 2), (1, [(12, 4)]), (3, [(3, 1)] * 2 + [(6, 2)]))
    for count, expected in parts:
        pace.count = count
        for _ in range(3):
            packs = go_on(scheduler)
        assert sorted(tuple(strip.slots for strip in pack.range.strips) for pack in packs) == expected
        assert all([row.slot for row in pack.rows] == list(pack.range.slots()) for pack in packs)
        cells = [pack.range.cells(row.slot).start for pack in packs for row in pack.rows]
        assert sorted(cells) == list(range(0, 256, 16))
    assert scheduler.decisions() == ()


def test_an_odd_slot_of_one_tier_goes_down_and_of_the_next_one_up() -> None:
    scheduler, pace = adapting_scheduler([(2, 14)] * 9, tiers=(3 * 16, 5 * 16, 16), slots=9, start=1)
    pace.count = 2
    for _ in range(2):
        packs = go_on(scheduler)
    assert [[strip.slots for strip in pack.range.strips] for pack in packs] == [[2, 2, 1], [1, 3, 0]]


def test_the_device_fills_first_and_a_long_record_goes_where_it_fits() -> None:
    options = SchedulerOptions(micro_batches=1, slots=4, tiers=(64, 128))
    scheduler = Scheduler(options, FixedPace(window=1, chunk=64))
    with pytest.raises(RecordError, match="the nodes hold 128"):
        scheduler.offer(make_sequence(0, prompt=120, max_tokens=9))
    for line in range(3):
        scheduler.offer(make_sequence(line, prompt=4, max_tokens=28))
    short = launched(scheduler)
    assert [row.slot for row in short.rows] == [0, 2, 1], "two on the device, then one in host memory"
    scheduler = Scheduler(options, FixedPace(window=1, chunk=64))
    scheduler.offer(make_sequence(0, prompt=100, max_tokens=9))
    long = launched(scheduler)
    assert ([row.slot for row in long.rows], long.range.numbers) == ([1], (0, 0, 112, 64, 1))


def test_with_room_to_spare_sequences_are_copied_so_that_all_micro_batches_have_as_many() -> None:
    scheduler, pace = adapting_scheduler([(4, 12)] * 12, tiers=(64 * 16,), slots=12, start=4)
    for count, shares in ((3, [4, 4, 4]), (2, [6, 6]), (4, [3, 3, 3, 3])):
        pace.count = count
        for _ in range(3):
            go_on(scheduler)
        assert by_batch(scheduler) == shares


def test_sequences_that_fit_nowhere_else_go_on_where_they_are_and_it_is_said_so() -> None:
    """A micro-batch of long slots below one of short ones: neither side by side nor room for a copy."""
    needs = [(4, 12), (4, 12), (20, 12), (4, 12), (4, 12), (4, 12)]
    scheduler, pace = adapting_scheduler(needs, tiers=(64,), slots=4, start=2, most=2)
    assert by_batch(scheduler) == [1, 2]
    pace.count = 1
    go_on(scheduler)
    assert by_batch(scheduler) == [1, 2]
    assert "fit no free slot" in scheduler.decisions()[-1]
    for _ in range(40):
        go_on(scheduler)
    assert scheduler.micro_batches == 1
    assert scheduler.decisions() == ()


def test_the_arena_is_shared_out_anew_only_when_nothing_is_on_its_way_for_it() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=2, slots=2, tiers=(128,)), FixedPace())
    for line in range(2):
        scheduler.offer(make_sequence(line, prompt=4, max_tokens=1))
    packs = [launched(scheduler, micro_batch) for micro_batch in range(2)]
    scheduler.offer(make_sequence(2, prompt=90, max_tokens=9))
    scheduler.preempt_line(1)
    scheduler.take_tokens(0, packs[0].step, [7])
    scheduler.take_tokens(0, launched(scheduler).step, [7])
    assert scheduler.live == 0
    assert scheduler.any_pack() is None, "a row of the sequence that was dropped may still write there"
    scheduler.take_tokens(1, packs[1].step, [7])
    assert launched(scheduler).range.count == 1


def test_after_a_restart_all_begin_again_at_step_one_in_the_old_order() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=2, slots=2, tiers=(128,)), FixedPace())
    for line in range(3):
        scheduler.offer(make_sequence(line, prompt=4, max_tokens=9))
    for micro_batch in range(2):
        launched(scheduler, micro_batch)
    scheduler.take_tokens(0, 1, [7])
    scheduler.restart()
    assert (scheduler.live, scheduler.in_flight()) == (0, ())
    packs = [launched(scheduler, micro_batch) for micro_batch in range(2)]
    assert [(pack.step, pack.tokens[0], len(pack.tokens)) for pack in packs] == [(1, 1000, 5), (1, 1001, 4)]


def test_neighbours_in_the_job_with_like_lengths_share_a_micro_batch() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=2, slots=4, tiers=(2 * 128,)), FixedPace())
    for line, prompt in enumerate((10, 100, 12, 90)):
        scheduler.offer(make_sequence(line, prompt=prompt, max_tokens=4))
    scheduler.close()
    together = [{token for token in launched(scheduler, m).tokens if token >= 1000} for m in range(2)]
    assert together[0] == {1000, 1002}
