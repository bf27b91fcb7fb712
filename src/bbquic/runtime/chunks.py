"""How many prompt tokens may ride in a pack so that decode rows are not starved. Pure."""

from __future__ import annotations

from bbquic.runtime.costs import StepCosts
from bbquic.units import Seconds

LEAST = 64  # tokens; below, what a pack costs by itself is paid for too few of them
STRETCH = 4.0  # times as long a step may take for the prompts that ride in it: a job wants its slots full


def chunk_size(costs: StepCosts, *, own: int, decoding: int, micro_batches: int, most: int) -> int:
    """Prompt tokens beside `own` decode rows, where micro-batches that decode have `decoding` rows at most.

    A pack keeps the slowest resource for cycle(T). Decode rows hardly notice up to loop / M: M such packs
    go by in the time that their own loop takes anyway. Where the pipeline is fuller than that, it may be
    STRETCH times what decode rows take alone. `most` while nobody decodes or nothing is measured.
    """
    rows = own or decoding
    cycle, loop = costs.cycle(rows), costs.loop(rows)
    if not rows or cycle is None or loop is None:
        return most
    limit = Seconds(max(STRETCH * cycle, loop / micro_batches))
    fitting = costs.tokens_within(limit) - own
    return int(min(max(fitting, LEAST), most))
