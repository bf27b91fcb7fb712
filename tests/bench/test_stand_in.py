"""The parts of a replay that need no network: stand-ins' times and messages, bounds, the paper's figures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from bench.stand_in.activations import SHORT, Pool, widen, widened
from bench.stand_in.bounds import (
    Pipeline,
    batch_within,
    best_micro_batches,
    kv_bytes_per_token,
    possible,
)
from bench.stand_in.cell import TAIL, Cell, measure
from bench.stand_in.cost import CostTable, StandIn
from bench.stand_in.observed import Passed
from bench.stand_in.paper import ENVIRONMENTS, MODELS, OWN_DELAYS, experiment
from bench.stand_in.ratios import check_ratios
from bench.stand_in.worker import Timer
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.runtime.timing import StageTiming
from bbquic.units import Bytes, BytesPerSecond, Seconds

HIDDEN = {"falcon_7b": 4544, "mixtral_8x7b": 4096, "falcon_40b": 8192, "llama_30b": 6656}
NUMBERED = np.arange(16 * 32 * 576, dtype=np.uint32).reshape(16, 32, 576)  # every recorded value another one


def test_a_step_of_the_whole_batch_takes_its_time_and_of_a_part_mostly_so() -> None:
    cost = CostTable.of_step(0.1)
    assert [cost(rows) for rows in (0, 16, 32, 64)] == pytest.approx([0.085, 0.0925, 0.1, 0.115])


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=6),
    st.integers(0, 4000),
)
def test_a_cost_table_is_linear_between_its_points(jumps: list[tuple[int, float]], rows: int) -> None:
    points = list(itertools.accumulate(jumps, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0.0)))
    known, times = zip(*points, strict=True)
    expected = float(np.interp(rows, known, times))
    if rows > known[-1]:
        slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
        expected = times[-1] + slope * (rows - known[-1])
    assert CostTable(tuple(points))(rows) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("points", [((0, 1.0),), ((0, 1.0), (0, 2.0)), ((0, 1.0), (1, 0.5))])
def test_a_cost_table_that_does_not_rise_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable(points)


def test_a_stand_in_comes_out_of_its_manifest_as_it_went_in() -> None:
    stand_in = StandIn(4544, CostTable.of_step(0.0354), 32)
    assert StandIn.of_config(stand_in.manifest().config) == stand_in


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9216), st.integers(0, 200), st.integers(1, 32))
def test_no_recorded_value_is_in_a_message_twice(hidden: int, first: int, rows: int) -> None:
    message = widen(NUMBERED, hidden, first + rows)[first:]
    assert message.shape == (rows, hidden)
    assert len(np.unique(message)) == message.size


def test_no_row_and_no_channel_of_a_large_message_is_another_ones_copy() -> None:
    message = widened("float16", 4544, 2048)
    assert len(np.unique(message, axis=0)) == 2048
    assert len(np.unique(message, axis=1).T) == 4544


def test_a_hidden_size_beyond_the_recording_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden size"):
        widened("float16", 9217, 32)


def test_every_message_is_another_slice_of_the_pool_and_no_copy() -> None:
    pool = Pool("float16", 576, most_rows=48)
    whole = pool.next_slice(48).base
    seen = [pool.next_slice(rows) for rows in (32, 8, 48, 48, 16, 31, 48, 48)]
    assert all(one.base is whole for one in seen)
    assert all(not np.array_equal(one, other) for one, other in itertools.combinations(seen, 2))
    with pytest.raises(ValueError, match="49 rows"):
        pool.next_slice(49)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("hidden", HIDDEN.values())
def test_messages_compress_as_the_recorded_model_s_do(dtype: str, hidden: int) -> None:
    pool = Pool(dtype, hidden, most_rows=32)
    for _ in range(3):
        check_ratios(dtype, pool.next_slice(32))


def test_messages_with_copied_rows_are_found_out() -> None:
    copied = np.tile(widened("bfloat16", 4096, 8), (4, 1))
    with pytest.raises(AssertionError, match="stand-in's bfloat16 message"):
        check_ratios("bfloat16", copied)


def test_the_timer_makes_up_for_a_system_that_wakes_it_late() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 300e-6

    timer = Timer(lambda: now[0], sleep)
    took = []
    for _ in range(100):
        began = now[0]
        timer.wait(0.01, began)
        took.append(now[0] - began)
    assert took[0] == pytest.approx(0.0103)
    assert took[-1] == pytest.approx(0.01, abs=1e-6)


def simulated_step(pipeline: Pipeline, batch: int, micro_batches: int) -> float:
    """Oracle: micro-batches go round over stages and hops that serve one at a time, in order."""
    rows = batch // micro_batches
    compute, send = pipeline.cost(rows), pipeline.serialisation(rows)
    resources = [(compute, 0.0)]
    for _ in range(pipeline.stages - 1):
        resources += [(send, pipeline.delay), (compute, 0.0)]
    free = [0.0] * len(resources)
    back = [0.0] * micro_batches
    rounds = 40 * micro_batches
    halfway = 0.0
    for number in range(rounds):
        for micro_batch in range(micro_batches):
            at = back[micro_batch]
            for place, (busy, travels) in enumerate(resources):
                at = free[place] = max(at, free[place]) + busy
                at += travels
            back[micro_batch] = at + (pipeline.delay if pipeline.stages > 1 else 0.0)
        if number == rounds // 2 - 1:
            halfway = back[0]
    return (back[0] - halfway) / (rounds - rounds // 2)


@settings(max_examples=100, deadline=None)
@given(
    stages=st.integers(1, 4),
    micro_batches=st.sampled_from([1, 2, 4, 8]),
    compute=st.floats(0.001, 0.2),
    rate=st.floats(1e5, 1e9),
    delay=st.floats(0, 0.2),
)
def test_circulating_micro_batches_reach_the_bound(
    stages: int, micro_batches: int, compute: float, rate: float, delay: float
) -> None:
    cost = CostTable.of_step(compute)
    pipeline = Pipeline(stages, 4096, cost, BytesPerSecond(rate), Seconds(delay))
    assert simulated_step(pipeline, 32, micro_batches) == pytest.approx(pipeline.step(32, micro_batches))


def test_a_bound_says_what_it_is_made_of() -> None:
    slow = experiment("falcon_40b", "E5").pipeline()
    assert slow.limit(32, 1) == "loop"
    assert slow.limit(1525, 4) == "link"
    assert experiment("falcon_7b", "E1").pipeline().limit(32, 8) == "compute"


def test_of_equal_bounds_the_least_m_is_best() -> None:
    alone = Pipeline(1, 4096, CostTable(((0, 0.0), (32, 0.1))), BytesPerSecond(1e6), Seconds(0.0))
    assert best_micro_batches(alone, 32, (8, 4, 2, 1)) == 1


def test_packs_beyond_the_protocol_are_not_possible() -> None:
    pipeline = experiment("falcon_7b", "E5").pipeline()
    assert not possible(pipeline, 4097, 1)
    assert possible(pipeline, 4096, 1)
    assert not possible(Pipeline(2, 16384, pipeline.cost, pipeline.rate, pipeline.delay), 4096, 1)
    assert not possible(pipeline, 4, 8)


def test_memory_for_kv_holds_as_many_sequences_as_fit() -> None:
    token = kv_bytes_per_token(8, 128)
    assert token == 4096
    assert batch_within(Bytes(token * 8 * 256 * 3 + 1), blocks=8, tokens=256, kv_heads=8, head_dim=128) == 3
    batches = {model: experiment(model, "E1").free_batch() for model in MODELS}
    assert batches == {"falcon_7b": 15258, "mixtral_8x7b": 1907, "falcon_40b": 1525, "llama_30b": 117}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_experiment_is_read_from_the_tables(environment: str) -> None:
    for model in MODELS:
        e = experiment(model, environment)
        assert e.hidden == HIDDEN[model]
        assert e.pipeline().message(32) == e.hidden * 64
        assert 0 < e.paper_unexplained < e.paper_step
    own, general = experiment(OWN_DELAYS, environment), experiment("llama_30b", environment)
    assert own.delay <= general.delay
    assert (own.compute, own.hidden, own.blocks) == (general.compute, general.hidden, general.blocks)


def test_what_the_paper_leaves_unexplained_in_one_data_centre() -> None:
    unexplained = [experiment(model, "E1").paper_unexplained for model in MODELS]
    assert [round(one * 1e3) for one in unexplained] == pytest.approx([186, 173, 306, 167], abs=1)
    assert math.isnan(experiment("falcon_40b", "E1").paper_tokens_per_s_microbatch)


def passes_of(cell: Cell, step: float, wandering: float = 0.0) -> list[Passed]:
    """Passes of two stages, each of 10 ms with 3 ms of queue, and hops of 5, 20 and 25 ms; the rest of a step
    is the coordinator's. `wandering` seconds more are in each of the hops by turns.
    """
    marks = (0, 0, 0, 0, 3000, 13000, 13000, 13000, 13000, 13000)
    passes = []
    for micro_batch in range(cell.micro_batches):
        for number in range(cell.steps):
            late = [wandering * (number % 3 == hop) for hop in range(3)]
            received = (number + 1) * (step + wandering) + 0.001 * micro_batch
            sent = received - 0.076 - wandering
            first = sent + 0.005 + late[0]
            second = first + 0.013 + 0.020 + late[1]
            timings = tuple(
                StageTiming(name, at, marks, 0, 0, 0.0) for name, at in (("a", first), ("b", second))
            )
            passes.append(Passed(micro_batch, number + 1, sent, received, 16, timings))
    return passes


CELL = Cell((1, 1), StandIn(576, CostTable.of_step(0.01), 16), "float16", 32, 2, warm_up=2, counted=3)


def test_the_parts_of_a_step_are_all_of_it() -> None:
    measured = measure(CELL, passes_of(CELL, step=0.1))
    assert measured.step == pytest.approx(0.1)
    assert len(measured.steps) == CELL.micro_batches * CELL.counted
    parts = measured.accounting.parts
    assert parts["compute"] == pytest.approx(0.020)
    assert parts["queue"] == pytest.approx(0.006)
    assert parts["hop_1"] == pytest.approx(0.005)
    assert parts["hop_2"] == pytest.approx(0.020)
    assert parts["hop_3"] == pytest.approx(0.025)
    assert parts["coordinator"] == pytest.approx(0.024)
    assert measured.accounting.error == pytest.approx(0.0, abs=1e-9)
    assert measured.tokens_per_second == pytest.approx(32 / 0.1)


def test_a_delay_that_no_part_has_in_the_median_shows_as_an_error() -> None:
    accounting = measure(CELL, passes_of(CELL, step=0.1, wandering=0.012)).accounting
    assert accounting.step == pytest.approx(0.112)
    assert accounting.error == pytest.approx(0.012 / 0.112)


def test_first_and_last_passes_do_not_count() -> None:
    passes = passes_of(CELL, step=0.1)
    for one in passes:
        if one.step < CELL.warm_up or one.step > CELL.steps - TAIL:
            one.received += 0.05
    assert measure(CELL, passes).steps == pytest.approx([0.1] * 6)


def test_a_run_that_lost_passes_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="micro-batch 1: 6 of 7 passes"):
        measure(CELL, passes_of(CELL, step=0.1)[:-1])
