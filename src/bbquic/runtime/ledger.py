"""What a stage knows of the slots it holds: which pack may be applied now, later, or never. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bbquic.errors import RemoteProtocolError
from bbquic.kv.ranges import SlotCopy, SlotRange, Tiers, share_cells
from bbquic.kv.regions import Moving, Regions, SlotCompaction
from bbquic.kv.rows import Layout
from bbquic.runtime.placement import PLAIN, CompactionPolicy, Placement, place
from bbquic.runtime.protocol import Move, PackHeader, Row

T = TypeVar("T")

Held = tuple[int, int, Regions | None]  # of a slot: its generation, its tokens, and its regions unless plain
NOTHING: Held = (0, 0, None)


@dataclass(frozen=True, slots=True)
class Due(Generic[T]):
    """A pack to be computed now, what came along with it, what KV is to be copied or moved first, in order,
    and how its rows lie."""

    pack: PackHeader
    load: T
    copies: tuple[Moving, ...] = ()
    placement: Placement = PLAIN


@dataclass(slots=True)
class _Slots:
    """One micro-batch: its range, what each slot holds, the last step applied.

    A range may grow or be cut at its end: what its slots hold stays. Each of them is known here until
    another slot takes its cells, even behind the end, where a move may be about to fetch it.
    """

    range: SlotRange | None = None
    filled: dict[int, Held] = field(default_factory=dict)
    step: int = 0


class Ledger(Generic[T]):
    """Puts the packs of each micro-batch back into step order and checks every row against its slot.

    Streams overtake one another, so a pack may come early; it is held until its turn. A repeated step is
    dropped. A row that does not continue its slot exactly is an error, never applied: KV that misses a
    token would give fluent, wrong text.
    """

    def __init__(
        self,
        *,
        tiers: tuple[int, ...],
        micro_batches: int,
        depth: int,
        policy: CompactionPolicy = CompactionPolicy.EAGER,
    ) -> None:
        """`depth`: packs of a micro-batch on their way at most, hence the most that can come early."""
        self.policy = policy
        self._tiers = Tiers(tiers)
        self._depth = depth
        self._slots = [_Slots() for _ in range(micro_batches)]
        self._early: list[dict[int, tuple[PackHeader, T]]] = [{} for _ in range(micro_batches)]

    @property
    def held(self) -> int:
        """Packs that came early and wait for their turn."""
        return sum(len(early) for early in self._early)

    def admit(self, pack: PackHeader, load: T) -> list[Due[T]]:
        """The packs that are to be computed now, in order.

        Empty for a repeat and for one that is held. Raises: RemoteProtocolError naming micro-batch,
        step and row for a pack that contradicts what is stored; nothing is changed then.
        """
        if any(
            index >= len(self._slots) for index in (pack.micro_batch, *(m.micro_batch for m in pack.moves))
        ):
            raise RemoteProtocolError(f"{_name(pack)}: there is no such micro-batch in this plan")
        if any(move.micro_batch == pack.micro_batch and move.step >= pack.step for move in pack.moves):
            raise RemoteProtocolError(f"{_name(pack)}: it waits for itself")
        slots, early = self._slots[pack.micro_batch], self._early[pack.micro_batch]
        if pack.step <= slots.step or pack.step in early:
            return []
        if pack.step > slots.step + self._depth:
            raise RemoteProtocolError(
                f"micro-batch {pack.micro_batch}: step {pack.step} came while waiting for {slots.step + 1}"
            )
        early[pack.step] = (pack, load)
        return self._all_due()

    def _all_due(self) -> list[Due[T]]:
        """Apply what can be applied. A step of one micro-batch can set free a move that waits in another."""
        due: list[Due[T]] = []
        while (index := self._ready()) is not None:
            slots = self._slots[index]
            pack, load = self._early[index].pop(slots.step + 1)
            due.append(Due(pack, load, *self._apply(pack, slots)))
        return due

    def _ready(self) -> int | None:
        """A micro-batch whose next step is here, and for whose moves it is not too early."""
        for index, early in enumerate(self._early):
            held = early.get(self._slots[index].step + 1) if early else None
            if held and all(self._slots[move.micro_batch].step >= move.step for move in held[0].moves):
                return index
        return None

    def _apply(self, pack: PackHeader, slots: _Slots) -> tuple[tuple[Moving, ...], Placement]:
        where = pack.slot_range
        if not self._tiers.hold(where):
            raise RemoteProtocolError(f"{_name(pack)}: {where} is not within the arena's {self._tiers}")
        is_same = slots.range is not None and where.continues(slots.range)
        filled = dict(slots.filled) if is_same else {}
        copies = self._moved(pack, where, filled)
        compactions, placement = self._rows(pack, where, filled)
        new = {move.target for move in pack.moves} | {row.slot for row in pack.rows if row.first == 0}
        self._vacate(slots, [where.cells(slot) for slot in new])
        slots.range, slots.filled, slots.step = where, filled, pack.step
        for move in pack.moves:
            source = self._slots[move.micro_batch].filled
            if move.slot in source and not move.keeps:  # it is not where the target is in its place
                source[move.slot] = (move.generation, 0, None)
        return (*copies, *compactions), placement

    def _rows(
        self, pack: PackHeader, where: SlotRange, filled: dict[int, Held]
    ) -> tuple[list[SlotCompaction], Placement]:
        """Check the pack's rows against `filled`, which has them then. Gives what makes room, and layouts."""
        rest: list[tuple[int, Row, Regions]] = []  # rows of slots that are not plain, or will not be
        seen: set[int] = set()
        for index, row in enumerate(pack.rows):
            generation, length, regions = filled.get(row.slot, NOTHING)
            if row.generation > generation:
                length, regions = 0, None
            if row.slot not in where or row.slot in seen:
                raise RemoteProtocolError(f"{_name(pack)}: slot {row.slot} is not in {where}, or twice")
            seen.add(row.slot)
            is_plain = regions is None and row.tree is None and row.accepted is None
            if row.generation < generation or (is_plain and row.first != length):
                raise RemoteProtocolError(
                    f"{_name(pack)}: slot {row.slot} holds {length} tokens of generation {generation}, "
                    f"the row begins at {row.first} of generation {row.generation}"
                )
            if row.first + row.count > where.capacity:
                raise RemoteProtocolError(
                    f"{_name(pack)}: slot {row.slot} would hold {row.first + row.count} of {where.capacity}"
                )
            if is_plain:
                filled[row.slot] = (row.generation, row.first + row.count, None)
            else:
                rest.append((index, row, regions or Regions(length)))
        return self._placed(pack, where, filled, rest) if rest else ([], PLAIN)

    def _placed(
        self,
        pack: PackHeader,
        where: SlotRange,
        filled: dict[int, Held],
        rows: list[tuple[int, Row, Regions]],
    ) -> tuple[list[SlotCompaction], Placement]:
        layouts: dict[int, Layout] = {}
        before: list[SlotCompaction] = []
        after: list[SlotCompaction] = []
        for index, row, regions in rows:
            try:
                placed = place(regions, row, where, self.policy)
            except ValueError as error:
                raise RemoteProtocolError(f"{_name(pack)}: slot {row.slot} {error}") from error
            length = row.first + row.count if placed.regions is None else placed.regions.length
            filled[row.slot] = (row.generation, length, placed.regions)
            if placed.layout is not None:
                layouts[index] = placed.layout
            before += [placed.before] if placed.before is not None else []
            after += [placed.after] if placed.after is not None else []
        return before, Placement(layouts, tuple(after))

    def _moved(self, pack: PackHeader, where: SlotRange, filled: dict[int, Held]) -> list[Moving]:
        """The pack's moves, checked against both slots, as copies; `filled` has them then.

        One between two names of the same cells needs no copy: that is how ranges are joined and parted, and
        how a slot's next generation keeps what it begins with. What a slot holds of drafts goes with it where
        it is emptied, though a move counts tokens only; holes are closed before.
        """
        copies: list[Moving] = []
        read = Counter((move.micro_batch, move.slot) for move in pack.moves)
        emptied = any(read[move.micro_batch, move.slot] > 1 for move in pack.moves if not move.keeps)
        if emptied or len({move.target for move in pack.moves}) < len(pack.moves):
            raise RemoteProtocolError(f"{_name(pack)}: it moves a slot twice")
        for move in pack.moves:
            if move.target not in where or move.count > where.capacity:
                raise RemoteProtocolError(f"{_name(pack)}: {move} does not fit {where}")
        written = sorted(where.cells(move.target).start for move in pack.moves)
        for move in pack.moves:
            source = self._source(pack, move, where, written)
            generation, *_ = filled.get(move.target, NOTHING)
            if move.target_generation <= generation:
                raise RemoteProtocolError(
                    f"{_name(pack)}: {move} goes to slot {move.target}, which is of generation {generation}"
                )
            regions = None if move.keeps else self._slots[move.micro_batch].filled[move.slot][2]
            if source.cells(move.slot) != where.cells(move.target):
                if regions is not None:
                    regions, cells, target = regions.squeezed()
                    copies += [SlotCompaction(source, move.slot, cells, target)] if cells else []
                count = move.count if regions is None else regions.end
                if count > where.capacity:
                    raise RemoteProtocolError(f"{_name(pack)}: {move} and its tree do not fit {where}")
                copies.append(SlotCopy(source, move.slot, where, move.target, count))
            filled[move.target] = (move.target_generation, move.count, regions)
        return copies

    def _source(self, pack: PackHeader, move: Move, where: SlotRange, written: list[int]) -> SlotRange:
        """The range that a move takes from, once it is sure that the slot holds what the move says and that
        none of the pack's moves writes there; `written` are the targets' first cells, rising."""
        slots = self._slots[move.micro_batch]
        is_own = move.micro_batch == pack.micro_batch
        if slots.range is None or (is_own and not (move.keeps and where.continues(slots.range))):
            raise RemoteProtocolError(f"{_name(pack)}: {move} is not from another range of the arena")
        generation, length, regions = slots.filled.get(move.slot, NOTHING)
        if move.keeps and regions is not None:
            length = regions.compact  # what is behind lies out of place, or is a draft
        if generation != move.generation or not (
            length >= move.count if move.keeps else length == move.count
        ):
            raise RemoteProtocolError(
                f"{_name(pack)}: {move} takes from slot {move.slot}, "
                f"which holds {length} tokens of generation {generation}"
            )
        # a slot that is held was within the arena when its range had it, though the range may end before now
        source = slots.range.holding(move.slot)
        cells, target = source.cells(move.slot), where.cells(move.target)
        first, stop = (bisect_left(written, cell) for cell in (cells.start - len(target) + 1, cells.stop))
        stays = cells == target and (not move.keeps or is_own)
        if written[first:stop] != ([target.start] if stays else []):
            raise RemoteProtocolError(f"{_name(pack)}: {move} is from cells that the pack's moves write to")
        return source

    def _vacate(self, slots: _Slots, taken: list[range]) -> None:
        """Forget what other micro-batches stored in cells that now belong to a slot of this one."""
        if not taken:
            return
        for other in self._slots:
            if other is slots or other.range is None:
                continue
            where = other.range
            for slot in [one for one in other.filled if any(share_cells(where.cells(one), t) for t in taken)]:
                del other.filled[slot]


def _name(pack: PackHeader) -> str:
    return f"micro-batch {pack.micro_batch} step {pack.step}"
