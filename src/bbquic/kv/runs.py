"""Rows that one attention call serves, over the keys where they lie: neighbouring slots, or one chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from bbquic.kv.masks import first_seen, seen_cells
from bbquic.kv.ranges import SlotRange
from bbquic.kv.rows import RowSpan


class Run:
    """Rows of neighbouring slots of one tier that each add one token, or a tree; or one row of many tokens.

    Its tensors are on the device where the tier's keys are, and so is all that it is given. Keys and values
    are the strip's views `[slots, kv_heads, capacity, head_dim]`; they are never gathered, nor repeated:
    queries that share a key head become rows of one query. Scratch is a bool mask, made once a pack, of
    tokens x cells read (trees: x heads that share a key head), and what one call of torch needs, which on a
    CPU is the same mask in the queries' dtype: a chunk is bounded by the pack, cells by the capacity.
    """

    def __init__(
        self, rows: Sequence[RowSpan], tokens: slice, where: SlotRange, device: torch.device
    ) -> None:
        """`tokens` are the rows' places among the tokens that it is given; rows are those of `runs_of`."""
        self.rows = tuple(rows)
        self.tokens = tokens
        self.tier = where.tier(rows[0].slot)
        first = where.place(rows[0].slot)
        self.slots = slice(first, first + len(rows))
        self.width = max(row.count for row in rows)  # queries of a row; shorter rows have some for nothing
        self.stop = max(row.reach for row in rows)  # behind the last cell that is read
        self._is_plain = all(row.layout is None for row in rows)
        self._is_level = all(row.start == rows[0].start for row in rows)
        self._is_even = all(row.count == self.width for row in rows)
        self._device = device
        self._masks: dict[tuple[int | None, int], torch.Tensor | None] = {}
        if len(rows) == 1:
            self._at: tuple[torch.Tensor, ...] = ()
        else:  # [tokens] each: row within the run, token within the row, cell within the slot
            places = [(n, i, row.start + i) for n, row in enumerate(rows) for i in range(row.count)]
            self._at = tuple(torch.tensor(places, device=device).T.contiguous())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it holds on its device by now."""
        return [*self._at, *(mask for mask in self._masks.values() if mask is not None)]

    def prepare(self) -> None:
        """Make the mask without a window, which nearly every model uses: so no block has to."""
        self._mask(None, 1)

    def store(self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the run's keys and values `[tokens, kv_heads, head_dim]` where they belong."""
        keys, values = keys[self.slots], values[self.slots]
        if self.width == 1 and self._is_level:
            keys[:, :, self.rows[0].start] = k
            values[:, :, self.rows[0].start] = v
            return
        if self._at:
            row, _, cell = self._at
            keys[row, :, cell] = k
            values[row, :, cell] = v
            return
        start = self.rows[0].start
        keys[0, :, start : start + len(k)] = k.transpose(0, 1)
        values[0, :, start : start + len(v)] = v.transpose(0, 1)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attention of the run's queries `[tokens, heads, head_dim]`, whose keys are stored; the same shape.

        `window`: a token sees those of positions above its own minus the window, as transformers has it.
        """
        low = first_seen(self.rows, window)
        keys, values = (store[self.slots, :, low : self.stop] for store in (keys, values))
        if _kind(self.rows[0]) == "chunk":
            return self._chunk(q, keys, values, scale, window)
        n, c, (tokens, heads, head_dim) = len(self.rows), self.width, q.shape
        group = heads // keys.shape[1]
        if c == 1:
            grouped, mask = q.reshape(n, -1, group, head_dim), self._mask(window, 1)
            out = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
            return out.reshape(n, heads, head_dim)
        if not self._is_even:
            padded = q.new_zeros((n, c, heads, head_dim))
            padded[self._at[0], self._at[1]] = q
            q = padded
        grouped = q.view(n, c, -1, group, head_dim).permute(0, 2, 3, 1, 4)
        folded = grouped.reshape(n, -1, group * c, head_dim)  # [n, kv_heads, group x c, head_dim]
        mask = self._mask(window, group)
        out = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
        out = out.reshape(n, -1, group, c, head_dim).permute(0, 3, 1, 2, 4).reshape(n, c, heads, head_dim)
        return out.reshape(tokens, heads, head_dim) if self._is_even else out[self._at[0], self._at[1]]

    def _chunk(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """One row, whose key heads stand in the batch's place: so its mask is that of one head."""
        mask = self._mask(window, 1)
        c, heads, head_dim = q.shape
        kv_heads, cells = keys.shape[1:3]
        shape = (kv_heads, heads // kv_heads, cells, head_dim)
        grouped = q.view(c, *shape[:2], head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, c, head_dim]
        keys, values = keys[0, :, None].expand(shape), values[0, :, None].expand(shape)  # still views
        causal = mask is None
        out = F.scaled_dot_product_attention(grouped, keys, values, mask, is_causal=causal, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(c, heads, head_dim)

    def _mask(self, window: int | None, group: int) -> torch.Tensor | None:
        """`[rows, 1, group x width, cells]`, True where a key is seen.

        None where all see all, or for a chunk from the beginning, which is plain causal.
        """
        key = window, group
        if key not in self._masks:
            mask = self._plain_mask(window) if self._is_plain else self._made(window)
            if mask is not None and group > 1:
                mask = mask.repeat(1, 1, group, 1)
            self._masks[key] = mask
        return self._masks[key]

    def _plain_mask(self, window: int | None) -> torch.Tensor | None:
        first = self.rows[0].first
        if self.width == 1 and all(row.first == first for row in self.rows):
            return None
        if self.width > 1 and first == 0 and (window is None or window >= self.width):
            return None
        cell = torch.arange(first_seen(self.rows, window), self.stop, device=self._device)
        query = torch.tensor([row.first for row in self.rows], device=self._device)[:, None, None, None]
        query = query + torch.arange(self.width, device=self._device)[:, None]  # [rows, 1, width, 1]
        seen = cell <= query
        return seen if window is None else seen & (cell > query - window)

    def _made(self, window: int | None) -> torch.Tensor:
        cells = range(first_seen(self.rows, window), self.stop)
        return torch.from_numpy(seen_cells(self.rows, cells, window)).to(self._device)[:, None]


def runs_of(rows: Sequence[RowSpan], where: SlotRange, device: torch.device) -> list[Run]:
    """Rows of one device, in the order of tiers and places, as runs; their tokens lie in this order."""
    found: list[Run] = []
    place = 0
    for group in _neighbours(rows, where):
        count = sum(row.count for row in group)
        found.append(Run(group, slice(place, place + count), where, device))
        place += count
    return found


def _neighbours(rows: Sequence[RowSpan], where: SlotRange) -> Iterator[list[RowSpan]]:
    """Rows cut into those that one call can serve."""
    run: list[RowSpan] = []
    for row in rows:
        if run and not (row.slot == run[-1].slot + where.tiers and _kind(row) == _kind(run[-1]) != "chunk"):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _kind(row: RowSpan) -> str:
    if row.parents is not None:
        return "tree"
    return "decode" if row.count == 1 else "chunk"
