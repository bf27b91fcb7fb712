"""What is learnt of a drafter, against what is drawn."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.plan.acceptance import MEMORY, Acceptance, Outcome

MOST = 16


def drawn(rng: random.Random, chances: list[float], asked: int) -> Outcome:
    """A row of a tree in which at most one child of a node is right: ranks stand for themselves."""
    right = {rank: 1.0 for rank in range(1, asked + 1) if rng.random() < chances[rank - 1]}
    return Outcome(asked, asked, asked, right)


@settings(max_examples=30)
@given(chances=st.lists(st.floats(0, 1), min_size=MOST, max_size=MOST), seed=st.integers(0, 2**32))
def test_one_number_of_guesses_tells_of_all_smaller_ones(chances: list[float], seed: int) -> None:
    rng, acceptance = random.Random(seed), Acceptance(MOST)
    for _ in range(150):
        acceptance.learn([drawn(rng, chances, MOST) for _ in range(8)])
    for guesses, committed in enumerate(acceptance.committed()):
        expected = 1 + sum(chances[:guesses])
        assert committed == pytest.approx(expected, abs=0.3 + 0.15 * guesses**0.5 + 0.03 * guesses)


@given(asked=st.lists(st.integers(1, MOST), max_size=30), seed=st.integers(0, 2**32))
def test_a_larger_tree_never_commits_less_nor_more_than_its_guesses(asked: list[int], seed: int) -> None:
    rng, acceptance = random.Random(seed), Acceptance(MOST)
    for guesses in asked:
        acceptance.learn([drawn(rng, [rng.random()] * MOST, guesses)])
    committed, sizes = acceptance.committed(), acceptance.sizes()
    assert committed[0] == 1
    assert sizes[0] == 0
    assert all(0 <= after - before <= 1 for before, after in pairwise(committed))
    assert all(0 <= after - before <= 1 for before, after in pairwise(sizes))
    assert 0 <= acceptance.kept <= 1


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_what_was_is_forgotten(rows: int) -> None:
    acceptance = Acceptance(4)
    for right in ({1: 1.0, 2: 1.0}, {}):
        for _ in range(round(5 * MEMORY / min(rows, 8))):
            acceptance.learn([Outcome(4, 4, 4, right)] * rows)
    assert acceptance.committed()[4] == pytest.approx(1, abs=0.1)


def test_what_was_never_asked_for_is_thought_to_go_on_as_it_went() -> None:
    acceptance = Acceptance(8)
    for _ in range(100):
        acceptance.learn([Outcome(4, 4, 4, {rank: 0.9**rank for rank in range(1, 5)})] * 8)
    assert acceptance.right()[7] == pytest.approx(0.9**8, rel=0.1)


def test_a_drafter_that_rarely_has_a_guess_is_cheap() -> None:
    acceptance = Acceptance(8)
    for _ in range(300):
        acceptance.learn([Outcome(8, 0, 0, {})] * 3 + [Outcome(8, 4, 2, {1: 1.0})])
    assert acceptance.sizes()[8] == pytest.approx(1, rel=0.1)
    assert acceptance.committed()[8] == pytest.approx(1.25, rel=0.05)
    assert acceptance.kept == pytest.approx(0.5, rel=0.05)


def test_a_new_micro_batch_begins_with_what_is_known_of_the_others() -> None:
    general = Acceptance(4)
    for _ in range(100):
        general.learn([Outcome.of_path(4, 4, 4, (0, 1, 2))] * 4)
    particular = Acceptance(4, general)
    assert particular.committed() == general.committed()
    particular.learn([Outcome(4, 4, 4, {})] * 64)
    assert particular.committed()[4] < general.committed()[4]
