"""Clock estimates against simulated clocks: the truth always lies within the stated uncertainty."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from clock_helpers import Clock, exchange
from hypothesis import given
from hypothesis import strategies as st

from bbquic.runtime.clocks import (
    BUCKETS,
    MAX_DRIFT,
    WINDOW,
    ClockEstimate,
    ClockMeter,
    SteadyClock,
)
from bbquic.units import Seconds

legs = st.floats(0, 0.5)


@given(
    st.floats(-1e5, 1e5),
    st.floats(-4e-4, 4e-4),
    st.lists(st.tuples(st.floats(0.01, 90), legs, st.floats(0, 0.2), legs), min_size=1, max_size=60),
    st.floats(0, 100),
)
def test_the_true_offset_lies_within_the_stated_uncertainty(
    offset: float, drift: float, exchanges: list[tuple[float, float, float, float]], later: float
) -> None:
    meter, clock = ClockMeter(), Clock(offset, drift)
    now = 0.0
    for pause, there, held, back in exchanges:
        now = exchange(meter, clock, now + pause, there, held, back)
        for moment in (now, now + later):
            estimate = meter.estimate(Seconds(moment))
            assert estimate is not None
            assert abs(estimate.offset - clock.true_offset(moment)) <= estimate.uncertainty + 1e-6
            assert abs(estimate.drift - drift) <= estimate.drift_uncertainty + 1e-9


@given(st.floats(-4e-4, 4e-4), legs, legs, st.integers(0, 2**32))
def test_the_uncertainty_is_half_the_least_round_trip_once_drift_is_known(
    drift: float, there: float, back: float, seed: int
) -> None:
    meter, clock, draw = ClockMeter(), Clock(123.0, drift), random.Random(seed)
    now = 0.0
    for number in range(600):
        late = 0.0 if number % 7 == 0 else draw.expovariate(1 / 0.05)  # a queue, most of the time
        now = max(now + 1, exchange(meter, clock, now, there + late, 0.001, back + late / 3))
    estimate = meter.estimate(Seconds(now))
    assert estimate is not None
    carried = 12 * estimate.drift_uncertainty + 0.0005  # the last exchange without a queue is seconds old
    assert estimate.uncertainty <= (there + back) / 2 + carried
    assert abs(estimate.offset - clock.true_offset(now)) <= abs(there - back) / 2 + carried


def test_an_hour_of_drift_is_followed_though_it_is_180_ms() -> None:
    meter, clock = ClockMeter(), Clock(5.0, 50e-6)
    for second in range(3600):
        exchange(meter, clock, float(second), 0.01, 0.0, 0.01)
    estimate = meter.estimate(Seconds(3600.0))
    assert estimate is not None
    assert abs(estimate.offset - 5.18) < 1e-4
    assert abs(estimate.drift - 50e-6) < 1e-6


def test_an_uneven_way_is_within_the_uncertainty_and_nothing_better_is_claimed() -> None:
    meter, clock = ClockMeter(), Clock(0.0)
    exchange(meter, clock, 0.0, 0.08, 0.0, 0.02)
    estimate = meter.estimate(Seconds(0.1))
    assert estimate is not None
    assert estimate.offset == pytest.approx(0.03, abs=1e-4)  # nobody can know which way was the longer
    assert estimate.uncertainty >= 0.05


def test_the_least_ways_there_and_back_may_be_of_two_exchanges() -> None:
    meter, clock = ClockMeter(), Clock(7.0)
    exchange(meter, clock, 0.0, 0.01, 0.0, 0.3)
    exchange(meter, clock, 1.0, 0.3, 0.0, 0.01)
    estimate = meter.estimate(Seconds(1.5))
    assert estimate is not None
    assert estimate.uncertainty < 0.015
    assert estimate.offset == pytest.approx(7.0, abs=0.001)


@pytest.mark.parametrize(
    ("sent", "received", "replied", "came"),
    [
        (0.0, 5.0, 4.9, 0.1),  # answered before it came
        (0.0, 5.0, 6.0, 0.1),  # held for longer than it was away: one of the machines slept
        (1.0, 5.0, 5.0, 0.9),
    ],
)
def test_an_exchange_that_cannot_be_is_not_taken(
    sent: float, received: float, replied: float, came: float
) -> None:
    meter = ClockMeter()
    assert not meter.add(Seconds(sent), Seconds(received), Seconds(replied), Seconds(came))
    assert meter.estimate(Seconds(1.0)) is None


@pytest.mark.parametrize("jump", [-30.0, 0.5, 1e6])
def test_a_clock_that_was_set_is_believed_anew(jump: float) -> None:
    meter = ClockMeter()
    for second in range(30):
        exchange(meter, Clock(1.0), float(second), 0.01, 0.0, 0.01)
    exchange(meter, Clock(1.0 + jump), 30.0, 0.01, 0.0, 0.01)
    estimate = meter.estimate(Seconds(30.1))
    assert estimate is not None
    assert estimate.offset == pytest.approx(1.0 + jump, abs=0.001)


def test_memory_is_bounded_by_the_buckets() -> None:
    meter = ClockMeter()
    for number in range(5000):
        exchange(meter, Clock(0.0), number * WINDOW / 100, 0.01, 0.0, 0.01)
    assert len(meter._buckets) <= BUCKETS + 1


@given(
    st.floats(-4e-4, 4e-4),
    st.lists(st.tuples(st.floats(-0.3, 0.3), st.lists(st.floats(0, 1.5), max_size=5)), max_size=20),
)
def test_a_steady_clock_keeps_the_order_whatever_the_estimates_do(
    drift: float, turns: list[tuple[float, list[float]]]
) -> None:
    steady = SteadyClock(ClockEstimate(Seconds(0), Seconds(50.0), Seconds(0.3), drift, MAX_DRIFT))
    seen: list[tuple[float, float]] = []
    for second, (wrong, moments) in enumerate(turns):
        for moment in moments:
            theirs = Seconds(50.0 + second + moment)
            seen.append((theirs, steady.ours(theirs)))
        steady.follow(
            ClockEstimate(Seconds(second + 1), Seconds(50.0 + wrong), Seconds(0.3), drift, MAX_DRIFT)
        )
    ordered = sorted(seen)
    for (before, shown_before), (after, shown_after) in pairwise(ordered):
        took, shown = after - before, shown_after - shown_before
        assert took * 0.99 - 1e-9 <= shown <= took * 1.01 + 1e-9


def test_a_steady_clock_gets_to_where_the_estimate_is() -> None:
    steady = SteadyClock(ClockEstimate(Seconds(0), Seconds(10.0), Seconds(0.1), 0.0, MAX_DRIFT))
    for second in range(1, 60):
        steady.ours(Seconds(10.05 + second))
        steady.follow(ClockEstimate(Seconds(second), Seconds(10.05), Seconds(0.001), 0.0, MAX_DRIFT))
    assert steady.ours(Seconds(70.05)) == pytest.approx(60.0, abs=0.001)
