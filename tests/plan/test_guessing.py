"""Where guesses would pay is where the prediction with such trees is the better one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cost import MemoryOptions
from bbquic.plan.guessing import WouldPay, in_words, would_pay
from bbquic.plan.predict import predict
from bbquic.plan.search import search
from bbquic.plan.speculation import TREE_TOKENS, Trees
from clusters import mesh, random_cluster, simple_node, small_job, small_model

OPTIONS = SearchOptions(memory=MemoryOptions(share=1.0, pack_tokens=1))
PAIR = (simple_node("a", memory=20_000), simple_node("b", memory=20_000))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), share=st.floats(0.02, 0.98))
def test_above_the_figure_a_prediction_with_trees_is_faster_and_below_it_is_slower(
    seed: int, share: float
) -> None:
    cluster, model, job = random_cluster(Random(seed), 3, missing=0.0), small_model(), small_job()
    plan = search(cluster, model, job, OPTIONS)
    plain = plan.prediction.tokens_per_second
    for one in would_pay(cluster, model, job, plan.layout, 8):
        for low, high, faster in (
            (1.0, one.committed or 1.0 + one.guesses, False),
            (one.committed or 1.0 + one.guesses, 1.0 + one.guesses, True),
        ):
            committed = low + share * (high - low)
            if high - low > 1e-3:
                trees = Trees(one.guesses, one.guesses, committed)
                rate = predict(cluster, model, job, plan.layout, trees=trees).tokens_per_second
                assert (rate > plain) == faster


def test_slow_links_ask_for_more_and_packs_are_bounded() -> None:
    model, job = small_model(12), small_job(8)
    needed = []
    for rate in (1e6, 3e3):
        cluster = mesh(PAIR, rate)
        plan = search(cluster, model, job, OPTIONS)
        (one,) = would_pay(cluster, model, job, plan.layout, 1)
        needed.append(one.committed or 2.0)
    assert needed[0] < needed[1]
    plan = search(mesh(PAIR, 1e6), model, job, OPTIONS)
    rows = plan.layout.batch / plan.layout.micro_batches
    counts = [one.guesses for one in would_pay(mesh(PAIR, 1e6), model, job, plan.layout, 10**6)]
    assert counts == [count for count in (1, 2, 4, 8, 16, 32) if rows * count <= TREE_TOKENS]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((), None),
        ((WouldPay(1, None), WouldPay(2, None)), "guessing ahead would not pay if every guess were right"),
        (
            (WouldPay(1, 1.25), WouldPay(2, 1.5), WouldPay(4, None)),
            "guessing ahead pays above so many tokens a pass, by guesses: 1.25 with 1, 1.50 with 2",
        ),
    ],
)
def test_it_is_said_in_a_line(found: tuple[WouldPay, ...], words: str | None) -> None:
    assert in_words(found) == words
