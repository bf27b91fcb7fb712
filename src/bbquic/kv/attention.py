"""Attention for packed rows: ragged rows of one micro-batch, over the keys where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bbquic.kv.ranges import SlotRange
from bbquic.kv.slab import Arena


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row of a pack: `count` tokens of the sequence in `slot`, at positions `first` and on."""

    slot: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _DecodeRun:
    """Neighbouring slots that each add one token: their keys are one view, their queries one batch."""

    pack: slice  # places in the pack
    slots: slice
    slot_index: torch.Tensor  # [n], from 0 within the range
    position: torch.Tensor  # [n]
    reach: int  # longest row, its new token included
    mask: torch.Tensor | None  # [n, 1, 1, reach], True where a key is seen; None when all rows are equal


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens: a prompt, or a part of one."""

    pack: slice
    slot: int
    first: int
    count: int
    mask: torch.Tensor | None  # [count, first + count]; None for a prompt's beginning (plain causal)


class PackedAttention:
    """What attention needs to know of one pack; built once a pack and used by every block."""

    def __init__(
        self, rows: Sequence[RowSpan], where: SlotRange, arena: Arena, *, device: torch.device
    ) -> None:
        """Rows in pack order; runs of one-token rows in neighbouring slots are computed together.

        Raises: ValueError when a row leaves its slot or the range.
        """
        self._arena = arena
        self._where = where
        self._device = device
        self._runs: list[_DecodeRun] = []
        self._chunks: list[_Chunk] = []
        place = 0
        run: list[RowSpan] = []
        for row in rows:
            if not (row.slot in where and row.first >= 0 and row.count >= 1):
                raise ValueError(f"{row} is not a row of {where}")
            if row.first + row.count > where.capacity:
                raise ValueError(f"{row} does not fit a slot of {where.capacity} tokens")
            continues = run and row.count == 1 and row.slot == run[-1].slot + 1
            if run and not continues:
                self._runs.append(self._decode_run(run, place))
                run = []
            if row.count == 1:
                run.append(row)
            else:
                self._chunks.append(self._chunk(row, place))
            place += row.count
        if run:
            self._runs.append(self._decode_run(run, place))
        self.tokens = place

    def _decode_run(self, run: list[RowSpan], stop: int) -> _DecodeRun:
        n = len(run)
        position = torch.tensor([row.first for row in run], device=self._device)
        reach = max(row.first for row in run) + 1
        ragged = any(row.first + 1 != reach for row in run)
        mask = None
        if ragged:
            mask = (torch.arange(reach, device=self._device) <= position[:, None])[:, None, None, :]
        return _DecodeRun(
            pack=slice(stop - n, stop),
            slots=slice(run[0].slot, run[0].slot + n),
            slot_index=torch.arange(n, device=self._device),
            position=position,
            reach=reach,
            mask=mask,
        )

    def _chunk(self, row: RowSpan, start: int) -> _Chunk:
        mask = None
        if row.first > 0:
            key = torch.arange(row.first + row.count, device=self._device)
            query = torch.arange(row.first, row.first + row.count, device=self._device)
            mask = key <= query[:, None]
        return _Chunk(slice(start, start + row.count), row.slot, row.first, row.count, mask)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this holds on the device: made on one stream, used on another."""
        held = [tensor for run in self._runs for tensor in (run.slot_index, run.position, run.mask)]
        held += [chunk.mask for chunk in self._chunks]
        return [tensor for tensor in held if tensor is not None]

    def attend(
        self,
        block: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
    ) -> torch.Tensor:
        """Store the pack's keys and values and attend over everything stored so far.

        query `[1, heads, T, head_dim]`, key and value `[1, kv_heads, T, head_dim]`, rotated already;
        returns `[1, T, heads, head_dim]`.
        """
        keys, values = self._arena.view(block, self._where)  # [slots, kv_heads, capacity, head_dim]
        q = query[0].transpose(0, 1)  # [T, heads, head_dim]
        k = key[0].transpose(0, 1)  # [T, kv_heads, head_dim]
        v = value[0].transpose(0, 1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for run in self._runs:
            run_keys, run_values = keys[run.slots], values[run.slots]
            run_keys[run.slot_index, :, run.position] = k[run.pack]
            run_values[run.slot_index, :, run.position] = v[run.pack]
            n, heads, head_dim = q[run.pack].shape
            # queries that share a key head become rows of one query: keys are never repeated
            grouped = q[run.pack].reshape(n, k.shape[1], heads // k.shape[1], head_dim)
            attended = F.scaled_dot_product_attention(
                grouped, run_keys[:, :, : run.reach], run_values[:, :, : run.reach], run.mask, scale=scale
            )
            out[run.pack] = attended.reshape(n, heads, head_dim)
        for chunk in self._chunks:
            stop = chunk.first + chunk.count
            keys[chunk.slot, :, chunk.first : stop] = k[chunk.pack].transpose(0, 1)
            values[chunk.slot, :, chunk.first : stop] = v[chunk.pack].transpose(0, 1)
            attended = F.scaled_dot_product_attention(
                q[chunk.pack].transpose(0, 1)[None],
                keys[chunk.slot : chunk.slot + 1, :, :stop],
                values[chunk.slot : chunk.slot + 1, :, :stop],
                chunk.mask,
                is_causal=chunk.mask is None,
                scale=scale,
                enable_gqa=True,
            )
            out[chunk.pack] = attended[0].transpose(0, 1)
        return out[None]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: PackedAttention,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """The function for transformers' attention interface; `rows` rides along as a keyword.

    Raises: ValueError for anything a model asks of attention that is not computed here, such as a
    sliding window: a wrong answer is worse than none.
    """
    asked = sorted(
        name for name in ("sliding_window", "softcap", "s_aux") if unsupported.get(name) is not None
    )
    if asked or attention_mask is not None or dropout:
        raise ValueError(f"attention with {', '.join(asked) or 'a mask or dropout'} is not supported")
    block = int(module.layer_idx)  # type: ignore[arg-type]
    return rows.attend(block, query, key, value, scale=scaling), None
