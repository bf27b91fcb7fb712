"""The decisions that rest on measurements, each against its rule."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bbquic.runtime.chunks import LEAST, STRETCH, chunk_size
from bbquic.runtime.costs import LinearFit, StepCosts
from bbquic.runtime.pace import MeasuredPace
from bbquic.runtime.regroup import Room, places
from bbquic.runtime.timing import StageTiming
from bbquic.runtime.window import packs_in_flight
from bbquic.units import BytesPerSecond, Seconds

prices = st.floats(0, 10)
slopes = st.floats(0, 0.1)
sizes = st.lists(st.integers(1, 600), min_size=5, max_size=60)


def timing(compute: float, *, queue: float = 0.0, inbound: float = 0.0, sent: int = 0) -> StageTiming:
    """A stage that decodes, waits and computes, in seconds."""
    decoded = round(inbound * 1e6)
    began = decoded + round(queue * 1e6)
    ended = began + round(compute * 1e6)
    marks = (0, 0, decoded, decoded, began, ended, ended, ended, ended, ended)
    return StageTiming("node", 0.0, marks, sent, sent, 0.0)


def costs_of(a: float, b: float, *, latency: float = 0.0, stages: int = 3, queue: float = 0.0) -> StepCosts:
    """What was learnt of stages that all take a + b T, which are `latency` seconds apart in all."""
    costs = StepCosts()
    for tokens in (1, 8, 30, 64, 200, 512) * 3:
        compute = a + b * tokens
        elapsed = Seconds(stages * (compute + queue) + latency)
        costs.record(tokens, elapsed, [timing(compute, queue=queue)] * stages)
    return costs


@given(a=prices, b=slopes, xs=sizes)
def test_a_fit_finds_the_line_that_its_samples_lie_on(a: float, b: float, xs: list[int]) -> None:
    assume(max(xs) > 2 * min(xs))
    fit = LinearFit()
    for x in xs:
        fit.add(x, a + b * x)
    mean = sum(xs) / len(xs)
    spread = sum((x - mean) ** 2 for x in xs) / len(xs)
    assume(spread > (0.2 * mean) ** 2)
    assert fit.line == pytest.approx((a, b), abs=1e-6)


@given(samples=st.lists(st.tuples(st.integers(1, 600), prices), max_size=30))
def test_a_fit_is_never_negative_whatever_it_is_told(samples: list[tuple[int, float]]) -> None:
    fit = LinearFit()
    for x, y in samples:
        fit.add(x, y)
    a, b = fit.line
    assert a >= 0
    assert b >= 0


def test_a_fit_of_packs_of_one_size_takes_the_cost_for_proportional() -> None:
    fit = LinearFit()
    for _ in range(50):
        fit.add(10, 5.0)
    assert fit.line == pytest.approx((0.0, 0.5))


def test_a_fit_keeps_its_shape_while_all_packs_are_alike_and_takes_their_height() -> None:
    fit = LinearFit(keep=0.9)
    for x in (8, 16, 32, 64) * 9:
        fit.add(x, 10 + 0.5 * x)
    for _ in range(90):  # sizes before these count for nothing by then
        fit.add(20, 20.0)
    assert fit.line == pytest.approx((10.0, 0.5), rel=0.01)
    for _ in range(90):
        fit.add(20, 40.0)
    assert fit.line == pytest.approx((20.0, 1.0), rel=0.01)


def test_a_fit_forgets_what_was_long_ago() -> None:
    fit = LinearFit()
    for _ in range(2000):
        fit.add(10, 90.0)
        fit.add(100, 900.0)
    for _ in range(1000):
        fit.add(10, 2.0)
        fit.add(100, 11.0)
    assert fit.line == pytest.approx((1.0, 0.1), rel=0.05)


@given(a=st.floats(0.001, 10), b=slopes, latency=st.floats(0, 100), queue=st.floats(0, 50))
def test_costs_tell_cycle_and_loop_without_the_queues(
    a: float, b: float, latency: float, queue: float
) -> None:
    costs = costs_of(a, b, latency=latency, queue=queue)
    assert costs.cycle(40) == pytest.approx(a + 40 * b, abs=1e-4)
    assert costs.loop(40) == pytest.approx(3 * (a + 40 * b) + latency, abs=1e-3)


def test_a_link_whose_rate_is_known_is_a_resource_like_any_lane() -> None:
    costs = StepCosts()
    for _ in range(2):  # the first pack does not count
        costs.record(1, Seconds(0.3), [timing(0.1, sent=1000)] * 2)
    costs.link_rate(0, BytesPerSecond(2000))
    costs.link_rate(7, BytesPerSecond(1))  # of no stage
    for tokens in (1, 10, 100) * 5:
        costs.record(tokens, Seconds(0.3 + 0.5 * tokens), [timing(0.1, sent=1000 * tokens)] * 2)
    assert costs.cycle(10) == pytest.approx(5.0, rel=0.01)
    assert costs.loop(10) == pytest.approx(5.0 + 0.2 + 0.1, rel=0.01)


def test_nothing_is_decided_by_nothing() -> None:
    pace = MeasuredPace(micro_batches=3, depth=4, prefill_tokens=100)
    assert (pace.window(), pace.chunk(5, 5), pace.micro_batches([1, 1, 1], 3)) == (3, 100, 3)
    assert pace.decisions() == ()


def noted(pace: MeasuredPace, rows: int, *, packs: int, fixed: float, latency: float) -> None:
    """Packs of some sizes that come back from two stages, which take `fixed` s for each and 1 ms a token."""
    for number in range(packs):
        tokens = rows + number % 3
        compute = fixed + 0.001 * tokens
        elapsed = Seconds(2 * compute + latency)
        pace.record(tokens, elapsed, [timing(compute)] * 2)


def test_a_pace_wants_fewer_micro_batches_where_packs_cost_much_by_themselves_and_more_in_a_long_loop() -> (
    None
):
    pace = MeasuredPace(micro_batches=8, depth=4, prefill_tokens=100, start=4)
    assert pace.micro_batches([4] * 4, 8) == 4
    wanted = []
    for _ in range(6):  # a look for each step of four packs
        noted(pace, 4, packs=4, fixed=1.0, latency=0.1)
        wanted.append(pace.micro_batches([4] * 4, 8))
    assert wanted[0] == 4, "one look decides nothing"
    assert wanted[-1] == 2, "a loop of two packs' time is filled by two"
    assert "2 micro-batches in place of 4" in " ".join(pace.decisions())
    pace = MeasuredPace(micro_batches=8, depth=4, prefill_tokens=100, start=2)
    for _ in range(40):
        noted(pace, 32, packs=2, fixed=0.0001, latency=0.1)
        pace.micro_batches([32] * 2, 8)
    assert pace.micro_batches([32] * 2, 8) > 2
    assert pace.window() >= 2


@given(
    cycle=st.floats(0.001, 10),
    loop=st.floats(0.001, 1000),
    micro_batches=st.integers(1, 16),
    depth=st.integers(1, 8),
)
def test_the_window_fills_the_loop_and_no_more(
    cycle: float, loop: float, micro_batches: int, depth: int
) -> None:
    window = packs_in_flight(Seconds(cycle), Seconds(loop), micro_batches=micro_batches, depth=depth)
    assert micro_batches <= window <= micro_batches * depth
    if window < micro_batches * depth:
        assert (window - 1) * cycle >= loop * (1 - 1e-9)
    if window > micro_batches:
        assert (window - 2) * cycle <= loop * (1 + 1e-9)


@given(
    a=st.floats(0.001, 10),
    b=st.floats(0.0001, 0.1),
    latency=st.floats(0, 100),
    own=st.integers(0, 64),
    decoding=st.integers(0, 64),
    micro_batches=st.integers(1, 8),
    most=st.integers(1, 1024),
)
def test_a_chunk_beside_decode_rows_keeps_the_slowest_stage_no_longer_than_it_may(
    a: float, b: float, latency: float, own: int, decoding: int, micro_batches: int, most: int
) -> None:
    costs = costs_of(a, b, latency=latency)
    decoding = max(own, decoding)
    chunk = chunk_size(costs, own=own, decoding=decoding, micro_batches=micro_batches, most=most)
    assert min(LEAST, most) <= chunk <= most
    if not decoding:
        assert chunk == most
        return
    alone, loop = costs.cycle(own or decoding), costs.loop(own or decoding)
    assert alone is not None
    assert loop is not None
    limit = max(STRETCH * alone, loop / micro_batches)
    longer, whole = costs.cycle(own + chunk + 1), costs.cycle(own + chunk)
    assert longer is not None
    assert whole is not None
    assert chunk == min(LEAST, most) or whole <= limit * 1.000001
    assert chunk == most or longer >= limit * 0.999999


@given(
    needs=st.lists(st.integers(1, 5), max_size=5),
    rooms=st.lists(
        st.builds(Room, capacity=st.integers(1, 5), free=st.integers(0, 2), live=st.integers(1, 9)),
        max_size=4,
    ),
)
def test_places_are_found_exactly_where_there_are_any(needs: list[int], rooms: list[Room]) -> None:
    chosen = places(needs, rooms)
    slots = [room.capacity for room in rooms for _ in range(room.free)]
    possible = any(
        all(need <= capacity for need, capacity in zip(needs, order, strict=True))
        for order in permutations(slots, len(needs))
    )
    assert (chosen is not None) == possible
    if chosen is not None:
        assert all(need <= rooms[at].capacity for need, at in zip(needs, chosen, strict=True))
        assert all(chosen.count(at) <= room.free for at, room in enumerate(rooms))


def test_the_largest_pack_is_unbounded_where_nothing_is_known_to_cost_more_for_more_tokens() -> None:
    assert StepCosts().tokens_within(Seconds(2.0)) == math.inf
