"""Timing within a budget, on a clock that only the timed work moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.runtime.stopwatch import REPEATS, Abandoned, Stopwatch
from bbquic.units import Seconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.runs = 0

    def __call__(self) -> float:
        return self.now

    def work(self, *seconds: float) -> Callable[[], None]:
        """Takes each of these in turn, and the last one from then on."""
        left = list(seconds)

        def work() -> None:
            self.runs += 1
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def watch(clock: Clock, budget: float) -> Stopwatch:
    return Stopwatch(Seconds(budget), clock=clock)


def test_the_first_run_is_not_counted_and_an_odd_one_moves_nothing() -> None:
    clock = Clock()
    assert watch(clock, 100).median(clock.work(5.0, 1.0, 9.0, 1.0)) == pytest.approx(1.0)
    assert clock.runs == 1 + REPEATS


def test_what_is_done_before_each_run_is_not_counted() -> None:
    clock = Clock()
    flush = Clock()

    def before() -> None:
        flush.runs += 1
        clock.now += 3.0

    assert watch(clock, 1000).median(clock.work(1.0), before=before) == pytest.approx(1.0)
    assert flush.runs == clock.runs


def test_work_longer_than_the_budget_is_run_once() -> None:
    clock = Clock()
    assert watch(clock, 2.0).median(clock.work(7.0)) == pytest.approx(7.0)
    assert clock.runs == 1


@given(st.floats(0.1, 50), st.floats(1e-3, 5), st.floats(1e-5, 0.1))
def test_a_curve_takes_at_most_its_budget_and_one_run_of_each_size(
    budget: float, fixed: float, each: float
) -> None:
    clock = Clock()
    sizes = (1, 4, 16, 64, 256)
    points = watch(clock, budget).curve(sizes, lambda size: clock.work(fixed + each * size))
    assert [size for size, _ in points] == list(sizes[: len(points)])
    assert points
    assert all(took == pytest.approx(fixed + each * size) for size, took in points)
    assert clock.now - 100 <= budget + 2 * (fixed + each * points[-1][0])


def test_a_size_that_there_is_no_time_for_is_left_out() -> None:
    clock = Clock()
    points = watch(clock, 10.0).curve((1, 10, 100), lambda size: clock.work(0.1 * size))
    assert [size for size, _ in points] == [1, 10]


def test_shares_are_of_what_is_left() -> None:
    clock = Clock()
    whole = watch(clock, 10.0)
    clock.now += 4
    assert whole.share(0.5).left == pytest.approx(3.0)
    clock.now += 20
    assert whole.left == pytest.approx(0)


def test_nothing_is_run_once_nobody_waits_for_it() -> None:
    clock = Clock()
    given_up = Stopwatch(Seconds(10), clock=clock, stop=lambda: clock.runs >= 2)
    with pytest.raises(Abandoned, match="given up"):
        given_up.share(0.5).median(clock.work(0.1))
    assert clock.runs == 2
