"""Splits that need no measurement: contiguous ranges in the order of the nodes, and the KV they leave."""

from __future__ import annotations

from collections.abc import Sequence

from bbquic.errors import ConfigError


def even_split(blocks: int, nodes: int) -> tuple[range, ...]:
    """Ranges that differ by at most one block; the first ones are the longer. Raises: ConfigError."""
    if not 1 <= nodes <= blocks:
        raise ConfigError(
            f"{blocks} blocks do not split over {nodes} nodes",
            hint="each node holds at least one block: use fewer nodes",
        )
    part, extra = divmod(blocks, nodes)
    return given_split([part + (index < extra) for index in range(nodes)], blocks=blocks, nodes=nodes)


def weighed_split(blocks: int, nodes: int, *, head: float) -> tuple[range, ...]:
    """Ranges whose largest weight is least, the head weighing as much as `head` blocks, on the last node.

    Of those, the ones that differ least; the first are the longer. Raises: ConfigError.
    """
    even = even_split(blocks, nodes)
    if nodes == 1 or head <= 0:
        return even

    def largest(last: int) -> float:
        return max(-(-(blocks - last) // (nodes - 1)), last + head)

    last = min(range(1, blocks - nodes + 2), key=lambda count: (largest(count), -count))
    before = even_split(blocks - last, nodes - 1)
    return given_split([*(len(one) for one in before), last], blocks=blocks, nodes=nodes)


def given_split(counts: Sequence[int], *, blocks: int, nodes: int) -> tuple[range, ...]:
    """Ranges of the lengths a user gave (`--split 10,10,10`). Raises: ConfigError where they do not fit."""
    if len(counts) != nodes or any(count < 1 for count in counts) or sum(counts) != blocks:
        raise ConfigError(
            f"the split {','.join(map(str, counts))} is not one of {blocks} blocks over {nodes} nodes",
            hint=f"give {nodes} numbers of at least 1 that add up to {blocks}",
        )
    starts = [sum(counts[:index]) for index in range(nodes)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def arena_cells(
    *, memory: Sequence[int], weights: Sequence[int], blocks: Sequence[int], cell: int, wanted: int
) -> int:
    """Tokens of KV that every stage can hold: the smallest stage decides, `wanted` is enough.

    Per stage: bytes of memory it may use, of its weights, and its count of blocks; `cell` is the bytes
    of one token in one block. 0 or less where a stage has no room beside its weights.
    """
    room = [(m - w) // (b * cell) for m, w, b in zip(memory, weights, blocks, strict=True)]
    return min(wanted, *room)
