"""Which nodes, in which order, with which blocks: the best solution of an instance.

Exact for up to EXACT_NODES nodes that can hold a block. Beyond, a heuristic: `labels`' program in place of
the exact one under the same search for the bottleneck, then `improve` on the order that it finds.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from bbquic.plan import exact, labels
from bbquic.plan.improve import improve
from bbquic.plan.instance import Assignment, Floats, Instance, Objective, evaluate
from bbquic.plan.partition import best_partition
from bbquic.plan.terms import INFINITE, Terms, least, levels

EXACT_NODES = 8
TRIES = 24  # limits on the cycle that the heuristic tries for PIPELINE
ROUNDING = 1e-12  # relative: sums in another order are not something better
CLOSE = 0.003  # what promises to be better by less is not tried


def best_path(instance: Instance, objective: Objective, *, bound: float = INFINITE) -> Assignment | None:
    """The best order, subset, blocks and ways, or None where nothing is possible or nothing is below `bound`.

    With the value of a solution at hand as bound, one program proves (up to EXACT_NODES nodes) or makes
    likely (beyond) that none is better.
    """
    bound *= 1 - ROUNDING
    useful = np.flatnonzero(np.isfinite(instance.passes[..., 1:]).any(axis=(1, 2))).tolist()
    if not useful:
        return None
    part = instance if len(useful) == instance.nodes else instance.permuted(useful)
    if part.nodes <= EXACT_NODES:
        found = least(part, objective, exact.solve, bound)
        solution = None if found is None else evaluate(part, objective, *found.trace())
    else:
        solution = _near_best(part, objective, bound)
    if solution is None or not solution.value < bound:
        return None
    return evaluate(instance, objective, tuple(useful[node] for node in solution.order), solution.blocks)


def _near_best(instance: Instance, objective: Objective, bound: float) -> Assignment | None:
    if objective is Objective.PIPELINE:
        start = _few_stages(instance, bound)
    else:
        found = least(instance, objective, labels.solve, bound)
        start = None if found is None else best_partition(instance, objective, found.trace()[0])
    return None if start is None else improve(instance, objective, start)


def _few_stages(instance: Instance, bound: float) -> Assignment | None:
    """PIPELINE by sums: the fewest stages n under some limits on the cycle, the most promising ones first.

    n can only rise where the limit falls. So under all limits of an interval n is what it is under the one
    above them, or more, and no value is better than that n's under the lowest of them.
    """
    limits, others = levels(instance), instance.micro_batches - 1
    best, value = None, bound
    intervals = [(0.0, 0, len(limits) - 1, 1)]  # the least value, first and last limit, fewest stages
    for _ in range(TRIES if len(limits) else 0):
        if not intervals or intervals[0][0] >= value * (1 - CLOSE):
            break
        _, low, high, fewest = heappop(intervals)
        middle = (low + high) // 2
        found = labels.solve(_stages(instance, float(limits[middle])))
        parts = [(middle + 1, high, fewest)]
        if found is not None:
            order, _ = found.trace()
            parts.append((low, middle - 1, len(order)))
            better = best_partition(instance, Objective.PIPELINE, order)
            if better is not None and better.value < value:
                best, value = better, better.value
        for first, last, stages in parts:
            if first <= last:
                heappush(intervals, (float(limits[first]) * (others + stages), first, last, stages))
    return best


def _stages(instance: Instance, limit: float) -> Terms:
    """1 a stage that is possible within a limit, and a little for blocks that it could hold more.

    So, of as many stages, those are preferred that leave the larger nodes to others.
    """
    stage: Floats = np.where((instance.busy <= limit) & (instance.passes < INFINITE), 1.0, INFINITE)
    most = np.where(np.isfinite(stage), np.arange(instance.blocks + 1), 0).max(axis=2, keepdims=True)
    stage += (most - np.arange(instance.blocks + 1)) / (instance.blocks * instance.nodes + 1) ** 2
    possible = ((instance.hop_busy <= limit) & (instance.hop_passes < INFINITE)).any(axis=0)
    legs = (np.where(leg < INFINITE, 0.0, INFINITE) for leg in (instance.lead, instance.back))
    return Terms(np.add, stage, np.where(possible, 0.0, INFINITE), *legs)
