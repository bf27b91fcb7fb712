"""Who has a slot of a drafter's memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bbquic.draft.slots import Slots, shared

ROUNDS = st.lists(
    st.tuples(st.sets(st.integers(0, 6), max_size=5), st.sets(st.integers(0, 6), max_size=2)), max_size=20
)


@given(rounds=ROUNDS, count=st.integers(1, 5), smaller=st.integers(1, 5))
def test_no_two_sequences_share_a_slot(
    rounds: list[tuple[set[int], set[int]]], count: int, smaller: int
) -> None:
    slots = Slots(count)
    for place, (asked, over) in enumerate(rounds):
        held = slots.take(sorted(asked))
        numbers = [one.slot for one in held.values()]
        assert len(set(numbers)) == len(numbers) == min(len(asked), len(held))
        assert all(0 <= number < count for number in numbers)
        for key in over:
            slots.forget(key)
        if place == 10:
            moves = slots.resize(smaller)
            assert len({old for old, _ in moves}) == len(moves) <= min(count, smaller)
            assert sorted(new for _, new in moves) == list(range(len(moves)))
            count = smaller


def test_sequences_that_take_turns_never_rob_each_other() -> None:
    slots = Slots(2)
    for _ in range(5):
        for batch in ([1, 2], [3, 4]):  # two micro-batches, of which the memory holds one
            assert list(slots.take(batch)) == ([1, 2] if batch == [1, 2] else [])


def test_the_slot_of_a_sequence_that_nobody_asks_about_any_more_goes_to_one_that_asks_again() -> None:
    slots = Slots(2)
    slots.take([1, 2])
    assert list(slots.take([2, 3])) == [2]
    assert list(slots.take([2, 3])) == [2, 3]
    assert list(slots.take([1])) == []


def test_a_sequence_that_is_over_frees_its_slot_at_once() -> None:
    slots = Slots(1)
    slots.take([1])
    slots.forget(1)
    assert list(slots.take([2])) == [2]


@given(one=st.lists(st.integers(0, 1), max_size=8), other=st.lists(st.integers(0, 1), max_size=8))
def test_what_two_sequences_share_is_how_both_begin(one: list[int], other: list[int]) -> None:
    count = shared(one, other)
    assert one[:count] == other[:count]
    assert one[count : count + 1] != other[count : count + 1] or count == min(len(one), len(other))
