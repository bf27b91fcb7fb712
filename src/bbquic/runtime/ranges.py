"""Which records share a micro-batch, and how long its slots are: length classes over the look-ahead."""

from __future__ import annotations

from collections.abc import Sequence as Items

from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange


def aligned(cells: int) -> int:
    """`cells`, up to the next multiple of CELL_ALIGNMENT."""
    return -(-cells // CELL_ALIGNMENT) * CELL_ALIGNMENT


def equal_shares(cells: int, micro_batches: int) -> tuple[tuple[int, int], ...]:
    """The arena in equal parts, each (offset, cells), aligned; what does not divide stays unused."""
    part = cells // micro_batches // CELL_ALIGNMENT * CELL_ALIGNMENT
    return tuple((index * part, part) for index in range(micro_batches))


def cut_range(offset: int, share: int, slots: int, needs: Items[int]) -> SlotRange | None:
    """The range for a micro-batch that is about to serve records with these needs, oldest first.

    The first record always fits; beside it, records of like length, as many as `slots` and the share
    (cells) hold: a class is as long as its longest member. Where the share allows, slots are longer, up to
    the longest record that waits, but no longer: what lies close together is read faster.
    None when the first record alone is larger than the share.
    """
    if not needs or aligned(needs[0]) > share:
        return None
    like = sorted(needs[1:], key=lambda need: abs(need - needs[0]))
    longest, count = needs[0], 1
    for need in like[: slots - 1]:
        if aligned(max(longest, need)) * (count + 1) > share:
            break
        longest, count = max(longest, need), count + 1
    # slots that no waiting record fills yet are for those to come, where the class leaves room
    count = max(count, min(slots, share // aligned(longest)))
    room = share // count // CELL_ALIGNMENT * CELL_ALIGNMENT
    return SlotRange.of(offset, count, min(room, aligned(max(needs))))
