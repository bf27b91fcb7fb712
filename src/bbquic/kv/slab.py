"""The KV store of a stage: one arena a block, cut into ranges of slots."""

from __future__ import annotations

import numpy as np
import torch

from bbquic.kv.ranges import SlotCopy, SlotRange
from bbquic.units import Bytes


def bytes_per_cell(*, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Bytes:
    """Memory of one token's keys and values in one block."""
    return Bytes(2 * kv_heads * head_dim * dtype.itemsize)


class Arena:
    """Keys and values of a stage's blocks, reserved once; a cell holds one token's in one block.

    A range of the arena is seen as `[slots, kv_heads, capacity, head_dim]`: a view, never a copy, so
    ranges can be cut anew at any time without moving a byte. Cells start as zeros and are only ever
    overwritten by finite values, so masked cells cannot turn an attention output into NaN.
    """

    def __init__(
        self,
        *,
        blocks: range,
        cells: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises: RuntimeError (torch's own out-of-memory) when the device cannot hold it."""
        self.blocks = blocks
        self.cells = cells
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._width = kv_heads * head_dim
        shape = (len(blocks), cells * self._width)
        self._keys = _zeros(shape, dtype, device)
        self._values = _zeros(shape, dtype, device)

    @property
    def nbytes(self) -> Bytes:
        return Bytes(self._keys.nbytes + self._values.nbytes)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All of its memory, for who must say which stream uses it."""
        return self._keys, self._values

    def view(self, block: int, where: SlotRange) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range in one block, each `[slots, kv_heads, capacity, head_dim]`.

        Raises: ValueError for a block this stage does not hold or a range outside the arena.
        """
        index = self.blocks.index(block)
        return self._seen(self._keys[index], where), self._seen(self._values[index], where)

    def copy(self, what: SlotCopy) -> None:
        """Copy a slot's tokens to another slot, in all blocks at once; on the device's own stream.

        Raises: ValueError for a range outside the arena.
        """
        for store in (self._keys, self._values):
            source, target = self._seen(store, what.source), self._seen(store, what.target)
            target[:, what.target_slot, :, : what.count] = source[:, what.source_slot, :, : what.count]

    def _seen(self, store: torch.Tensor, where: SlotRange) -> torch.Tensor:
        """`[..., cells * width]` as `[..., slots, kv_heads, capacity, head_dim]`: a view."""
        if where.stop > self.cells:
            raise ValueError(f"{where} ends behind the arena's {self.cells} cells")
        span = slice(where.offset * self._width, where.stop * self._width)
        shape = (where.slots, self._kv_heads, where.capacity, self._head_dim)
        return store[..., span].view(*store.shape[:-1], *shape)


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; in host memory, address space whose pages become resident when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    blocks, values = shape
    pages = np.zeros((blocks, values * dtype.itemsize), dtype=np.uint8)  # calloc; torch.zeros writes them
    return torch.from_numpy(pages).view(dtype)
