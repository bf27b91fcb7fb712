"""Where a row's tokens go in a slot that has holes or drafts, and what is moved for it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from bbquic.kv.ranges import SlotRange
from bbquic.kv.regions import Regions, SlotCompaction
from bbquic.kv.rows import Layout
from bbquic.runtime.protocol import Row


class CompactionPolicy(enum.Enum):
    """When holes are closed. Tokens are the same whenever it is; it only takes time and cells."""

    EAGER = "beside the row that says which drafts were accepted"
    LAZY = "only where a row finds no room otherwise"


@dataclass(frozen=True, slots=True)
class Placement:
    """How a pack's rows lie: the layouts of those that are not plain, by their index in the pack, and what is
    to be moved in each block once the pack's attention has read it."""

    layouts: Mapping[int, Layout] = field(default_factory=dict)
    compactions: tuple[SlotCompaction, ...] = ()


PLAIN = Placement()  # nearly every pack's


@dataclass(frozen=True, slots=True)
class Placed:
    """One row of it, and what its slot is then."""

    regions: Regions | None  # None: plain, up to the row's last token
    layout: Layout | None
    before: SlotCompaction | None  # to be made before the pack is computed, for there is no room otherwise
    after: SlotCompaction | None


def place(regions: Regions, row: Row, where: SlotRange, policy: CompactionPolicy) -> Placed:
    """Decide a slot's drafts by what the row accepts, and give its tokens their cells.

    Raises: ValueError saying how the row does not continue what the slot holds.
    """
    regions = _decided(regions, row)
    if row.first != regions.length:
        raise ValueError(f"holds {regions.length} tokens then, the row begins at {row.first}")
    if row.first + row.count > where.capacity:
        raise ValueError(f"would hold {row.first + row.count} of {where.capacity}")
    before = after = None
    start = regions.place(row.count, where.capacity)
    if start is None:
        regions, before = _closed(regions, row.slot, where)
        start = regions.length
    if row.tree is None:
        state = regions.appended(start, row.count)
        layout = None if regions.is_plain else regions.layout(start, None)
    else:
        state = regions.drafted(start, row.tree.nodes, row.tree.parents)
        assert state.drafts is not None
        layout = regions.layout(start, state.drafts.indices)
    if policy is CompactionPolicy.EAGER and state.tail:
        state, after = _closed(state, row.slot, where)
    return Placed(None if state.is_plain else state, layout, before, after)


def _decided(regions: Regions, row: Row) -> Regions:
    if regions.drafts is None and row.accepted is None:
        return regions
    if row.accepted is None:
        raise ValueError("holds a tree, and the row does not say what of it was accepted")
    return regions.accepted(row.accepted)


def _closed(regions: Regions, slot: int, where: SlotRange) -> tuple[Regions, SlotCompaction]:
    state, sources, target = regions.compacted()
    return state, SlotCompaction(where, slot, sources, target)
