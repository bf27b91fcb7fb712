"""Micro-batches joined and parted one change at a time; whole jobs are in test_circulation."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_simulation import make_sequence

from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from bbquic.runtime.seats import Pack
from paces import FixedPace


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


def first_cells(packs: list[Pack]) -> list[int]:
    return sorted(pack.range.cells(row.slot).start for pack in packs for row in pack.rows)


def test_a_full_arena_is_parted_and_joined_without_a_copy() -> None:
    """Each slot keeps its cells, so the first cell of a row's slot never changes."""
    scheduler, pace = adapting_scheduler([(2, 14)] * 8, tiers=(8 * 16,), slots=8, start=1)
    for count, shares in ((4, [2, 2, 2, 2]), (2, [4, 4]), (1, [8]), (3, [2, 2, 4])):
        pace.count = count
        for _ in range(3):
            packs = go_on(scheduler)
        assert by_batch(scheduler) == shares
        assert first_cells(packs) == list(range(0, 128, 16))
        assert scheduler.decisions() == ()


@settings(max_examples=25)
@given(
    quarter=st.lists(st.integers(0, 3), min_size=2, max_size=3).filter(any),
    counts=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6),
)
def test_tiers_are_parted_and_joined_without_a_copy_and_each_evenly(
    quarter: list[int], counts: list[int]
) -> None:
    """Each micro-batch has its part of the slots of each tier, and no slot's first cell ever changes."""
    slots = 4 * sum(quarter)
    tiers = tuple(4 * 48 * each for each in quarter)
    scheduler, pace = adapting_scheduler([(4, 44)] * slots, tiers=tiers, slots=slots, start=1)
    for count in counts:
        pace.count = count
        for _ in range(4):
            packs = go_on(scheduler)
        expected = [each * 4 // count for each in quarter]
        assert [[strip.slots for strip in pack.range.strips] for pack in packs] == [expected] * count
        assert all([row.slot for row in pack.rows] == list(pack.range.slots()) for pack in packs)
        assert first_cells(packs) == list(range(0, sum(tiers), 48))
    assert scheduler.decisions() == ()


def test_an_odd_slot_of_one_tier_goes_down_and_of_the_next_one_up() -> None:
    tiers = (3 * 48, 5 * 48, 48, 48)
    scheduler, pace = adapting_scheduler([(4, 44)] * 10, tiers=tiers, slots=10, start=1)
    pace.count = 2
    for _ in range(2):
        packs = go_on(scheduler)
    assert [[strip.slots for strip in pack.range.strips] for pack in packs] == [[2, 2, 1, 0], [1, 3, 0, 1]]
    assert first_cells(packs) == list(range(0, sum(tiers), 48))


def test_ranges_are_joined_where_each_tier_in_use_lines_up_and_not_before() -> None:
    """Slots of 48 cells: in the second tier the shares of 64 do not line up, in the first those of 96 do."""
    scheduler, pace = adapting_scheduler([(4, 44)] * 6, tiers=(192, 128), slots=6, start=2, most=2)
    assert by_batch(scheduler) == [3, 3]
    pace.count = 1
    assert len(go_on(scheduler)) == 2
    assert "fit no free slot" in scheduler.decisions()[-1]
    (leaving,) = (seq for batch, slot, seq in scheduler.seats() if (batch, slot) == (1, 1))
    assert scheduler.preempt_line(leaving.request.line)
    go_on(scheduler)
    (pack,) = go_on(scheduler)
    assert (scheduler.moved, len(pack.rows), pack.range.numbers) == (2, 6, (0, 4, 48, 192, 2))
    assert first_cells([pack]) == [0, 48, 96, 144, 192, 240]


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
