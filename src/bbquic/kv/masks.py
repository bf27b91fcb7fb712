"""Which cells each token of neighbouring rows sees. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bbquic.kv.rows import RowSpan

Mask = NDArray[np.bool_]


def first_seen(rows: Sequence[RowSpan], window: int | None) -> int:
    """The lowest cell that any token of the rows sees; with a window those before it are not even read."""
    if window is None:
        return 0
    return max(0, min(min(row.compact, row.first - window + 1) for row in rows))


def seen_cells(rows: Sequence[RowSpan], cells: range, window: int | None) -> Mask:
    """Mask `[rows, width, cells]`: what each token sees of the cells.

    `width` is the longest row's count; what is behind a shorter one's tokens sees what its root sees. A
    window is that of transformers: a token sees those whose position is above its own minus the window.
    """
    width = max(row.count for row in rows)
    cell = np.arange(cells.start, cells.stop)
    compact = np.array([row.compact for row in rows])
    mask: Mask = np.repeat((cell < compact[:, None])[:, None], width, axis=1)
    held = np.broadcast_to(cell, (len(rows), len(cells))).copy() if window is not None else None
    own = _own(rows, width)
    for index, row in enumerate(rows):
        tail = np.array(row.tail, dtype=np.int64) - cells.start
        mask[index][:, tail] = True
        stop = row.start - cells.start + row.count
        mask[index, :, stop - row.count : stop] = own[index, :, : row.count]
    if held is None:
        return mask
    depth = own.sum(axis=2) - 1  # [rows, width]
    for index, row in enumerate(rows):
        held[index, np.array(row.tail, dtype=np.int64) - cells.start] = row.compact + np.arange(len(row.tail))
        stop = row.start - cells.start + row.count
        held[index, stop - row.count : stop] = row.first + depth[index, : row.count]
    query = np.array([row.first for row in rows])[:, None] + depth
    assert window is not None
    mask &= held[:, None, :] > query[:, :, None] - window
    return mask


def _own(rows: Sequence[RowSpan], width: int) -> Mask:
    """[rows, width, width]: whether of a row's tokens the second is the first or an ancestor of it."""
    if all(row.parents is None for row in rows):
        return np.broadcast_to(np.tri(width, dtype=np.bool_), (len(rows), width, width))
    parents = np.zeros((len(rows), width), dtype=np.int64)  # behind a row's tokens: the root's children
    for index, row in enumerate(rows):
        parents[index, 1 : row.count] = range(row.count - 1) if row.parents is None else row.parents[1:]
    found = np.zeros((len(rows), width, width), dtype=np.bool_)
    found[:, 0, 0] = True
    each = np.arange(len(rows))
    for node in range(1, width):
        found[:, node] = found[each, parents[:, node]]
        found[:, node, node] = True
    return found
