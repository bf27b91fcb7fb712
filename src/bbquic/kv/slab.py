"""The KV store of a stage: one arena a block, cut into ranges of slots, on the device and in host memory."""

from __future__ import annotations

import numpy as np
import torch

from bbquic.kv.ranges import SlotCopy, SlotRange, Tiers
from bbquic.units import Bytes

HOST = torch.device("cpu")


def bytes_per_cell(*, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Bytes:
    """Memory of one token's keys and values in one block."""
    return Bytes(2 * kv_heads * head_dim * dtype.itemsize)


class Arena:
    """Keys and values of a stage's blocks, reserved once; a cell holds one token's in one block.

    The strip of a range in a tier is seen as `[slots, kv_heads, capacity, head_dim]`: a view, never a copy,
    so ranges can be cut anew at any time without moving a byte. The last `on_host` tiers lie in host memory
    (pinned where the device is a GPU), the others on the device. Cells start as zeros and are only ever
    overwritten by finite values, so masked cells cannot turn an attention output into NaN.
    """

    def __init__(
        self,
        *,
        blocks: range,
        tiers: Tiers,
        on_host: int = 0,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises: RuntimeError (torch's own out-of-memory) when device or host cannot hold it."""
        if not 0 <= on_host <= len(tiers.sizes):
            raise ValueError(f"of {len(tiers.sizes)} tiers {on_host} cannot be in host memory")
        self.blocks = blocks
        self.tiers = tiers
        self.device = device
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._width = kv_heads * head_dim
        self._first_on_host = len(tiers.sizes) - on_host
        self._device_cells = sum(tiers.sizes[: self._first_on_host])
        on_device, beside = self._device_cells, tiers.cells - self._device_cells
        self._on_device = _Memory(len(blocks), on_device * self._width, dtype, device, pinned=False)
        self._on_host = _Memory(
            len(blocks), beside * self._width, dtype, HOST, pinned=device.type == "cuda" and beside > 0
        )

    @property
    def nbytes(self) -> Bytes:
        """On the device and in host memory together."""
        return Bytes(self._on_device.nbytes + self._on_host.nbytes)

    @property
    def host_bytes(self) -> Bytes:
        """Of the tiers in host memory."""
        return self._on_host.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All of its memory on the device, for who must say which stream uses it."""
        return self._on_device.keys, self._on_device.values

    def is_on_host(self, tier: int) -> bool:
        """Whether a tier's keys are attended to where the host has them."""
        return tier >= self._first_on_host

    def view(self, block: int, where: SlotRange, tier: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range's strip in one block, each `[slots, kv_heads, capacity, head_dim]`.

        Raises: ValueError for a block this stage does not hold or a range outside the arena.
        """
        index = self.blocks.index(block)
        memory = self._on_host if self.is_on_host(tier) else self._on_device
        keys, values = memory.keys[index], memory.values[index]
        return self._seen(keys, where, tier), self._seen(values, where, tier)

    def copy(self, what: SlotCopy) -> None:
        """Copy a slot's cells to another slot, in all blocks at once; on the device's own stream, which is
        waited for where an end is in host memory.

        Raises: ValueError for a range outside the arena.
        """
        tiers = what.source.tier(what.source_slot), what.target.tier(what.target_slot)
        places = what.source.place(what.source_slot), what.target.place(what.target_slot)
        stores = [self._on_host if self.is_on_host(tier) else self._on_device for tier in tiers]
        for name in ("keys", "values"):
            source = self._seen(getattr(stores[0], name), what.source, tiers[0])
            target = self._seen(getattr(stores[1], name), what.target, tiers[1])
            target[:, places[1], :, : what.count] = source[:, places[0], :, : what.count]

    def _seen(self, store: torch.Tensor, where: SlotRange, tier: int) -> torch.Tensor:
        """`[..., cells * width]` as `[..., slots, kv_heads, capacity, head_dim]`: a view."""
        if not self.tiers.hold(where):
            raise ValueError(f"{where} is not within the arena's tiers of {self.tiers.sizes} cells")
        cells = where.span(tier)
        base = self._device_cells if self.is_on_host(tier) else 0
        span = slice((cells.start - base) * self._width, (cells.stop - base) * self._width)
        shape = (where.strips[tier].slots, self._kv_heads, where.capacity, self._head_dim)
        return store[..., span].view(*store.shape[:-1], *shape)


class _Memory:
    """Keys and values [blocks, values], zeros. In host memory, unless it is pinned, address space whose
    pages become resident when they are first written."""

    def __init__(
        self, blocks: int, values: int, dtype: torch.dtype, device: torch.device, *, pinned: bool
    ) -> None:
        self.keys, self.values = (
            _zeros((blocks, values), dtype, device, pinned=pinned) for _ in ("keys", "values")
        )

    @property
    def nbytes(self) -> Bytes:
        return Bytes(self.keys.nbytes + self.values.nbytes)


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, pinned: bool) -> torch.Tensor:
    if device.type != "cpu" or pinned or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    blocks, values = shape
    pages = np.zeros((blocks, values * dtype.itemsize), dtype=np.uint8)  # calloc; torch.zeros writes them
    return torch.from_numpy(pages).view(dtype)
