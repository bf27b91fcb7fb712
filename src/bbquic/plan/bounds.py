"""What no layout of an instance can be better than, in well under a millisecond. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bbquic.plan.instance import ONLY, Floats, Instance


def least_step(instance: Instance) -> float:
    """No assignment's `Objective.CIRCULATING` is below it; infinite only where none is possible.

    For a bottleneck t: nodes hold as many blocks as take t at most, so few stages suffice only where t is
    large; each further stage costs a hop. The least of max(M · t, loop(t)) over all t bounds every layout.
    """
    alone = _alone(instance)
    if instance.nodes == 1 or instance.blocks == 1:
        return alone
    return min(alone, _several(instance))


def _alone(instance: Instance) -> float:
    """The best with one stage, exactly."""
    busy, passes = (times[:, ONLY, instance.blocks] for times in (instance.busy, instance.passes))
    loop = passes + instance.lead + np.diagonal(instance.back)
    return float(np.maximum(instance.micro_batches * busy, loop).min())


def _several(instance: Instance) -> float:
    relaxed = _Relaxed.of(instance)
    levels, low, high = relaxed.levels, 0, len(relaxed.levels)
    while low < high:  # the first level that is enough for its own loop
        middle = (low + high) // 2
        if instance.micro_batches * levels[middle] >= relaxed.loop(float(levels[middle])):
            high = middle
        else:
            low = middle + 1
    below = relaxed.loop(float(levels[low - 1])) if low else np.inf
    return float(min(below, instance.micro_batches * levels[low] if low < len(levels) else np.inf))


@dataclass(frozen=True, eq=False)
class _Relaxed:
    """An instance with everything taken at its best: places, partners, ways.

    held: [N, L], seconds for so many blocks or more. touch: [N], the bottleneck below which no hop touches a
    node. slope: [N], the least a block adds to the loop. hops: [N + 1], sums of the shortest hops. levels:
    sorted, the bottlenecks at which something changes.
    """

    held: Floats
    touch: Floats
    slope: Floats
    hops: Floats
    legs: float
    levels: Floats

    @classmethod
    def of(cls, instance: Instance) -> _Relaxed:
        busy = instance.busy.min(axis=1)[:, 1:]
        held = np.minimum.accumulate(busy[:, ::-1], axis=1)[:, ::-1]
        slope = (instance.passes.min(axis=1)[:, 1:] / np.arange(1, instance.blocks + 1)).min(axis=1)
        touch = np.minimum(instance.hop_busy.min(axis=(0, 2)), instance.hop_busy.min(axis=(0, 1)))
        arrivals = np.sort(instance.hop_passes.min(axis=(0, 1)))
        pairs = instance.lead[:, None] + instance.back
        np.fill_diagonal(pairs, np.inf)
        changes = np.concatenate([held.ravel(), touch])
        levels = np.unique(changes[np.isfinite(changes)])
        hops = np.concatenate([[0.0], np.cumsum(arrivals)])
        return cls(held, touch, slope, hops, float(pairs.min()), levels)

    def loop(self, limit: float) -> float:
        """Not more than any layout's loop that keeps every resource within `limit`."""
        count, blocks = self.held.shape
        holds = np.where(self.touch <= limit, np.minimum((self.held <= limit).sum(axis=1), blocks - 1), 0)
        most = np.cumsum(np.sort(holds)[::-1])
        stages = max(2, int(np.searchsorted(most, blocks)) + 1)
        if stages > count or most[-1] < blocks:
            return float("inf")
        order = np.argsort(self.slope)
        taken = holds[order]
        before = np.cumsum(taken) - taken
        taken = np.clip(blocks - before, 0, taken)
        used = taken > 0
        compute = float((taken[used] * self.slope[order][used]).sum())
        return compute + float(self.hops[stages - 1]) + self.legs
