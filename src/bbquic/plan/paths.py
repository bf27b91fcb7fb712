"""Which nodes, in which order, with which blocks: the best solution of an instance.

Exact for up to EXACT_NODES nodes that can hold a block. Beyond, a heuristic: `labels`' program in place of
the exact one under the same search for the bottleneck, then `improve` on the order that it finds.
"""

from __future__ import annotations

import numpy as np

from bbquic.plan import exact, labels
from bbquic.plan.improve import improve
from bbquic.plan.instance import Assignment, Floats, Instance, Objective, evaluate
from bbquic.plan.partition import best_partition
from bbquic.plan.terms import INFINITE, Terms, least, levels

EXACT_NODES = 8
TRIES = 16  # limits on the cycle that the heuristic tries for PIPELINE
SHRINK = 0.97  # the next one is no more than this part of the last: a few percent are within its error


def best_path(instance: Instance, objective: Objective, *, bound: float = INFINITE) -> Assignment | None:
    """The best order, subset, blocks and ways, or None where nothing is possible or nothing is below `bound`.

    With the value of a solution at hand as bound, one program proves (up to EXACT_NODES nodes) or makes
    likely (beyond) that none is better.
    """
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
    """PIPELINE by sums: the fewest stages n under a falling limit on the cycle.

    Solutions between one limit and the next have n stages at least, and a cycle that makes them no better
    than the best so far.
    """
    limits, micro_batches = levels(instance), instance.micro_batches
    best, value, stages, top = None, bound, 1, INFINITE
    for _ in range(TRIES):
        below = limits[(limits * (micro_batches + stages - 1) < value) & (limits <= top)]
        if not len(below):
            break
        limit = float(below[-1])
        found = labels.solve(_stages(instance, limit))
        if found is None:
            break
        order, _ = found.trace()
        stages, top = len(order), limit * SHRINK
        better = best_partition(instance, Objective.PIPELINE, order)
        if better is not None and better.value < value:
            best, value = better, better.value
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
