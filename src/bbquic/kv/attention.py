"""Attention for packed rows: ragged rows of one micro-batch, over the keys where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from bbquic.kv.compaction import PackCompaction
from bbquic.kv.offload import HostAttention, OffloadedRows
from bbquic.kv.ranges import SlotRange
from bbquic.kv.rows import RowSpan
from bbquic.kv.runs import Run, runs_of
from bbquic.kv.slab import HOST, Arena

WHOLE = slice(None)  # places of tokens, where they are those of the pack in its order


class Attention(Protocol):
    """What a block's layer calls; one for each pack."""

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
        """See `PackedAttention.attend`."""


class PackedAttention:
    """What attention needs to know of one pack; built once a pack and used by every block.

    Rows of tiers on the device are `runs`, whose tensors are there too; those of tiers in host memory are
    `offloaded`, unless the device is the CPU, whose memory is the host's.
    """

    def __init__(
        self,
        rows: Sequence[RowSpan],
        where: SlotRange,
        arena: Arena,
        *,
        device: torch.device,
        host: HostAttention | None = None,
        compaction: PackCompaction | None = None,
    ) -> None:
        """Rows in pack order; those that each add one token, or a tree, to neighbouring slots are computed
        together. `host` computes what lies in host memory beside a GPU. What `compaction` has to move in a
        block is moved once the block's attention is issued.

        Raises: ValueError when a row leaves its slot or the range.
        """
        self._arena = arena
        self._where = where
        self._host = host
        self._compaction = compaction
        for row in rows:
            row.check(where)
        self.tokens = sum(row.count for row in rows)
        held = _in_memory_order(rows, where)
        there = [] if host is None else [n for n in held if arena.is_on_host(where.tier(rows[n].slot))]
        here = held[: len(held) - len(there)]  # tiers in host memory are the last ones
        self.runs = runs_of([rows[index] for index in here], where, device)
        self.offloaded: OffloadedRows | None = None
        if there:
            host_runs = runs_of([rows[index] for index in there], where, HOST)
            self.offloaded = OffloadedRows.of(host_runs, where, device)
        self._places = _places(rows, here, device)
        self._host_places = _places(rows, there, device)
        for run in self.runs:
            run.prepare()
        if self.offloaded is not None:
            self.offloaded.prepare()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this holds on the device: made on one stream, used on another."""
        both = (self._places, self._host_places)
        places = [held for held in both if isinstance(held, torch.Tensor)]
        offloaded = [] if self.offloaded is None else self.offloaded.tensors
        return [*places, *offloaded, *(tensor for run in self.runs for tensor in run.tensors)]

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
        """Store the pack's keys and values and attend over everything stored so far.

        query `[1, heads, T, head_dim]`, key and value `[1, kv_heads, T, head_dim]`, rotated already;
        returns `[1, T, heads, head_dim]`. `window`: tokens that each sees, itself included; None is all.
        """
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head_dim]
        if self._compaction is None:
            return self._attended(block, q, k, v, scale, window)[None]
        self._compaction.before(block)
        out = self._attended(block, q, k, v, scale, window)
        self._compaction.after(block)
        return out[None]

    def _attended(
        self,
        block: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        there, here = self._host_places, self._places
        if self._host is None or self.offloaded is None:
            if here is WHOLE:
                return self._computed(block, q, k, v, scale, window)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            out[here] = self._computed(block, q[here], k[here], v[here], scale, window)
            return out
        answer = self._host.begin(
            block, self.offloaded, q[there], k[there], v[there], scale=scale, window=window
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.runs:
            out[here] = self._computed(block, q[here], k[here], v[here], scale, window)
        out[there] = answer.get()
        return out

    def _computed(
        self,
        block: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """The device's runs one after the other; q `[tokens, heads, head_dim]`, k and v are theirs, in their
        order."""
        if len(self.runs) == 1:
            return self._one(self.runs[0], block, q, k, v, scale, window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for run in self.runs:
            own = run.tokens
            out[own] = self._one(run, block, q[own], k[own], v[own], scale, window)
        return out

    def _one(
        self,
        run: Run,
        block: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = self._arena.view(block, self._where, run.tier)
        run.store(k, v, keys, values)
        return run.attend(q, keys, values, scale=scale, window=window)


def _in_memory_order(rows: Sequence[RowSpan], where: SlotRange) -> list[int]:
    """Indices of rows, tier after tier, each by its slots: neighbours in memory follow one another."""
    return sorted(range(len(rows)), key=lambda index: (where.tier(rows[index].slot), rows[index].slot))


def _places(rows: Sequence[RowSpan], held: Sequence[int], device: torch.device) -> torch.Tensor | slice:
    """Where the tokens of some rows are in the pack, in this order of the rows."""
    if list(held) == list(range(len(rows))):
        return WHOLE
    stops = list(accumulate(row.count for row in rows))
    places = [place for index in held for place in range(stops[index] - rows[index].count, stops[index])]
    if places and places == list(range(places[0], places[-1] + 1)):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places, device=device)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: Attention,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """The function for transformers' attention interface; `rows` rides along as a keyword.

    Raises: ValueError for anything a model asks of attention that is not computed here, such as capped
    scores: a wrong answer is worse than none.
    """
    asked = sorted(name for name in ("softcap", "s_aux") if unsupported.get(name) is not None)
    if asked or attention_mask is not None or dropout:
        raise ValueError(f"attention with {', '.join(asked) or 'a mask or dropout'} is not supported")
    block = int(module.layer_idx)  # type: ignore[arg-type]
    return rows.attend(block, query, key, value, scale=scaling, window=sliding_window), None
