"""A solution made better by changing the order of nodes, until no change helps or the work is spent.

Each order is judged by the exact program of `partition`, which may leave out any node of it. So an order
that has unused nodes between the used ones tries to insert each where it stands, and to put it in place of
a neighbour, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from bbquic.plan.instance import Assignment, Instance, Objective
from bbquic.plan.partition import best_partition
from bbquic.plan.partition import solve as solve_partition
from bbquic.plan.terms import Terms, bottlenecks, levels, sums

WORK = 40_000  # nodes of all orders that are judged; a node of a program takes some 40 µs
MORE = 2  # stages that one change of a pipeline may add
GAIN = 1e-9  # relative; less is rounding

Order = tuple[int, ...]
Move = Callable[[Order, int], Iterator[Order]]  # from the used nodes' order and the number of all nodes


def improve(instance: Instance, objective: Objective, start: Assignment) -> Assignment:
    """The best found from `start` on; never worse."""
    search = _Search(instance, objective, start)
    while search.left > 0 and any(search.step(move) for move in (_joined, _swapped, _moved, _reversed)):
        pass
    return search.best


class _Search:
    def __init__(self, instance: Instance, objective: Objective, start: Assignment) -> None:
        self._instance = instance
        self._objective = objective
        self._levels = levels(instance)
        self.left = WORK
        self.best = start
        self._terms = self._below()

    def _below(self) -> Terms:
        """The program in which all that is better than the best has a lower value."""
        instance = self._instance
        if self._objective is Objective.PIPELINE:
            terms = bottlenecks(instance)
            assert terms.factors is not None
            return replace(terms, factors=terms.factors[: len(self.best.order) + MORE + 1])
        if self._objective is Objective.SUM:
            return sums(instance)
        beaten = int(np.searchsorted(self._levels * instance.micro_batches, self.best.value))
        return sums(instance, float(self._levels[beaten - 1]) if beaten else -1.0)

    def step(self, move: Move) -> bool:
        """Whether a move of this kind found something better: the first that it comes to is taken."""
        for order in move(self.best.order, self._instance.nodes):
            counts = len(self.best.order) + MORE if self._objective is Objective.PIPELINE else 1
            self.left -= len(order) * (1 + counts // 3)
            if self.left <= 0:
                return False
            found = solve_partition(self._terms.only(order))
            if found is None or found.value >= self.best.value * (1 - GAIN):
                continue
            used = [order[place] for place in found.trace()[0]]
            better = best_partition(self._instance, self._objective, used)
            if better is not None and better.value < self.best.value * (1 - GAIN):
                self.best = better
                self._terms = self._below()
                return True
        return False


def _joined(order: Order, nodes: int) -> Iterator[Order]:
    """Every unused node in every gap of the order, as many at once as there are."""
    spare = [node for node in range(nodes) if node not in set(order)]
    gaps = len(order) + 1
    for turn in range(gaps if spare else 0):
        joined = list[int]()
        for gap in range(gaps):
            joined += spare[(gap + turn) % gaps :: gaps]
            joined += order[gap : gap + 1]
        yield tuple(joined)


def _swapped(order: Order, nodes: int) -> Iterator[Order]:
    for a in range(len(order)):
        for b in range(a + 1, len(order)):
            swapped = list(order)
            swapped[a], swapped[b] = order[b], order[a]
            yield tuple(swapped)


def _moved(order: Order, nodes: int) -> Iterator[Order]:
    """One node, or two neighbours, to another place."""
    for length in (1, 2):
        for a in range(len(order) - length + 1):
            rest, part = order[:a] + order[a + length :], order[a : a + length]
            for b in range(len(rest) + 1):
                if b != a:
                    yield rest[:b] + part + rest[b:]


def _reversed(order: Order, nodes: int) -> Iterator[Order]:
    """A part of three nodes or more turned round."""
    for a in range(len(order)):
        for b in range(a + 3, len(order) + 1):
            yield order[:a] + order[a:b][::-1] + order[b:]
