"""Blocks and ends of a model's shapes with random weights, laid out as a stage's: what a measurement runs.

Nothing is read from disk. A decode step's time is reading weights, and a stage has more of them than a cache
holds; so there are blocks enough that none is still in a cache when its turn comes again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bbquic.errors import ModelError
from bbquic.kv.attention import PackedAttention
from bbquic.kv.ranges import SlotRange, Tiers
from bbquic.kv.rows import RowSpan
from bbquic.kv.slab import Arena, bytes_per_cell
from bbquic.model.blocks import StageModel
from bbquic.model.spec import FamilySpec
from bbquic.model.weights import Shape, tensors_for
from bbquic.runtime.ranges import aligned
from bbquic.runtime.stopwatch import Work
from bbquic.units import Bytes

COLD = 256 << 20  # bytes; beyond the last cache of nearly every CPU, and five times an H200's
MOST_BLOCKS = 64
ENDS = 512 << 20  # bytes of embedding or head: a larger vocabulary is measured by a part of it
MEMORY_SHARE = 0.5  # of what is free, for all of this
CELLS = 32 * 320  # of the arena: 32 rows of some context, or fewer of more
RAGGED = 0.25  # of a context: rows of a pack look back that much more or less, as a job's do
SCALE = 0.02  # of weights: hidden states stay finite through any number of blocks


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """`many` blocks for few rows, `few` (some of the same) for many; `ends` has embedding, norm and head.

    `ends` has the vocabulary divided by `cut`, and no block: a pack through it is what a pack takes beside
    blocks.
    """

    many: StageModel
    few: StageModel
    ends: StageModel
    cut: float
    arena: Arena
    vocabulary: int  # of `ends`
    heads: int

    @property
    def device(self) -> torch.device:
        return self.many.device

    def blocks(self, tokens: int, *, model: StageModel) -> Work:
        """A pack of so many tokens through the model's blocks, whose attention gives zeros at once."""
        hidden = _noise((tokens, model.hidden_size), model.dtype, self.device)  # [T, D]
        positions = torch.arange(tokens, device=self.device)
        zeros = torch.zeros((1, tokens, self.heads, model.head_dim), dtype=model.dtype, device=self.device)
        idle = _NoAttention(zeros)

        def work() -> None:
            model.run(hidden, positions, idle)
            self.wait()

        return work

    def attention(self, spans: Sequence[RowSpan]) -> Work:
        """Attention of these rows, in each block of the arena."""
        model, arena = self.many, self.arena
        where = SlotRange.of(0, len(spans), aligned(max(span.first + span.count for span in spans)))
        packed = PackedAttention(spans, where, arena, device=self.device)
        tokens, size = packed.tokens, model.head_dim
        query = _noise((1, self.heads, tokens, size), model.dtype, self.device)
        key = _noise((1, model.kv_heads, tokens, size), model.dtype, self.device)
        value = key.clone()

        @torch.inference_mode()
        def work() -> None:
            for block in arena.blocks:
                packed.attend(block, query, key, value, scale=size**-0.5)
            self.wait()

        return work

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def decode_rows(rows: int, context: int) -> list[RowSpan]:
    """A row in each slot that looks back on `context` tokens, on average: some on fewer, some on more."""
    if rows == 1:
        return [RowSpan(0, context, 1)]
    steps = [2 * (7 * slot % rows) / (rows - 1) - 1 for slot in range(rows)]
    return [RowSpan(slot, round(context * (1 + RAGGED * step)), 1) for slot, step in enumerate(steps)]


class _NoAttention(PackedAttention):
    """A pack whose attention costs nothing."""

    def __init__(self, zeros: torch.Tensor) -> None:
        """`zeros` [1, T, heads, head_dim]."""
        self._zeros = zeros

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
        return self._zeros


def rehearsal(
    spec: FamilySpec, config: Any, dtype: torch.dtype, device: torch.device, memory: Bytes
) -> Rehearsal:
    """Made within `memory` bytes, which are free. Raises: ModelError where that does not hold a block."""
    room = int(MEMORY_SHARE * memory)
    names = tensors_for(spec, config, range(1), embeds=False, heads=False)
    block = _bytes(names, dtype)
    need = 3 * block + 2 * _ends_bytes(config, dtype)  # a block twice while it is laid out, and the arena
    if need > room:
        raise ModelError(
            f"measuring a block takes {need / 1e9:.2f} GB, of {memory / 1e9:.2f} GB free {room / 1e9:.2f} GB "
            "can be used for it",
            hint="free memory there",
        )
    most = min(MOST_BLOCKS, int(config.num_hidden_layers))
    cold = min(COLD, (room - need) // 4)
    count = min(most, max(min(2, most), -(-cold // block)))
    vocabulary = min(int(config.vocab_size), max(256, ENDS // (int(config.hidden_size) * dtype.itemsize)))
    small = copy.deepcopy(config)
    small.vocab_size = vocabulary
    many = _model(spec, config, dtype, device, range(count), ends=False)
    few = many if count <= 2 else _model(spec, config, dtype, device, range(2), ends=False)
    ends = _model(spec, small, dtype, device, range(0), ends=True)
    return Rehearsal(
        many=many,
        few=few,
        ends=ends,
        cut=int(config.vocab_size) / vocabulary,
        arena=_arena(many, cold),
        vocabulary=vocabulary,
        heads=int(config.num_attention_heads),
    )


def _model(
    spec: FamilySpec, config: Any, dtype: torch.dtype, device: torch.device, blocks: range, *, ends: bool
) -> StageModel:
    shapes = tensors_for(spec, config, blocks, embeds=ends, heads=ends)
    tensors = {name: _weight(shape, dtype, device) for name, shape in shapes.items()}
    return StageModel(spec, config, tensors, blocks=blocks, embeds=ends, heads=ends)


def _arena(model: StageModel, cold: int) -> Arena:
    """Keys for CELLS tokens in as many blocks as keep them out of caches; written, so that it is memory."""
    cell = bytes_per_cell(kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=model.dtype)
    count = max(1, min(len(model.blocks), cold // (cell * CELLS)))
    arena = Arena(
        blocks=range(count),
        tiers=Tiers((CELLS,)),
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    for tensor in arena.tensors:
        tensor.fill_(SCALE)
    return arena


def _weight(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Noise; ones for a norm."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    return _noise(shape, dtype, device).mul_(SCALE)


def _noise(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal values that come again after a while: drawing each would take longer than what is measured."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    flat = tensor.view(-1)
    drawn = torch.randn(min(len(flat), 65_521), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for start in range(0, len(flat), len(drawn)):
        part = flat[start : start + len(drawn)]
        part.copy_(drawn[: len(part)])
    return tensor


def _bytes(shapes: Mapping[str, Shape], dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize


def _ends_bytes(config: Any, dtype: torch.dtype) -> int:
    whole = int(config.vocab_size) * int(config.hidden_size) * dtype.itemsize
    return min(whole, ENDS) * (1 if config.tie_word_embeddings else 2)
