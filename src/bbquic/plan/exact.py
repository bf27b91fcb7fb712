"""Which nodes, in which order, with which blocks: exactly, by Held and Karp's program with blocks in it.

The states are (nodes used so far, last of them, blocks placed so far), and the first node where the leg
back depends on it. All sets of one size are one step in numpy, so eight nodes take milliseconds. The number
of states doubles with each node: `labels` is for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bbquic.plan.instance import FIRST, LAST, MIDDLE, ONLY, Floats
from bbquic.plan.terms import INFINITE, Found, Terms

Numbers = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Layer:
    """The states of one size of sets, R of them: by row the first node, the last, and the rows before.

    before: [R, P], in the layer of sets that have one node less: those to which the last node was added.
    """

    first: Numbers
    last: Numbers
    before: Numbers


@cache
def layers(nodes: int, deepest: int, by_first: bool) -> tuple[Layer, ...]:
    """Layers of sets of 1, 2, ... `deepest` nodes. `first` is 0 where states do not remember it."""
    keys = [(node if by_first else 0, 1 << node, node) for node in range(nodes)]
    result = [_layer(keys, [[]] * nodes)]
    for _ in range(1, deepest):
        rows: dict[tuple[int, int, int], list[int]] = {}
        for row, (first, used, _) in enumerate(keys):
            for node in range(nodes):
                if not used >> node & 1:
                    rows.setdefault((first, used | 1 << node, node), []).append(row)
        keys = list(rows)
        result.append(_layer(keys, list(rows.values())))
    return tuple(result)


def _layer(keys: list[tuple[int, int, int]], before: list[list[int]]) -> Layer:
    firsts, _, lasts = zip(*keys, strict=True)
    return Layer(*(np.asarray(part, dtype=np.intp) for part in (firsts, lasts, before)))


def solve(terms: Terms) -> Found | None:
    """The best order, subset and blocks, or None where nothing is possible."""
    table = layers(terms.nodes, max(1, min(terms.nodes, terms.blocks)), not terms.separates)
    states = [terms.combine(terms.lead, terms.stage[:, FIRST].T)]  # each [L + 1, R]
    alone = terms.combine(terms.lead, terms.stage[:, ONLY, terms.blocks])
    alone = terms.combine(alone, np.diagonal(terms.back)) * terms.factor(1)
    best, depth, row = float(alone.min()), 1, int(alone.argmin())
    for count in range(2, len(table) + 1):
        before, layer = table[count - 2], table[count - 1]
        arrived = _arrived(terms, before, layer, states[-1])
        ended = terms.combine(arrived[::-1], terms.stage[layer.last, LAST].T).min(axis=0)
        closed = terms.combine(ended, terms.back[layer.first, layer.last]) * terms.factor(count)
        if closed.min() < best:
            best, depth, row = float(closed.min()), count, int(closed.argmin())
        if count < len(table):
            states.append(_moved(terms, arrived, terms.stage[layer.last, MIDDLE].T))
    return None if best == INFINITE else Found(best, lambda: _trace(terms, table, states, depth, row))


def _arrived(terms: Terms, before: Layer, layer: Layer, state: Floats) -> Floats:
    """[L + 1, R]: the blocks so far have been placed, and the pack has come to each row's last node."""
    arrived = np.full((state.shape[0], len(layer.last)), INFINITE)
    for rows in layer.before.T:
        came = np.take(state, rows, axis=1)
        terms.combine(came, terms.hop[before.last[rows], layer.last], out=came)
        np.minimum(arrived, came, out=arrived)
    return arrived


def _moved(terms: Terms, arrived: Floats, stage: Floats) -> Floats:
    """[L + 1, R]: each row's last node has taken some blocks; `stage` [L + 1, R] is what they cost it."""
    size = len(arrived)
    moved, room = np.full_like(arrived, INFINITE), np.empty_like(arrived)
    possible = np.flatnonzero(np.isfinite(stage[1:]).any(axis=1)) + 1
    for blocks in possible.tolist():
        part = room[: size - blocks]
        terms.combine(arrived[: size - blocks], stage[blocks], out=part)
        np.minimum(moved[blocks:], part, out=moved[blocks:])
    return moved


def _trace(
    terms: Terms, table: tuple[Layer, ...], states: list[Floats], depth: int, row: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    order, held, left, place = list[int](), list[int](), terms.blocks, LAST
    for count in range(depth, 1, -1):
        before, layer = table[count - 2], table[count - 1]
        node, rows = int(layer.last[row]), layer.before[row]
        came = terms.combine(
            states[count - 2][left::-1, rows], terms.hop[before.last[rows], node]
        )  # [left + 1, P]
        blocks = int(terms.combine(came.min(axis=1), terms.stage[node, place, : left + 1]).argmin())
        order.append(node)
        held.append(blocks)
        row, left, place = int(rows[came[blocks].argmin()]), left - blocks, MIDDLE
    order.append(int(table[0].last[row]))
    return tuple(reversed(order)), tuple(reversed([*held, left]))
