"""What a dynamic program over stages and hops adds up, and the search for the best bottleneck around it.

Each objective comes down to programs that know one number a stage and one a hop: `SUM` to one program of
sums, `PIPELINE` to one of largest values for each number of stages, `CIRCULATING` to some programs of sums,
each under a limit on what is busy. `partition`, `exact` and `labels` are such programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bbquic.plan.instance import Floats, Instance, Objective

INFINITE = float("inf")


@dataclass(frozen=True, eq=False)
class Terms:
    """One number a stage, hop and leg, and how they are put together: `combine` is np.add or np.maximum.

    stage: [N, 4, L + 1]. hop: [N, N]. lead: [N]. back: [N, N], by first and last stage. factors: by the
    number of stages, from 0 to at least 2, what the combined value is multiplied by, and `partition` looks at
    no more stages; None: their number does not count.
    """

    combine: np.ufunc
    stage: Floats
    hop: Floats
    lead: Floats
    back: Floats
    factors: Floats | None = None

    @property
    def nodes(self) -> int:
        return int(self.stage.shape[0])

    @property
    def blocks(self) -> int:
        return int(self.stage.shape[2]) - 1

    @cached_property
    def separates(self) -> bool:
        """Whether the leg back depends on the last stage alone: then nobody has to remember the first."""
        return bool((self.back == self.back[:1]).all())

    def factor(self, stages: int) -> float:
        return 1.0 if self.factors is None else float(self.factors[stages])

    def only(self, order: Sequence[int]) -> Terms:
        """Those of some of the nodes, in the order given."""
        some = np.asarray(order, dtype=np.intp)
        pairs = (some[:, None], some)
        legs = self.lead[some], self.back[pairs]
        return Terms(self.combine, self.stage[some], self.hop[pairs], *legs, self.factors)


@dataclass(frozen=True, slots=True)
class Found:
    """A program's answer: its value, and who to ask for the solution (nodes in order, blocks of each)."""

    value: float
    trace: Callable[[], tuple[tuple[int, ...], tuple[int, ...]]]


Solver = Callable[[Terms], Found | None]  # None: nothing is possible


def sums(instance: Instance, limit: float = INFINITE) -> Terms:
    """Σ passes, of stages and ways that are busy for `limit` at most; each hop's way has the least passes."""
    stage = np.where(instance.busy <= limit, instance.passes, INFINITE)
    hop = np.where(instance.hop_busy <= limit, instance.hop_passes, INFINITE).min(axis=0)
    return Terms(np.add, stage, hop, instance.lead, instance.back)


def bottlenecks(instance: Instance) -> Terms:
    """max busy times (M + n - 1). What cannot pass is left out; otherwise passes and legs do not count."""
    stage = np.where(instance.passes < INFINITE, instance.busy, INFINITE)
    hop = np.where(instance.hop_passes < INFINITE, instance.hop_busy, INFINITE).min(axis=0)
    lead = np.where(instance.lead < INFINITE, 0.0, INFINITE)
    back = np.where(instance.back < INFINITE, 0.0, INFINITE)
    factors = np.arange(instance.nodes + 2, dtype=np.float64) + (instance.micro_batches - 1)
    return Terms(np.maximum, stage, hop, lead, back, factors)


def levels(instance: Instance) -> Floats:
    """The values that a bottleneck can have, rising: those of stages and hops that can pass."""
    stages = instance.busy[np.isfinite(instance.passes) & np.isfinite(instance.busy)]
    hops = instance.hop_busy[np.isfinite(instance.hop_passes) & np.isfinite(instance.hop_busy)]
    return np.unique(np.concatenate([stages, hops]))


def least(instance: Instance, objective: Objective, solve: Solver, bound: float = INFINITE) -> Found | None:
    """The best solution by a program, or None where none is below `bound`."""
    if objective is Objective.CIRCULATING:
        return least_circulating(instance, solve, bound)
    found = solve(sums(instance) if objective is Objective.SUM else bottlenecks(instance))
    return found if found is not None and found.value < bound else None


def least_circulating(instance: Instance, solve: Solver, bound: float = INFINITE) -> Found | None:
    """The least max(M · cycle, loop), or None where none is below `bound`.

    The loop can only fall where the limit on the cycle rises, so the best is where the two cross: bisection
    over the values that the cycle can have. The first program has the highest limit that could beat
    `bound`: it alone proves that nothing does.
    """
    limits = levels(instance)
    steps = limits * instance.micro_batches
    low, high = 0, int(np.searchsorted(steps, bound)) - 1
    middle, best, least_value = high, None, bound
    while low <= high:
        found = solve(sums(instance, float(limits[middle])))
        loop = INFINITE if found is None else found.value
        value = max(loop, float(steps[middle]))
        if found is not None and value < least_value:
            best, least_value = Found(value, found.trace), value
        if loop > steps[middle]:
            low = middle + 1  # a lower limit's loop is as long at least
        else:
            high = middle - 1  # a higher limit that is reached costs more
            low = max(
                low, int(np.searchsorted(steps, loop)) - 1
            )  # below, the loop alone decides: it only grows
        high = min(high, int(np.searchsorted(steps, least_value)) - 1)
        middle = (low + high) // 2
    return best
