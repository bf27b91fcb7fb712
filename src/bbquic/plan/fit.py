"""From timings to the curves and costs of a node's profile. Pure.

Noise makes a larger pack look quicker now and then; a planner that believed it would chase it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations

import numpy as np

from bbquic.plan.cluster import AttentionCost, Curve

LEAST = 1e-9  # s; a time below counts as this in a relative error


def rising(points: Iterable[tuple[float, float]]) -> Curve:
    """A curve through (size, seconds), in which more never takes less. Raises: ValueError as Curve does."""
    ordered = sorted(points)
    seconds = accumulate((took for _, took in ordered), max)
    return Curve(tuple((size, took) for (size, _), took in zip(ordered, seconds, strict=True)))


def fit_attention(points: Sequence[tuple[float, float, float]]) -> AttentionCost:
    """fixed, row and key, none below 0, for the least squares of relative errors over (rows, context,
    seconds).

    With so few unknowns every choice of those that are not 0 is tried: exact, and no solver.
    Raises: ValueError without a point.
    """
    if not points:
        raise ValueError("attention is fitted to a point at least")
    rows, context, took = np.array(points, dtype=np.float64).T
    weight = 1 / np.maximum(took, LEAST)
    terms = np.stack((np.ones_like(rows), rows, rows * context), axis=1) * weight[:, None]
    target = took * weight
    best, least = np.zeros(3), float(target @ target)
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = np.linalg.lstsq(terms[:, chosen], target, rcond=None)[0]
            error = float(np.sum((terms[:, chosen] @ found - target) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return AttentionCost(*(float(value) for value in best))
