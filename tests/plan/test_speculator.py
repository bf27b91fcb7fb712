"""Guessing by what is measured is no slower than the better of always and never, whatever the pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.plan.acceptance import Acceptance, Outcome
from bbquic.plan.controller import Line, Measured, StageFigures
from bbquic.plan.simulate_speculation import Fixed, Played, chain, fixed_time, simulate_guessing
from bbquic.plan.speculation import PLAIN, TREE_TOKENS, Trees, pays, row_rate, step_with_trees, with_trees
from bbquic.plan.speculator import LEVELS, Situation, Speculator, forecasts
from bbquic.units import BytesPerSecond, Seconds

PASSES = 1000  # of a micro-batch, by the best fixed number of guesses: so many are a short job
PARTS = 2  # of a job, which may differ in what is right
START = 60  # plain steps that it may take to learn what is what: 1 % of a job of 6000

logs = st.floats(-2.5, -0.7).map(lambda power: 10**power)
stages = st.builds(
    lambda name, fixed, share, rate: StageFigures(
        name, Line(), Line(fixed, fixed * share), Line(1e-4, 1e-6), Line(100, 8192), rate
    ),
    st.just("one"),
    logs,
    st.floats(-4, -1).map(lambda power: 10**power),
    st.none() | st.floats(5.5, 8.2).map(lambda power: BytesPerSecond(10**power)),
)
pipelines = st.builds(
    Measured,
    st.lists(stages, min_size=1, max_size=4).map(tuple),
    st.sampled_from([0.0, 0.01, 0.05, 0.2]).map(Seconds),
)
draftings = st.sampled_from([Line(), Line(0.001, 1e-4), Line(0.002, 1e-3)])


@st.composite
def jobs(draw: st.DrawFn) -> Played:
    """Halves of a job are alike or not."""
    rate, other = draw(st.floats(0, 0.95)), draw(st.none() | st.floats(0, 0.95))
    chains = [chain(one, LEVELS[-1]) for one in (rate, rate if other is None else other)]

    def truth(done: float) -> Sequence[float]:
        return chains[min(PARTS - 1, int(done * PARTS))]

    count, rows = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.sampled_from([2, 4, 8, 32]))
    return Played(draw(pipelines), count, rows, PASSES, truth, draw(draftings))


def lengthened(job: Played) -> tuple[Played, float]:
    """The job with so many tokens that the best number of guesses has PASSES passes, and its time so."""
    times = {guesses: fixed_time(job, guesses, PARTS) for guesses in LEVELS}
    best = min(times, key=lambda guesses: times[guesses])
    passes = (
        job.tokens
        / PARTS
        * sum(1 / (1 + sum(job.truth((part + 0.5) / PARTS)[:best])) for part in range(PARTS))
    )
    longer = replace(job, tokens=job.tokens * PASSES / passes)
    return longer, fixed_time(longer, best, PARTS)


@settings(max_examples=30, deadline=None)
@given(job=jobs(), guesses=st.sampled_from(LEVELS))
def test_always_as_many_guesses_take_what_the_formula_says(job: Played, guesses: int) -> None:
    chances = job.truth(0.0)
    job = replace(job, tokens=120, truth=lambda _: chances)
    steps = 6 * step_with_trees(job.measured, job.rows * job.count, job.count, Trees(guesses, guesses))
    drafting = 6 * job.count * job.drafting(guesses * job.rows)
    took = simulate_guessing(job, Fixed(guesses))
    assert took == pytest.approx(fixed_time(job, guesses), abs=steps + drafting)


@settings(max_examples=8, deadline=None)
@given(job=jobs(), seed=st.integers(0, 2**32))
def test_it_is_never_slower_than_the_best_number_of_guesses_or_none(job: Played, seed: int) -> None:
    job, best = lengthened(job)
    speculator = Speculator(lambda: Situation(job.measured, job.count, job.drafting))
    took = simulate_guessing(job, speculator, seed)
    plain = step_with_trees(job.measured, job.rows * job.count, job.count, PLAIN)
    assert took <= 1.01 * best + START * plain


def pipeline(rate_mbps: float, *, compute: float = 0.03, latency: float = 0.05) -> Measured:
    """Two stages with a link of 8 KB a token between them."""
    lane = Line(compute, compute / 1000)
    link = BytesPerSecond(rate_mbps * 1e6 / 8)
    first = StageFigures("home", Line(), lane, Line(), Line(0, 8192), link)
    return Measured((first, StageFigures("paris", Line(), lane, Line(), Line())), Seconds(latency))


def speculator_of(measured: Measured, count: int = 1) -> Speculator:
    situation = Situation(measured, count)
    return Speculator(lambda: situation)


def play(speculator: Speculator, measured: Measured, rate: float, passes: int, rows: int = 8) -> list[int]:
    """The numbers of guesses of so many passes, of which each guess is right at that rate."""
    rng, used = random.Random(1), []
    for _ in range(passes):
        guesses = speculator.guesses(0, rows)
        used.append(guesses)
        right = [
            sum(1 for _ in takewhile(lambda _: rng.random() < rate, range(guesses))) for _ in range(rows)
        ]
        for count in right if guesses else []:
            speculator.saw(Outcome.of_path(guesses, guesses, guesses, range(count + 1)))
        speculator.noted(0, rows, guesses, rows + sum(right))
    return used


def test_a_fast_link_gets_many_guesses_a_slower_one_fewer_and_a_slow_one_none() -> None:
    levels = []
    for rate_mbps in (1000, 50, 2):
        measured = pipeline(rate_mbps)
        levels.append(play(speculator_of(measured), measured, 0.6, 300)[-20:])
    many, fewer, none = (max(set(used), key=used.count) for used in levels)
    assert many > fewer > none == 0


def test_what_no_longer_pays_is_given_up_and_what_pays_again_is_found_again() -> None:
    measured = pipeline(50)
    speculator = speculator_of(measured)
    counts = [play(speculator, measured, rate, 700)[-100:].count(0) for rate in (0.8, 0.02, 0.8)]
    assert counts[0] < 10
    assert counts[1] > 80
    assert counts[2] < 10


def test_trials_cost_a_small_share_of_the_time_where_nothing_is_ever_right() -> None:
    measured = pipeline(20)
    speculator = speculator_of(measured)
    plain = step_with_trees(measured, 8, 1, PLAIN)
    used = play(speculator, measured, 0.0, 3000)
    took = sum(step_with_trees(measured, 8, 1, Trees(guesses, guesses)) for guesses in used)
    assert took <= 1.01 * len(used) * plain
    assert any(used[1000:]), "it is tried now and then"


@given(
    count=st.integers(1, 5),
    seen=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.sampled_from([0, 1, 2])), max_size=60),
    rate=st.floats(0, 1),
)
def test_what_is_known_of_a_pipeline_may_change_from_one_look_to_the_next(
    count: int, seen: list[tuple[int, int, int]], rate: float
) -> None:
    """A link's rate becomes known, a stage is found, micro-batches come and go."""
    whole = pipeline(50)
    unknown = replace(whole, stages=(replace(whole.stages[0], rate=None), whole.stages[1]))
    known = [Measured(whole.stages[:1], whole.latency), unknown, whole]
    now = whole
    speculator, rng = Speculator(lambda: Situation(now, count)), random.Random(1)
    for micro_batch, rows, which in seen:
        now = known[which]
        guesses = speculator.guesses(micro_batch, rows)
        assert rows * guesses <= TREE_TOKENS
        right = sum(takewhile(bool, (rng.random() < rate for _ in range(guesses))))
        for _ in range(rows if guesses else 0):
            speculator.saw(Outcome.of_path(guesses, guesses, guesses, range(right + 1)))
        speculator.noted(micro_batch, rows, guesses, rows * (1 + right))
        speculator.decisions()


def test_changes_have_reasons_with_figures() -> None:
    measured = pipeline(1000)
    speculator = speculator_of(measured)
    play(speculator, measured, 0.8, 200)
    first, *_, now = speculator.decisions()
    assert first.startswith("micro-batch 0: ")
    assert "guesses in place of none, " in first
    assert "tokens a row in" in first
    assert "guesses a row; of first guesses" in now
    assert speculator.typical.guesses > 0


def test_nothing_is_guessed_while_nothing_is_measured_nor_more_than_is_allowed() -> None:
    assert Speculator(lambda: None).guesses(0, 8) == 0
    assert Speculator(lambda: None).decisions() == ()
    empty = Situation(Measured((), Seconds(0.0)), 1)
    assert Speculator(lambda: empty).guesses(0, 8) == 0
    measured = pipeline(10_000)
    situation = Situation(measured, 1)
    assert max(play(Speculator(lambda: situation, most=4), measured, 0.95, 200)) == 4


@given(
    measured=pipelines,
    rows=st.integers(1, 64),
    count=st.integers(1, 8),
    guesses=st.floats(0, 32),
    kept=st.floats(0, 1),
    drafting=draftings,
)
def test_a_pipeline_with_trees_is_one_whose_rows_are_longer(
    measured: Measured, rows: int, count: int, guesses: float, kept: float, drafting: Line
) -> None:
    trees = Trees(guesses, guesses * kept, 1.0, drafting)
    step = with_trees(measured, trees).step(rows, count)
    assert step_with_trees(measured, rows, count, trees) == pytest.approx(step)
    plain = step_with_trees(measured, rows, count, PLAIN)
    assert plain == pytest.approx(measured.step(rows, count))
    assert step >= plain * (1 - 1e-9)


@given(measured=pipelines, rows=st.integers(1, 64), count=st.integers(1, 8), committed=st.floats(1, 32))
def test_the_rule_is_that_of_the_architecture(
    measured: Measured, rows: int, count: int, committed: float
) -> None:
    trees = Trees(32, 32, committed)
    steps = [step_with_trees(measured, rows, count, one) for one in (trees, PLAIN)]
    rates = [row_rate(measured, rows, count, one) for one in (trees, PLAIN)]
    assert (rates[0] > rates[1]) == pays(committed, *steps) or rates[0] == pytest.approx(rates[1])


def test_forecasts_take_what_a_drafter_gives_not_what_it_is_asked_for() -> None:
    acceptance = Acceptance(8)
    for _ in range(300):
        acceptance.learn([Outcome(8, 0, 0, {})] * 4)
    found = forecasts(Situation(pipeline(20), 1), 8, acceptance, (0, 8))
    assert found[8].step == pytest.approx(found[0].step, rel=0.05)


def test_what_cannot_be_is_refused() -> None:
    for wrong in ((1.0, 2.0, 1.0), (1.0, -0.1, 1.0), (1.0, 1.0, 0.5)):
        with pytest.raises(ValueError, match=r"are kept|commits a token"):
            Trees(*wrong)
