"""Bars of letters: how a time is split, legible without colour. Pure text."""

from __future__ import annotations

from collections.abc import Sequence

from bbquic.runtime.accounting import Loop, is_known
from bbquic.runtime.timing import Parts

COMPUTE, QUEUE, FLIGHT, SEND = "C", ".", "~", "s"
# letter, part of `Parts`, in the order in which a pack meets them; waits are shown where most of them are
_STAGE = (
    ("r", "from_wire"),
    ("d", "decode"),
    ("i", "to_device"),
    (QUEUE, "queue"),
    (COMPUTE, "compute"),
    ("o", "to_host"),
    ("e", "encode"),
)
LEGEND = "r receive  d decode  i to device  . queue  C compute  o to host  e encode  s to wire  ~ flight"


def bar(parts: Sequence[tuple[str, float]], width: int) -> str:
    """`width` letters, each part's share of them in proportion; the nearest whole numbers that add up.

    Nothing (all parts 0 or less) is spaces.
    """
    total = sum(max(0.0, value) for _, value in parts)
    if total <= 0 or width <= 0:
        return " " * max(0, width)
    exact = [max(0.0, value) / total * width for _, value in parts]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: width - sum(counts)]:
        counts[place] += 1
    return "".join(letter * count for (letter, _), count in zip(parts, counts, strict=True))


def stage_parts(parts: Parts) -> list[tuple[str, float]]:
    """A stage's part of a step, by letter."""
    return [(letter, getattr(parts, name)) for letter, name in _STAGE]


def loop_parts(loop: Loop) -> list[tuple[str, float]]:
    """A whole step, in the order in which it happens."""
    parts: list[tuple[str, float]] = []
    for place, hop in enumerate(loop.hops):
        parts += [(SEND, hop.to_wire), (FLIGHT, hop.flight if is_known(hop) else 0.0)]
        if place < len(loop.stages):
            parts += stage_parts(loop.stages[place])
    return parts
