"""Memory of a drafter's keys and values: slots of one length, which grows with the sequences."""

from __future__ import annotations

from bbquic.draft.slots import Slots
from bbquic.errors import ModelError
from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange, Tiers
from bbquic.kv.slab import Arena, bytes_per_cell
from bbquic.model.blocks import StageModel
from bbquic.units import Bytes

LEAST = 256  # cells of a slot at first; twice as many each time that they are too few


class DraftStore:
    """An arena of equal slots in one range. While it grows, the one before is there too."""

    def __init__(self, model: StageModel, memory: Bytes, rows: int) -> None:
        """Room for `rows` sequences at most. Raises: ModelError where not even a short one fits."""
        self._model = model
        cell = bytes_per_cell(kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=model.dtype)
        self._cells = memory // (cell * len(model.blocks))
        self._rows = rows
        self.most = self._cells // CELL_ALIGNMENT * CELL_ALIGNMENT  # cells that one slot may have
        if self.most < LEAST:
            raise ModelError(
                f"the draft model needs {LEAST * cell * len(model.blocks):,} bytes for keys and values of "
                f"{LEAST} tokens, and may have {memory:,}"
            )
        self._make(LEAST)

    @property
    def slots(self) -> int:
        return self.where.count

    def make_room(self, cells: int, held: Slots) -> None:
        """Have slots of so many cells, `most` at most, with what `held` are stored in the present ones; where
        there are fewer slots then, those keep theirs that were asked about last."""
        assert cells <= self.most, (cells, self.most)
        capacity = self.where.capacity
        if cells <= capacity:
            return
        while capacity < cells:
            capacity *= 2
        before, here = self.arena, self.where
        self._make(min(capacity, self.most))
        for old, new in held.resize(self.slots):
            for block in self._model.blocks:
                pairs = zip(before.view(block, here), self.arena.view(block, self.where), strict=True)
                for source, target in pairs:
                    target[new, :, : here.capacity] = source[old]

    def _make(self, capacity: int) -> None:
        slots = min(self._rows, self._cells // capacity)
        self.where = SlotRange.of(0, slots, capacity)
        self.arena = Arena(
            blocks=self._model.blocks,
            tiers=Tiers((slots * capacity,)),
            kv_heads=self._model.kv_heads,
            head_dim=self._model.head_dim,
            dtype=self._model.dtype,
            device=self._model.device,
        )
