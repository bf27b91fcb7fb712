"""How many packs are to be on their way: enough to fill the pipe, no more. Pure."""

from __future__ import annotations

import math

from bbquic.units import Seconds


def packs_in_flight(cycle: Seconds | None, loop: Seconds | None, *, micro_batches: int, depth: int) -> int:
    """Little's law: a loop of `loop` seconds, out of which comes a pack every `cycle`, holds loop / cycle.

    `loop` is without queueing, `cycle` that of the slowest resource. One more keeps that one busy while
    tokens are taken and the next pack is made. Each pack above is only in a queue before the slowest
    resource, where the next decode rows wait behind it. Between one and `depth` for each micro-batch; one
    while nothing is measured.
    """
    if not cycle or not loop:
        return micro_batches
    return min(max(math.ceil(loop / cycle) + 1, micro_batches), micro_batches * depth)
