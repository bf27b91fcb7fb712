"""A mixed-integer program put together row by row, for HiGHS through scipy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class Program:
    """Variables are numbers; `below` and `equal` are rows over them; `maximise` adds one to the objective."""

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float]] = []
        self._whole: list[bool] = []
        self._objective: list[int] = []
        self._rows: list[tuple[Mapping[int, float], float, float]] = []

    def real(self, low: float, high: float) -> int:
        return self._variable(low, high, whole=False)

    def whole(self, low: float, high: float) -> int:
        return self._variable(low, high, whole=True)

    def binary(self) -> int:
        return self.whole(0, 1)

    def _variable(self, low: float, high: float, *, whole: bool) -> int:
        self._bounds.append((low, high))
        self._whole.append(whole)
        return len(self._bounds) - 1

    def below(self, terms: Mapping[int, float], most: float) -> None:
        self._rows.append((terms, -np.inf, most))

    def equal(self, terms: Mapping[int, float], value: float) -> None:
        self._rows.append((terms, value, value))

    def maximise(self, variable: int) -> None:
        self._objective.append(variable)

    def solve(self, limit: float) -> tuple[Values, bool] | None:
        """Values of all variables, and whether they are proven to be optimal; None where nothing was found
        in `limit` seconds. Raises: ImportError without scipy."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        entries = [
            (row, variable, factor)
            for row, (terms, _, _) in enumerate(self._rows)
            for variable, factor in terms.items()
        ]
        rows, columns, factors = (np.array(values) for values in zip(*entries, strict=True))
        matrix = coo_array((factors, (rows, columns)), shape=(len(self._rows), len(self._bounds)))
        low, high = (
            np.array(ends) for ends in zip(*((low, high) for _, low, high in self._rows), strict=True)
        )
        cost = np.zeros(len(self._bounds))
        cost[self._objective] = -1.0
        below, above = (np.array(ends) for ends in zip(*self._bounds, strict=True))
        found = milp(
            cost,
            integrality=np.array(self._whole, int),
            bounds=Bounds(below, above),
            constraints=LinearConstraint(matrix.tocsr(), low, high),
            options={"time_limit": limit, "presolve": True},
        )
        return None if found.x is None else (np.asarray(found.x), found.status == 0)
