"""Order, subset and blocks for more nodes than can be searched exactly: a few labels a state.

A heuristic. The states are (last node, blocks placed so far); exact states would also have the set of nodes
used. Here each state keeps a few labels instead, each a value with its own set: the cheapest ones of which
none is as dear as another and uses that one's nodes and more. No node is ever used twice, so what is found
is a solution, and its value a true one; that it is the best is not proven.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bbquic.plan.instance import FIRST, LAST, MIDDLE, ONLY, Floats
from bbquic.plan.terms import INFINITE, Found, Terms

LABELS = 4  # kept a state
TRIED = 12  # cheapest ones among which those are looked for
WORD = 64  # nodes in one word of a set

Numbers = NDArray[np.int64]
Sets = NDArray[np.uint64]  # the last axis: words, the first node in the lowest bit of the first


@dataclass(frozen=True, eq=False)
class Labels:
    """A value, the first node, where it came from and the nodes used: [..], [..], [..] and [.., words]."""

    value: Floats
    first: Numbers
    origin: Numbers
    used: Sets

    @staticmethod
    def none(nodes: int, blocks: int) -> Labels:
        """Those of all states, none of them reached: [N, L + 1, W], by last node and blocks so far."""
        shape = (nodes, blocks + 1, LABELS)
        numbers = np.zeros(shape, np.int64)
        sets = np.zeros((*shape, -(-nodes // WORD)), np.uint64)
        return Labels(np.full(shape, INFINITE), numbers, numbers.copy(), sets)

    def at(self, rows: Numbers, columns: Numbers) -> Labels:
        parts = self.value[rows, columns], self.first[rows, columns], self.origin[rows, columns]
        return Labels(*parts, self.used[rows, columns])


def solve(terms: Terms) -> Found | None:
    """A good order, subset and blocks, or None where none was found. `terms` are sums."""
    program = _Program(terms)
    for blocks in range(1, terms.blocks):
        program.hold(blocks)
        program.move(blocks)
    return program.best()


class _Program:
    """`held`: the last node has its blocks. `came`: the pack is at that node, which has none of them yet.

    A held label's origin is blocks · LABELS + label of what came, -1 where its node is the first; that of
    what came is node · LABELS + label of what was held there.
    """

    def __init__(self, terms: Terms) -> None:
        nodes, blocks = terms.nodes, terms.blocks
        self._terms = terms
        self._held, self._came = Labels.none(nodes, blocks), Labels.none(nodes, blocks)
        self._own = _singles(nodes)
        least_back = terms.back.min(axis=1)
        # What a first node costs at the end at least counts from the start, so that labels compare fairly.
        self._toll = (
            np.zeros(nodes) if terms.separates else np.where(np.isfinite(least_back), least_back, 0.0)
        )
        finite = np.flatnonzero(np.isfinite(terms.stage[:, MIDDLE]).any(axis=0))
        self._reach = int(finite[-1]) if len(finite) else 0  # blocks that any stage can take

    def hold(self, blocks: int) -> None:
        """All held labels at so many blocks, from what came with fewer."""
        nodes, came, stage = self._terms.nodes, self._came, self._terms.stage
        span = min(blocks - 1, self._reach)
        since = slice(blocks - span, blocks)
        moved = came.value[:, since] + stage[:, MIDDLE, span:0:-1, None]  # [N, span, W]
        opened = self._terms.lead + self._toll + stage[:, FIRST, blocks]
        value = np.concatenate([opened[:, None], moved.reshape(nodes, -1)], axis=1)
        if not np.isfinite(value).any():
            return
        used = came.used[:, since].reshape(nodes, span * LABELS, self._own.shape[1]) | self._own[:, None]
        first = came.first[:, since].reshape(nodes, -1)
        numbers = np.arange(nodes)[:, None]
        origin = (np.arange(span, 0, -1)[:, None] * LABELS + np.arange(LABELS)).reshape(1, -1)
        found = Labels(
            value,
            np.concatenate([numbers, first], axis=1),
            np.broadcast_to(np.concatenate([[[-1]], origin], axis=1), value.shape),
            np.concatenate([self._own[:, None], used], axis=1),
        )
        self._keep(self._held, blocks, found)

    def move(self, blocks: int) -> None:
        """What comes to each node from all labels held at so many blocks, but those that have used it."""
        nodes, held = self._terms.nodes, self._held
        values = held.value[:, blocks]  # [N, W]
        if not np.isfinite(values).any():
            return
        value = (self._terms.hop.T[:, :, None] + values).reshape(nodes, -1)  # [to, from and label]
        used = held.used[:, blocks].reshape(nodes * LABELS, self._own.shape[1])
        visited = np.unpackbits(used.astype("<u8").view(np.uint8), axis=-1, bitorder="little")[:, :nodes]
        value[visited.T.astype(bool)] = INFINITE
        found = Labels(
            value,
            np.broadcast_to(held.first[:, blocks].reshape(-1), value.shape),
            np.broadcast_to(np.arange(nodes * LABELS), value.shape),
            np.broadcast_to(used, (nodes, *used.shape)),
        )
        self._keep(self._came, blocks, found)

    def _keep(self, labels: Labels, blocks: int, found: Labels) -> None:
        """Of each node's candidates [N, X] the cheapest that are not dominated by another one."""
        rows = np.arange(len(found.value))[:, None]
        count = min(TRIED, found.value.shape[1])
        cheapest = np.argpartition(found.value, count - 1, axis=1)[:, :count]
        tried = found.at(rows, cheapest)
        tried = tried.at(rows, tried.value.argsort(axis=1, kind="stable"))
        inside = ((tried.used[:, :, None] & ~tried.used[:, None, :]) == 0).all(axis=-1)
        if not self._terms.separates:
            inside &= tried.first[:, :, None] == tried.first[:, None, :]
        dominated = np.triu(inside, k=1).any(axis=1)  # by a cheaper one: [N, cheaper, dearer]
        value = np.where(dominated, INFINITE, tried.value)
        kept = value.argsort(axis=1, kind="stable")[:, :LABELS]
        best, places = tried.at(rows, kept), slice(kept.shape[1])
        labels.value[:, blocks, places] = value[rows, kept]
        labels.first[:, blocks, places] = best.first
        labels.origin[:, blocks, places] = best.origin
        labels.used[:, blocks, places] = best.used

    def best(self) -> Found | None:
        terms, came = self._terms, self._came
        alone = terms.lead + terms.stage[:, ONLY, terms.blocks] + np.diagonal(terms.back)
        numbers = np.arange(terms.nodes)[:, None, None]
        ended = came.value[:, ::-1] + terms.stage[:, LAST, :, None]  # [N, blocks of the last, W]
        first = came.first[:, ::-1]
        ended = ended + (terms.back[first, numbers] - self._toll[first])
        single, place = int(alone.argmin()), np.unravel_index(int(ended.argmin()), ended.shape)
        value = min(float(alone[single]), float(ended[place]))
        if value == INFINITE:
            return None
        if alone[single] == value:
            return Found(value, lambda: ((single,), (terms.blocks,)))
        node, blocks, label = (int(part) for part in place)
        return Found(value, lambda: self._trace(node, blocks, label))

    def _trace(self, node: int, blocks: int, label: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The solution that ends with `blocks` on `node`, onto a label that came there."""
        order, counts, left = [node], [blocks], self._terms.blocks - blocks
        while True:
            node, label = divmod(int(self._came.origin[node, left, label]), LABELS)
            order.append(node)
            origin = int(self._held.origin[node, left, label])
            if origin < 0:
                return tuple(reversed(order)), tuple(reversed([*counts, left]))
            blocks, label = divmod(origin, LABELS)
            counts.append(blocks)
            left -= blocks


def _singles(nodes: int) -> Sets:
    """[N, words]: the set of each node alone."""
    sets = np.zeros((nodes, -(-nodes // WORD)), np.uint64)
    for node in range(nodes):
        sets[node, node // WORD] = np.uint64(1 << node % WORD)
    return sets
