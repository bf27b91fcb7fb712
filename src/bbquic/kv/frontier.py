"""Attention for the newest nodes of draft trees, over slots that hold the nodes before them already.

A tree that grows level by level is computed once: `PackedAttention` takes a tree whole, this one a level at a
time, each node with the cells of its own ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from bbquic.kv.ranges import SlotRange
from bbquic.kv.slab import Arena


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes of one slot's tree, none of which is another's ancestor, behind `committed` tokens in the cells
    from 0 on.

    paths: by node the cells from its first ancestor behind the committed tokens down to its own, where its
    keys go; so a node's position is committed + len(path) - 1.
    """

    slot: int
    committed: int
    paths: tuple[tuple[int, ...], ...]

    def check(self, where: SlotRange) -> None:
        """Raises: ValueError when a path leaves the slot or goes through committed cells."""
        if self.slot not in where or not self.paths or not 0 <= self.committed <= where.capacity:
            raise ValueError(f"{self} is not of {where}")
        beyond = range(self.committed, where.capacity)
        for path in self.paths:
            if not path or len(set(path)) < len(path) or any(cell not in beyond for cell in path):
                raise ValueError(f"{path} is not a path in the free cells of slot {self.slot}")

    @property
    def positions(self) -> list[int]:
        """Each node's in its sequence."""
        return [self.committed + len(path) - 1 for path in self.paths]


class FrontierAttention:
    """For one pack of frontiers, slots rising, of a range that is one tier; used by every block."""

    def __init__(self, rows: Sequence[Frontier], where: SlotRange, arena: Arena) -> None:
        """Raises: ValueError when a row leaves its slot, or two are of one slot."""
        slots = [row.slot for row in rows]
        if where.tiers != 1 or not rows or any(b <= a for a, b in pairwise(slots)):
            raise ValueError("frontiers are of rising slots of one tier")
        for row in rows:
            row.check(where)
        self._where = where
        self._arena = arena
        device = arena.device
        cells = [(row.slot, path[-1]) for row in rows for path in row.paths]
        self._slot, self._cell = torch.tensor(cells, device=device).T.contiguous()  # [T] each
        self._groups = [_Group(group, tokens, device) for group, tokens in _neighbours(rows)]

    def attend(
        self,
        block: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        window: int | None = None,
    ) -> torch.Tensor:
        """As `PackedAttention.attend`."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head_dim]
        keys, values = self._arena.view(block, self._where)
        keys[self._slot, :, self._cell] = k
        values[self._slot, :, self._cell] = v
        parts = [group.attend(q[group.tokens], keys, values, scale, window) for group in self._groups]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


class _Group:
    """Frontiers of neighbouring slots: one call, whose shorter rows have some queries for nothing."""

    def __init__(self, rows: Sequence[Frontier], tokens: slice, device: torch.device) -> None:
        self.tokens = tokens
        self._rows = tuple(rows)
        self._device = device
        self._slots = slice(rows[0].slot, rows[-1].slot + 1)
        self._width = max(len(row.paths) for row in rows)
        self._stop = max(max(row.committed, *map(max, row.paths)) for row in rows) + 1
        self._is_even = all(len(row.paths) == self._width for row in rows)
        places = [(n, i) for n, row in enumerate(rows) for i in range(len(row.paths))]
        self._at = tuple(torch.tensor(places, device=device).T.contiguous())
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Of the group's queries `[tokens, heads, head_dim]`, whose keys are stored; the same shape."""
        keys, values = (store[self._slots, :, : self._stop] for store in (keys, values))
        n, c, (tokens, heads, head_dim) = len(self._rows), self._width, q.shape
        group = heads // keys.shape[1]
        if not self._is_even:
            padded = q.new_zeros((n, c, heads, head_dim))
            padded[self._at] = q
            q = padded
        grouped = q.view(n, c, -1, group, head_dim).permute(0, 2, 3, 1, 4)
        folded = grouped.reshape(n, -1, group * c, head_dim)  # [n, kv_heads, group x c, head_dim]
        out = F.scaled_dot_product_attention(folded, keys, values, self._mask(window, group), scale=scale)
        out = out.reshape(n, -1, group, c, head_dim).permute(0, 3, 1, 2, 4).reshape(n, c, heads, head_dim)
        return out.reshape(tokens, heads, head_dim) if self._is_even else out[self._at]

    def _mask(self, window: int | None, group: int) -> torch.Tensor:
        """`[rows, 1, group x width, cells]`, True where a key is seen; a row's spare queries see its first
        committed cell, or its first path, so that none sees nothing."""
        if (window, group) not in self._masks:
            mask = np.zeros((len(self._rows), self._width, self._stop), dtype=np.bool_)
            for index, row in enumerate(self._rows):
                for node in range(self._width):
                    path = row.paths[min(node, len(row.paths) - 1)]
                    first = 0 if window is None else max(0, row.committed + len(path) - window)
                    mask[index, node, first : row.committed] = True
                    mask[index, node, list(path if window is None else path[-window:])] = True
            made = torch.from_numpy(mask).to(self._device)[:, None].repeat(1, 1, group, 1)
            self._masks[window, group] = made
        return self._masks[window, group]


def _neighbours(rows: Sequence[Frontier]) -> Iterator[tuple[list[Frontier], slice]]:
    """Rows of neighbouring slots, and which of the pack's tokens are theirs."""
    run: list[Frontier] = []
    start = place = 0
    for row in rows:
        if run and row.slot != run[-1].slot + 1:
            yield run, slice(start, place)
            run, start = [], place
        run.append(row)
        place += len(row.paths)
    yield run, slice(start, place)
