"""Guessing by measurements: a drafter that is watched, and a pipeline as its packs tell of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pipeline_simulation import noted

from bbquic.draft.drafter import Ask
from bbquic.draft.tree import DraftTree, grow
from bbquic.model.sampling import Sampling
from bbquic.runtime.pace import MeasuredPace
from bbquic.runtime.speculating import MeasuredSpeculation, WatchedDrafter
from bbquic.units import BytesPerSecond, Seconds


class Same:
    """Guesses the newest token again, for even tokens alone."""

    name = "same"
    is_instant = True

    def __init__(self) -> None:
        self.learnt: list[tuple[int, tuple[int, ...]]] = []

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [
            grow(ask.tokens[-1], lambda _: [(7, 0.5)], 0 if ask.tokens[-1] % 2 else ask.guesses, ask.depth)
            for ask in asks
        ]

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        self.learnt.append((key, tuple(path)))

    def forget(self, key: int) -> None:
        self.learnt.append((key, ()))


def ask(key: int, token: int, guesses: int = 4) -> Ask:
    return Ask(key, [token], Sampling(), guesses, guesses)


def test_a_watched_drafter_drafts_as_before_and_tells_what_it_was_asked_gave_and_got_right() -> None:
    drafter = Same()
    watched = WatchedDrafter(drafter)
    trees = watched.draft([ask(1, 2), ask(2, 3)])
    assert trees == drafter.draft([ask(1, 2), ask(2, 3)])
    watched.passed(1, 2)
    watched.learn(1, trees[0], (0, 1, 2))
    found = watched.outcomes()
    assert [(one.asked, one.given, one.kept, one.right) for one in found] == [
        (4, 0, 0, {}),
        (4, 4, 2, {1: 1.0, 2: 1.0}),
    ]
    assert watched.outcomes() == []
    watched.forget(1)
    assert drafter.learnt == [(1, (0, 1, 2)), (1, ())]
    assert (watched.name, watched.is_instant) == ("same", True)
    assert watched.time(8) == pytest.approx(watched.spent)


def test_ranks_are_by_weight_however_nodes_are_numbered() -> None:
    watched = WatchedDrafter(Same())
    tree = DraftTree((5, 6, 7, 8), (0, 0, 0, 2), (1.0, 0.1, 0.9, 0.8))
    watched.learn(1, tree, (0, 2, 3))
    assert watched.outcomes()[0].right == {1: 1.0, 2: 1.0}


def test_what_pays_by_the_timings_of_packs_is_used_and_what_does_not_is_not() -> None:
    """A pack takes 100 ms, whatever is in it; then each token takes 100 ms."""
    for fixed, each, uses in ((0.1, 0.0001, True), (0.0, 0.1, False)):
        pace = MeasuredPace(micro_batches=1, depth=4, prefill_tokens=64)
        speculation = MeasuredSpeculation(pace, Same(), 8)
        assert speculation.guesses(0, 4) == 0, "nothing is known"
        used = 0
        for step in range(120):
            guesses = speculation.guesses(0, 4)
            trees = (
                speculation.drafter.draft([ask(key, 2 * key, guesses) for key in range(4)]) if guesses else []
            )
            for key, tree in enumerate(trees):
                speculation.drafter.learn(key, tree, (0, 1) if key % 2 else (0,))
            speculation.noted(0, 4, guesses, 4 + len(trees) // 2)
            tokens = 4 * (1 + guesses) + 4 * (step % 3)  # prompts beside them
            took = fixed + each * tokens
            pace.record(tokens, Seconds(took), [noted(0, 0.0, 0.0, took, tokens)])
            used += step >= 60 and guesses > 0
        assert (used > 50) == uses
        assert used < 10 or uses
        assert speculation.decisions()[-1].endswith("are right")
        assert (pace.trees.guesses > 0) == uses


def test_pruned_packs_are_noted_with_the_tokens_that_each_stage_had() -> None:
    pace = MeasuredPace(micro_batches=1, depth=4, prefill_tokens=64)
    for tokens in range(10, 60, 5):
        timings = [
            noted(0, 0.0, 0.0, 0.01 * tokens, tokens),
            noted(1, 0.0, 0.0, 0.02 * tokens / 5, tokens // 5),
        ]
        pace.record(tokens, Seconds(1.0), timings, tokens // 5)
    pace.link_rate(0, BytesPerSecond(1e6))
    measured = pace.measured()
    assert measured is not None
    first, second = measured.stages
    assert first.compute(50) == pytest.approx(0.5, rel=1e-3)
    assert second.compute(10) == pytest.approx(0.2, rel=1e-3)
    assert first.sent(10) == pytest.approx(5 * second.sent(10), rel=0.01)
