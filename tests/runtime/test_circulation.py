"""Whole jobs in simulated time: whatever overtakes what, every sequence is answered as if it were alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipeline_simulation import Chaos, Pipeline

from bbquic.kv.ranges import CELL_ALIGNMENT
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from paces import RandomPace


@st.composite
def any_tiers(draw: st.DrawFn) -> tuple[int, ...]:
    """One of them holds any sequence, whichever it is."""
    large = draw(st.integers(7, 60))
    others = draw(st.lists(st.integers(0, 60), max_size=2))
    place = draw(st.integers(0, len(others)))
    return tuple(CELL_ALIGNMENT * units for units in (*others[:place], large, *others[place:]))


@st.composite
def any_options(draw: st.DrawFn) -> SchedulerOptions:
    micro_batches = draw(st.integers(1, 4))
    return SchedulerOptions(
        micro_batches=micro_batches,
        slots=micro_batches + draw(st.integers(0, 8)),
        tiers=draw(any_tiers()),
        prefill_tokens=draw(st.integers(1, 64)),
        look_ahead=draw(st.integers(1, 12)),
        depth=draw(st.integers(1, 5)),
        start=draw(st.none() | st.integers(1, micro_batches)),
    )


any_jobs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=16)


@settings(max_examples=100)
@example(  # the last micro-batch that is asked is to retire, and is the only one with room
    options=SchedulerOptions(
        micro_batches=2, slots=2, tiers=(112,), prefill_tokens=33, look_ahead=1, depth=1, start=1
    ),
    jobs=[(20, 29)],
    seed=0,
    preempt=0.05,
    restart=0.0,
    delay=0.01,
    restless=0.02,
)
@given(
    options=any_options(),
    jobs=any_jobs,
    seed=st.integers(0, 2**32),
    preempt=st.sampled_from([0.0, 0.01, 0.05]),
    restart=st.sampled_from([0.0, 0.0, 0.003]),
    delay=st.sampled_from([0.01, 1.0, 20.0]),
    restless=st.sampled_from([None, 0.002, 0.02, 0.3]),
)
def test_every_sequence_is_answered_once_as_if_it_were_alone(
    options: SchedulerOptions,
    jobs: list[tuple[int, int]],
    seed: int,
    preempt: float,
    restart: float,
    delay: float,
    restless: float | None,
) -> None:
    """No slot is used twice, none is lost, no row is applied out of order or to another generation, whenever
    the number of micro-batches changes: the stages of the simulation look at every token of every row's slot.
    """
    rng = random.Random(seed)
    scheduler = Scheduler(options, None if restless is None else RandomPace(rng, options, restless))
    chaos = Chaos(repeat=0.1, preempt=preempt, restart=restart)
    Pipeline(scheduler, options, jobs, rng, chaos, delay=delay).run()


@pytest.mark.parametrize("seed", range(5))
def test_packs_are_in_flight_moved_and_dropped_in_these_jobs(seed: int) -> None:
    """What the property speaks of does happen."""
    options = SchedulerOptions(micro_batches=3, slots=12, tiers=(12 * 128,), prefill_tokens=8, depth=4)
    rng = random.Random(seed)
    scheduler = Scheduler(options, RandomPace(rng, options))
    jobs = [(1 + 7 * line % 50, 30) for line in range(24)]
    pipeline = Pipeline(scheduler, options, jobs, rng, Chaos(preempt=0.02))
    pipeline.run()
    assert pipeline.most_in_flight > options.micro_batches
    assert scheduler.moved > 0
    assert scheduler.preempted > 0


def test_by_measurements_a_full_pipeline_joins_the_micro_batches_of_its_tail() -> None:
    """A pack costs much by itself and distance little: fewer, fuller packs are the shorter step."""
    options = SchedulerOptions(micro_batches=6, slots=24, tiers=(24 * 128,))
    scheduler = Scheduler(options)
    jobs = [(20 + line, 10 + 3 * line) for line in range(24)]
    Pipeline(scheduler, options, jobs, random.Random(1), price=(1.0, 0.01), delay=0.01).run()
    assert scheduler.moved > 0


def test_by_measurements_a_long_loop_keeps_its_micro_batches() -> None:
    options = SchedulerOptions(micro_batches=3, slots=24, tiers=(24 * 128,))
    scheduler = Scheduler(options)
    jobs = [(20 + line, 10 + 3 * line) for line in range(24)]
    Pipeline(scheduler, options, jobs, random.Random(1), price=(0.01, 0.01), delay=10.0).run()
    assert scheduler.moved == 0


@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_are_joined_and_parted_while_the_job_goes_on(seed: int) -> None:
    """With room to spare sequences are copied to free slots; where the arena is full to the last slot they
    stay where they are under another name. Either way nearly all slots are always taken."""
    for room, start in ((4, 1), (1, 1), (1, 4)):
        options = SchedulerOptions(
            micro_batches=4, slots=16, tiers=(room * 16 * 64,), prefill_tokens=16, depth=3, start=start
        )
        rng = random.Random(seed)
        scheduler = Scheduler(options, RandomPace(rng, options, 0.01))
        jobs = [(8 + line % 5, 50 + line % 3) for line in range(64)]
        pipeline = Pipeline(scheduler, options, jobs, rng, delay=0.5)
        pipeline.run()
        assert pipeline.counts == {1, 2, 3, 4}
        assert (pipeline.copied if room > 1 else pipeline.renamed) > 0
        assert sum(pipeline.taken) > 0.97 * options.slots * len(pipeline.taken)
