"""The figures of a run: snapshots that cannot change, and a meter that forgets what is old."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.runtime.telemetry import JobStatistics, Quantiles, RateMeter, Window, remaining_time
from bbquic.units import Seconds

START = Seconds(1000.0)


def at(offset: float) -> Seconds:
    return Seconds(START + offset)


def test_a_snapshot_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobStatistics().done = 1  # type: ignore[misc]


def test_a_job_is_settled_when_every_line_has_its_record_from_whichever_run() -> None:
    job = JobStatistics(done=5, failed=2, skipped=3, total=11)
    assert (job.settled, job.finished) == (10, False)
    assert dataclasses.replace(job, skipped=4).finished
    assert not dataclasses.replace(job, total=None).finished


def test_a_rate_is_unknown_before_any_time_has_passed() -> None:
    meter = RateMeter(Seconds(10), start=START)
    meter.add(START, 5)
    assert meter.rate(START) is None


def test_before_its_window_is_full_a_meter_divides_by_the_time_since_the_start() -> None:
    meter = RateMeter(Seconds(10), start=START)
    meter.add(at(1), 6)
    assert meter.rate(at(2)) == pytest.approx(3)


def test_a_steady_rate_is_measured_as_it_is() -> None:
    meter = RateMeter(Seconds(10), start=START)
    for step in range(1, 4001):
        meter.add(at(step / 40), 2)
    assert meter.rate(at(100)) == pytest.approx(80, rel=0.03)


def test_a_meter_forgets_what_left_its_window() -> None:
    meter = RateMeter(Seconds(10), start=START)
    meter.add(at(1), 100)
    assert meter.rate(at(10.5)) == pytest.approx(10)
    assert meter.rate(at(11)) == 0


def test_a_meter_without_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        RateMeter(Seconds(0), start=START)


eighths = st.integers(0, 40).map(lambda n: n / 8)  # steps of time that add up without rounding


@given(st.lists(st.tuples(eighths, st.integers(0, 100)), max_size=200), st.floats(0.1, 20))
def test_a_rate_is_that_of_the_counts_in_the_window_but_for_one_bucket(
    steps: list[tuple[float, int]], window: float
) -> None:
    meter = RateMeter(Seconds(window), start=START)
    now = 0.0
    counts = []
    for step, count in steps:
        now += step
        counts.append((now, count))
        meter.add(at(now), count)
    rate = meter.rate(at(now))
    if now <= 0:
        assert rate is None
        return
    assert rate is not None
    counted = rate * min(window, now)
    bucket = window / 50 + 1e-9
    surely = sum(count for time, count in counts if time > now - window + bucket)
    at_most = sum(count for time, count in counts if time > now - window - bucket)
    assert surely - 1e-6 <= counted <= at_most + 1e-6


def test_the_remaining_time_follows_the_pace_so_far() -> None:
    assert remaining_time(10, 30, Seconds(20)) == Seconds(60)
    assert remaining_time(10, 0, Seconds(20)) == Seconds(0)
    assert remaining_time(0, 30, Seconds(20)) is None


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 1.0]))
def test_a_quantile_is_that_of_the_sorted_list_to_a_few_percent(values: list[float], share: float) -> None:
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert quantiles.at(share) == pytest.approx(exact, rel=0.03)


def test_a_quantile_of_nothing_is_not_known_and_odd_durations_do_not_matter() -> None:
    quantiles = Quantiles()
    assert quantiles.first_tokens() is None
    for odd in (0.0, -1.0, 1e300):
        quantiles.add(odd)
    assert quantiles.first_tokens() is not None
    assert len(quantiles._counts) == 2


def test_a_window_begins_where_it_says_and_keeps_no_more_than_it_needs() -> None:
    window = Window(Seconds(10), at(0), 0)
    assert window.before == (at(0), 0)
    for step in range(1, 10_000):
        window.add(at(step / 100), step)
        began, value = window.before
        assert value == pytest.approx((began - START) * 100)
        assert began >= at(step / 100 - 10.3)
        assert step < 1000 or began <= at(step / 100 - 10)
    assert len(window._kept) < 60
