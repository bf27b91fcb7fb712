"""From timings to curves and costs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bbquic.plan.cluster import AttentionCost
from bbquic.plan.fit import fit_attention, rising

TRIES = ((4, 64), (16, 64), (32, 64), (64, 112), (32, 240), (16, 480), (64, 32.5), (256, 128.5))
coefficient = st.one_of(st.just(0.0), st.floats(1e-9, 1e-3))


def error_of(cost: AttentionCost, points: list[tuple[float, float, float]]) -> float:
    """The sum of squared relative errors."""
    return sum((cost(rows, context) / took - 1) ** 2 for rows, context, took in points)


@given(coefficient, coefficient, coefficient)
def test_timings_that_follow_the_formula_are_met_exactly(fixed: float, row: float, key: float) -> None:
    truth = AttentionCost(fixed, row, key)
    if fixed + row + key == 0:
        return
    found = fit_attention([(rows, context, truth(rows, context)) for rows, context in TRIES])
    for rows, context in ((1, 1), (7, 100), (512, 1000)):
        assert found(rows, context) == pytest.approx(truth(rows, context), rel=1e-4, abs=1e-15)


@given(
    st.lists(st.floats(1e-6, 1e-1), min_size=len(TRIES), max_size=len(TRIES)),
    st.lists(st.tuples(coefficient, coefficient, coefficient), max_size=20),
)
def test_no_other_coefficients_from_0_up_have_less_error(
    times: list[float], others: list[tuple[float, float, float]]
) -> None:
    points = [(float(rows), float(context), took) for (rows, context), took in zip(TRIES, times, strict=True)]
    found = fit_attention(points)
    assert min(found.fixed, found.row, found.key) >= 0
    assert np.isfinite([found.fixed, found.row, found.key]).all()
    best = error_of(found, points)
    near = [
        (found.fixed * a, found.row * b, found.key * c)
        for a in (0.9, 1.1)
        for b in (0.9, 1.1)
        for c in (0.9, 1.1)
    ]
    assert all(error_of(AttentionCost(*other), points) >= best * (1 - 1e-6) for other in (*others, *near))


def test_nothing_measured_is_nothing_fitted() -> None:
    with pytest.raises(ValueError, match="a point at least"):
        fit_attention([])
    with pytest.raises(ValueError, match="a point at least"):
        rising([])


@example({1: 0.0, 54159: 634435.6575196924})  # not a rounding less at a point itself
@given(st.dictionaries(st.integers(1, 10**6), st.floats(0, 1e6), min_size=1, max_size=20))
def test_more_never_takes_less(points: dict[int, float]) -> None:
    curve = rising(points.items())
    assert [size for size, _ in curve.points] == sorted(points)
    assert all(before <= after for (_, before), (_, after) in pairwise(curve.points))
    assert all(curve(size) >= took for size, took in points.items())
    assert curve.points[-1][1] == max(points.values())
