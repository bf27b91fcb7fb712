"""What a stage knows of the slots it holds: which pack may be applied now, later, or never. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bbquic.errors import RemoteProtocolError
from bbquic.kv.ranges import SlotRange
from bbquic.runtime.protocol import PackHeader

T = TypeVar("T")


@dataclass(slots=True)
class _Slots:
    """One micro-batch: its range, each slot's (generation, tokens stored), the last step applied."""

    range: SlotRange | None = None
    filled: dict[int, tuple[int, int]] = field(default_factory=dict)
    step: int = 0


class Ledger(Generic[T]):
    """Puts the packs of each micro-batch back into step order and checks every row against its slot.

    Streams overtake one another, so a pack may come early; it is held until its turn. A repeated step is
    dropped. A row that does not continue its slot exactly is an error, never applied: KV that misses a
    token would give fluent, wrong text.
    """

    def __init__(self, *, cells: int, micro_batches: int, early: int = 16) -> None:
        """`early` bounds the packs held for a micro-batch."""
        self._cells = cells
        self._early_limit = early
        self._slots = [_Slots() for _ in range(micro_batches)]
        self._early: list[dict[int, tuple[PackHeader, T]]] = [{} for _ in range(micro_batches)]

    @property
    def held(self) -> int:
        """Packs that came early and wait for their turn."""
        return sum(len(early) for early in self._early)

    def admit(self, pack: PackHeader, load: T) -> list[tuple[PackHeader, T]]:
        """The packs, with what came along with them, that are to be computed now, in order.

        Empty for a repeat and for one that is held. Raises: RemoteProtocolError naming micro-batch,
        step and row for a pack that contradicts what is stored; nothing is changed then.
        """
        if pack.micro_batch >= len(self._slots):
            raise RemoteProtocolError(f"there is no micro-batch {pack.micro_batch} in this plan")
        slots, early = self._slots[pack.micro_batch], self._early[pack.micro_batch]
        if pack.step <= slots.step or pack.step in early:
            return []
        if pack.step > slots.step + self._early_limit:
            raise RemoteProtocolError(
                f"micro-batch {pack.micro_batch}: step {pack.step} came while waiting for {slots.step + 1}"
            )
        early[pack.step] = (pack, load)
        due = []
        while (following := early.pop(slots.step + 1, None)) is not None:
            self._apply(following[0], slots)
            due.append(following)
        return due

    def _apply(self, pack: PackHeader, slots: _Slots) -> None:
        where = pack.slot_range
        if where.stop > self._cells:
            raise RemoteProtocolError(f"{_name(pack)}: {where} ends behind the arena's {self._cells} cells")
        filled = slots.filled if where == slots.range else {}
        updates: dict[int, tuple[int, int]] = {}
        for row in pack.rows:
            generation, length = filled.get(row.slot, (0, 0))
            if row.generation > generation:
                length = 0
            if row.slot >= where.slots or row.slot in updates:
                raise RemoteProtocolError(f"{_name(pack)}: slot {row.slot} is not in {where}, or twice")
            if row.generation < generation or row.first != length:
                raise RemoteProtocolError(
                    f"{_name(pack)}: slot {row.slot} holds {length} tokens of generation {generation}, "
                    f"the row begins at {row.first} of generation {row.generation}"
                )
            if row.first + row.count > where.capacity:
                raise RemoteProtocolError(
                    f"{_name(pack)}: slot {row.slot} would hold {row.first + row.count} of {where.capacity}"
                )
            updates[row.slot] = (row.generation, row.first + row.count)
        if where != slots.range:
            self._vacate(where)
            slots.range, slots.filled = where, {}
        slots.filled.update(updates)
        slots.step = pack.step

    def _vacate(self, where: SlotRange) -> None:
        """Forget what other micro-batches stored in cells that now belong to this range."""
        for other in self._slots:
            if other.range is not None and other.range.overlaps(where):
                other.range, other.filled = None, {}


def _name(pack: PackHeader) -> str:
    return f"micro-batch {pack.micro_batch} step {pack.step}"
