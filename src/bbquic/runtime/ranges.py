"""Which records share a micro-batch, and how long its slots are: length classes over the look-ahead."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange, Strip, Tiers


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch's part of one tier: `cells` from cell `offset`. There may be none."""

    offset: int
    cells: int

    @property
    def stop(self) -> int:
        return self.offset + self.cells

    def parted(self, cells: int) -> tuple[Share, Share]:
        """Its first `cells`, and the rest."""
        return Share(self.offset, cells), Share(self.offset + cells, self.cells - cells)


Shares = tuple[Share, ...]  # of one micro-batch, by tier


def aligned(cells: int) -> int:
    """`cells`, up to the next multiple of CELL_ALIGNMENT."""
    return -(-cells // CELL_ALIGNMENT) * CELL_ALIGNMENT


def equal_shares(tiers: Tiers, micro_batches: int) -> tuple[Shares, ...]:
    """Every tier in equal parts, aligned, in the same order; what does not divide stays unused."""
    parts = [size // micro_batches // CELL_ALIGNMENT * CELL_ALIGNMENT for size in tiers.sizes]
    starts = [tiers.span(tier).start for tier in range(len(parts))]
    return tuple(
        tuple(Share(start + index * part, part) for start, part in zip(starts, parts, strict=True))
        for index in range(micro_batches)
    )


def most_slots(shares: Shares, capacity: int) -> int:
    """Slots of `capacity` that shares hold; none lies in two tiers."""
    return sum(share.cells // capacity for share in shares)


def longest_slot(shares: Shares) -> int:
    """The cells of the longest slot that shares allow."""
    return max((share.cells for share in shares), default=0)


def laid_out(shares: Shares, capacity: int, slots: int, least: Items[int] | None = None) -> SlotRange:
    """A range of `slots` in all tiers together, or of as many as fit; in each tier `least` or more.

    Tier after tier, the first with room: the last ones, in host memory, are used last.
    Raises: ValueError where there is room for no slot.
    """
    least = least or [0] * len(shares)
    spare = max(0, slots - sum(least))
    strips = []
    for share, present in zip(shares, least, strict=True):
        more = min(spare, share.cells // capacity - present)
        spare -= more
        strips.append(Strip(share.offset, present + more))
    return SlotRange(tuple(strips), capacity)


def cut_range(shares: Shares, slots: int, needs: Items[int]) -> SlotRange | None:
    """The range for a micro-batch that is about to serve records with these needs, oldest first.

    The first record always fits; beside it, records of like length, as many as `slots` and the shares
    hold: a class is as long as its longest member. Where the shares allow, slots are longer, up to
    the longest record that waits, but no longer: what lies close together is read faster.
    None when the first record alone is larger than each share.
    """
    if not needs or aligned(needs[0]) > longest_slot(shares):
        return None
    like = sorted(needs[1:], key=lambda need: abs(need - needs[0]))
    longest, count = needs[0], 1
    for need in like[: slots - 1]:
        if most_slots(shares, aligned(max(longest, need))) <= count:
            break
        longest, count = max(longest, need), count + 1
    # slots that no waiting record fills yet are for those to come, where the class leaves room
    count = max(count, min(slots, most_slots(shares, aligned(longest))))
    lengths = range(aligned(longest), aligned(max(needs)) + 1, CELL_ALIGNMENT)
    too_long = bisect_left(lengths, True, key=lambda length: most_slots(shares, length) < count)
    return laid_out(shares, lengths[too_long - 1], count)
