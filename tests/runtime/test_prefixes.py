"""Beginnings that prompts share: read once, whoever reads them, and answers as without it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
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


@settings(max_examples=100)
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
    """Whatever is dropped, moved, cut anew or overtaken: the stages look at every token of every row's slot."""
    rng = random.Random(seed)
    scheduler = Scheduler(options, None if restless is None else RandomPace(rng, options, restless))
    chaos = Chaos(repeat=0.1, preempt=preempt, restart=restart)
    Pipeline(scheduler, options, jobs, rng, chaos, heads, delay=delay).run()
