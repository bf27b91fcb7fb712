"""A process whose memory runs out in mid-job: `python starved.py MODEL`. Says in JSON what became of it.

Three jobs over the same lines: with all the memory there is, with room for a smaller chunk of the long line
than a pack has at first, and with room for none of its chunks. The limit on the address space is set while
lines are being answered, by what the process has then, so that it does not matter what libraries take.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_helpers import cluster_of, options, run_model

from bbquic.model.sampling import Sampling
from bbquic.runtime.generate import RunOptions, deployed, job_loop
from bbquic.runtime.layout import CoordinatorPlace
from bbquic.runtime.request import Completion, Outcome, Request

LONG = 1500  # tokens, a line of one chunk
SHORT = 12  # lines beside it
MLP = 32_768 * 4  # bytes that a token takes in the MLP, some times over
SMALLER, NONE = (
    10 * LONG // 4 * MLP,
    LONG // 8 * MLP,
)  # bytes beside what there is: for a fourth of it; for none
UNLIMITED = resource.RLIM_INFINITY


def limit(room: int | None) -> None:
    """Let the process have so much more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = UNLIMITED if room is None else pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (soft, UNLIMITED))


def is_limited() -> bool:
    """Whether the limit is kept here."""
    limit(NONE)
    try:
        torch.empty(2 * NONE, dtype=torch.uint8)
    except RuntimeError:
        return True
    finally:
        limit(None)
    return False


async def answered(model: Path, how: RunOptions, room: int | None) -> dict[str, Any]:
    """A job of which the long line is read once others are answered, with so much room from then on."""
    outcomes: list[Outcome] = []
    some = asyncio.Event()
    held = run_model(model)

    async def requests() -> AsyncIterator[Request]:
        for line in range(1, SHORT + 2):
            size = 5 + line
            if line == SHORT // 2:
                await some.wait()
                limit(room)
                size = LONG
            yield Request(line, tuple(3 + (line * place) % 300 for place in range(size)), 12, Sampling())

    async def keep(group: Sequence[Outcome]) -> None:
        outcomes.extend(group)
        some.set()

    async with cluster_of([model] * 2) as cluster:
        try:
            async with deployed(cluster.command, cluster.places(), held, how, lambda _: None) as ready:
                loop = job_loop(ready.links, ready.plan, held.directory, how)
                await loop.run(requests(), keep)
                decisions = loop.statistics().decisions
        finally:
            limit(None)
    return {
        "texts": {one.line: one.text for one in outcomes if isinstance(one, Completion)},
        "errors": {one.line: [one.code, one.message] for one in outcomes if not isinstance(one, Completion)},
        "decisions": [one for one in decisions if "memory" in one],
    }


async def main(model: Path) -> dict[str, Any]:
    layout = {"batch": 3, "kv_tokens": 4 * (LONG + 48), "prefill_tokens": LONG, "micro_batches": 1}
    here = RunOptions(**_fields(options(**layout)), look_ahead=2)
    there = RunOptions(**_fields(options(**layout, coordinator=CoordinatorPlace.STAGE)), look_ahead=2)
    return {
        "free": await answered(model, here, None),
        "smaller": await answered(model, here, SMALLER),
        "none": await answered(model, there, NONE),
    }


def _fields(how: RunOptions) -> dict[str, Any]:
    names = ("layout", "prefill_tokens", "coordinator", "deadlines")
    return {name: getattr(how, name) for name in names}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]))) if is_limited() else None))
