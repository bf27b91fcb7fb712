"""A pack's rows as attention sees them: which slot, which positions, and how they lie in the slot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bbquic.kv.ranges import SlotRange


@dataclass(frozen=True, slots=True)
class Layout:
    """How a row lies in a slot that has holes, or as a tree. All numbers are cells of the slot, from 0.

    The row's tokens are put at `start` and on. They see the cells [0, compact), those of `tail` (in the order
    of their positions, which go on from `compact`), and of their own row what `parents` says: the index
    within the row of each token's parent, the root's own is 0. None: each token sees all before it.
    """

    compact: int
    start: int
    tail: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row of a pack: `count` tokens of the sequence in `slot`, at positions `first` and on.

    Without a `layout` the row is plain: a token lies in the cell of its position, and so do all before it.
    """

    slot: int
    first: int
    count: int
    layout: Layout | None = None

    @property
    def start(self) -> int:
        """The cell of its first token."""
        return self.first if self.layout is None else self.layout.start

    @property
    def compact(self) -> int:
        """Cells from 0 on that are seen without exception."""
        return self.first if self.layout is None else self.layout.compact

    @property
    def tail(self) -> tuple[int, ...]:
        return () if self.layout is None else self.layout.tail

    @property
    def parents(self) -> tuple[int, ...] | None:
        return None if self.layout is None else self.layout.parents

    @property
    def reach(self) -> int:
        """Behind the last cell that it reads."""
        stop = self.start + self.count
        return stop if self.layout is None else max(stop, max(self.layout.tail, default=-1) + 1)

    def check(self, where: SlotRange) -> None:
        """Raises: ValueError when it leaves its slot or the range, or its layout contradicts itself."""
        if not (self.slot in where and self.first >= 0 and self.count >= 1):
            raise ValueError(f"{self} is not a row of {where}")
        if self.start + self.count > where.capacity:
            raise ValueError(f"{self} does not fit a slot of {where.capacity} tokens")
        if self.layout is not None:
            _check_layout(self, self.layout, where.capacity)


def positions(rows: Sequence[RowSpan]) -> NDArray[np.int64]:
    """Each token's position in its sequence [T], rows one behind the other; of a tree's node by its depth."""
    counts = np.array([row.count for row in rows])
    ends = np.cumsum(counts)
    firsts = np.array([row.first for row in rows])
    found: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
    for row, end in zip(rows, ends.tolist(), strict=True):
        if row.parents is not None:
            found[end - row.count : end] = row.first + depths(row.parents)
    return found


def depths(parents: Sequence[int]) -> NDArray[np.int64]:
    """How far below the root each node [n] of a tree is, whose parents come before it."""
    found = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents[1:], 1):
        found[node] = found[parent] + 1
    return found


def _check_layout(row: RowSpan, layout: Layout, capacity: int) -> None:
    own = range(layout.start, layout.start + row.count)
    beyond = range(layout.compact, capacity)
    if layout.compact < 0 or layout.start < layout.compact or layout.compact + len(layout.tail) != row.first:
        raise ValueError(f"{row} does not lie behind the {row.first} tokens before it")
    if len(set(layout.tail)) < len(layout.tail) or any(
        cell in own or cell not in beyond for cell in layout.tail
    ):
        raise ValueError(f"{row} has a cell twice or outside its slot")
    parents = layout.parents
    if parents is not None and (
        len(parents) != row.count
        or parents[0] != 0
        or any(not 0 <= parent < node for node, parent in enumerate(parents[1:], 1))
    ):
        raise ValueError(f"{row} is not a tree whose parents come before their children")
