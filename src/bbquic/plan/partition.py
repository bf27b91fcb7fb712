"""Which blocks each node holds, for nodes in a given order: exact, by dynamic programming.

Ranges are contiguous. A node may hold nothing: it is skipped, and the hop that counts is the one between the
nodes that remain. The states are (last stage so far, blocks placed so far).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from bbquic.plan.instance import FIRST, LAST, MIDDLE, ONLY, Assignment, Floats, Instance, Objective, evaluate
from bbquic.plan.terms import INFINITE, Found, Terms, least


def best_partition(
    instance: Instance, objective: Objective, order: Sequence[int] | None = None
) -> Assignment | None:
    """The best blocks for nodes in this order (None: as they are numbered), or None where nothing fits.

    The order may be of some of the nodes; those that get no blocks are not in the result's.
    """
    chosen = tuple(range(instance.nodes)) if order is None else tuple(order)
    if not chosen:
        return None
    found = least(instance.permuted(list(chosen)), objective, solve)
    if found is None:
        return None
    positions, blocks = found.trace()
    return evaluate(instance, objective, tuple(chosen[position] for position in positions), blocks)


def solve(terms: Terms) -> Found | None:
    """The best partition of the nodes in their order, or None.

    States are [node, first stage, stages - 1, blocks so far]; where the first stage decides nothing that
    comes later all of them share one row, and so do all numbers of stages where they are not counted.
    """
    program = _Program(terms)
    for node in range(terms.nodes):
        program.place(node)
    return program.best()


class _Program:
    def __init__(self, terms: Terms) -> None:
        nodes, blocks = terms.nodes, terms.blocks
        self._terms = terms
        self._firsts = 1 if terms.separates else nodes
        self._counts = 1 if terms.factors is None else max(1, min(nodes, blocks, len(terms.factors) - 1) - 1)
        self._shifts = _shifts(terms.stage[:, MIDDLE])
        shape = (nodes, self._firsts, self._counts)
        self._states = np.full((*shape, blocks + 1), INFINITE)
        # solutions by last stage; counts are those of the state before
        self._closed = np.full(shape, INFINITE)

    def place(self, node: int) -> None:
        """All states whose last stage is `node`, and all solutions that end with it."""
        terms, add = self._terms, self._terms.combine
        self._states[node, node if self._firsts > 1 else 0, 0] = self._opened(node)
        if node == 0:
            return
        firsts = node if self._firsts > 1 else 1
        hops = terms.hop[:node, node, None, None, None]
        arrived = add(self._states[:node, :firsts], hops).min(axis=0)  # [firsts, counts, L + 1]
        moved = add(arrived[..., None, :], self._shifts[node]).min(axis=-1)
        state, counted = self._states[node, :firsts], int(self._counts > 1)
        np.minimum(state[:, counted:], moved[:, : self._counts - counted], out=state[:, counted:])
        ended = add(arrived[..., ::-1], terms.stage[node, LAST]).min(axis=-1)
        self._closed[node, :firsts] = add(ended, terms.back[:firsts, node, None])

    def _opened(self, node: int) -> Floats:
        """[L + 1]: `node` is the first stage."""
        opened: Floats = self._terms.combine(self._terms.lead[node], self._terms.stage[node, FIRST])
        return opened

    def best(self) -> Found | None:
        terms, closed = self._terms, self._closed
        alone = terms.combine(terms.lead, terms.stage[:, ONLY, terms.blocks])
        alone = terms.combine(alone, np.diagonal(terms.back)) * terms.factor(1)
        if terms.factors is not None:
            closed = closed * terms.factors[2 : self._counts + 2]
        single, place = int(alone.argmin()), np.unravel_index(int(closed.argmin()), closed.shape)
        node, first, count = (int(part) for part in place)
        value = min(float(alone[single]), float(closed[place]))
        if value == INFINITE:
            return None
        if alone[single] == value:
            return Found(value, lambda: ((single,), (terms.blocks,)))
        return Found(value, lambda: self._trace(node, first, count))

    def _trace(self, node: int, first: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The solution that ends with `node`; `count` is that of the state before it."""
        terms, add = self._terms, self._terms.combine
        order, held, left, place = [node], list[int](), terms.blocks, LAST
        while True:
            before = add(self._states[:node, first, count], terms.hop[:node, node, None])[:, left::-1]
            blocks = int(add(before.min(axis=0), terms.stage[node, place, : left + 1]).argmin())
            node, left, place = int(before[:, blocks].argmin()), left - blocks, MIDDLE
            order.append(node)
            held.append(blocks)
            own = self._firsts == 1 or first == node
            if own and count == 0 and self._opened(node)[left] <= self._states[node, first, 0, left]:
                return tuple(reversed(order)), tuple(reversed([*held, left]))
            count -= int(self._counts > 1)


def _shifts(stage: Floats) -> Floats:
    """[N, L + 1, L + 1]: stage[:, to - from]: the blocks so far go from `from` (last axis) to `to`."""
    nodes, size = stage.shape
    padded = np.full((nodes, 2 * size - 1), INFINITE)
    padded[:, size:] = stage[:, 1:]
    row, step = padded.strides
    return as_strided(padded[:, size - 1 :], (nodes, size, size), (row, step, -step), writeable=False)
