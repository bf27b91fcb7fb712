"""Guessing by what is measured is no slower than the better of always and never, whatever the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.plan.acceptance import Acceptance
from bbquic.plan.controller import Line, Measured, StageFigures
from bbquic.plan.simulate_speculation import Fixed, Played, chain, simulate_guessing
from bbquic.plan.speculation import PLAIN, Trees, row_rate, step_with_trees, with_trees
from bbquic.plan.speculator import LEVELS, Situation, Speculator, forecasts
from bbquic.units import BytesPerSecond, Seconds

PASSES = 1500  # of a micro-batch, by the best fixed number of guesses: so many are a short job
START = 14  # plain steps that it may take to learn what is what

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
    """Phases of half of a job at least."""
    rates = draw(st.lists(st.floats(0, 0.95), min_size=1, max_size=2))
    chains = [chain(rate, LEVELS[-1]) for rate in rates]

    def truth(done: float) -> Sequence[float]:
        return chains[min(len(chains) - 1, int(done * len(chains)))]

    count, rows = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.sampled_from([2, 4, 8, 32]))
    return Played(draw(pipelines), count, rows, PASSES, truth, draw(draftings))


def fixed_times(job: Played) -> dict[int, Seconds]:
    return {guesses: simulate_guessing(job, Fixed(guesses)) for guesses in LEVELS}


def lengthened(job: Played) -> tuple[Played, dict[int, Seconds]]:
    """The job with so many tokens that the best number of guesses has PASSES passes, and its times."""
    times = fixed_times(job)
    longer = Played(
        job.measured, job.count, job.rows, PASSES * times[0] / min(times.values()), job.truth, job.drafting
    )
    return longer, {
        guesses: Seconds(time * longer.tokens / job.tokens) for guesses, time in times.items()
    }


@settings(max_examples=12, deadline=None)
@given(job=jobs(), seed=st.integers(0, 2**32))
def test_it_is_never_slower_than_the_best_number_of_guesses_or_none(job: Played, seed: int) -> None:
    job, fixed = lengthened(job)
    speculator = Speculator(lambda: Situation(job.measured, job.count, job.drafting))
    took = simulate_guessing(job, speculator, seed)
    plain = step_with_trees(job.measured, job.rows * job.count, job.count, PLAIN)
    assert took <= 1.01 * min(fixed.values()) + START * plain
