"""The coordinator of replays: `python -m bench.stand_in.coordinator`, on a host of bench.wan.

Reads `{"keys": folder, "host": address, "nodes": hosts with nodes, "peers": {...}}` and prints
`{"open": true}`; then a `Cell` as JSON each time, runs it through the real scheduler and coordinator, and
prints the passes: `{"passes": [...]}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bbquic.draft.drafter import AlwaysGuesses
from bbquic.kv.ranges import CELL_ALIGNMENT
from bbquic.model.sampling import Sampling
from bbquic.runtime.cluster import ClusterDeadlines, StageLink, deploy, dialled, new_job_id, release
from bbquic.runtime.coordinator import Coordinator
from bbquic.runtime.pace import MeasuredPace
from bbquic.runtime.protocol import PlanHeader, Stage
from bbquic.runtime.ranges import aligned
from bbquic.runtime.request import Outcome, Request
from bbquic.runtime.scheduler import DEPTH, Scheduler, SchedulerOptions
from bbquic.runtime.speculating import MeasuredSpeculation
from bbquic.transport.channel import Endpoint, Role
from bbquic.transport.identity import Peer, load_identity
from bbquic.transport.threaded import open_endpoint
from bbquic.transport.turns import take_short_turns
from bbquic.units import Seconds
from bench.stand_in.cell import Cell
from bench.stand_in.guesses import PlayedDrafter
from bench.stand_in.observed import Log, ObservedChannel
from bench.stand_in.peers import COORDINATOR, node_on, read_peers

PROMPT = (1,)  # one token, so that the first pass is like those that follow
DEADLINES = ClusterDeadlines(load=Seconds(60.0))


class NoText:
    """Tokens of a stand-in are numbers; nobody reads them."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class KeptPace(MeasuredPace):
    """Leaves the number of micro-batches as it is. To a scheduler a cell is nothing but a job's tail, in
    which it would join them.
    """

    def micro_batches(self, rows: Sequence[int], most: int) -> int:
        return len(rows)


def scheduler_of(cell: Cell, plan: PlanHeader) -> Scheduler:
    """A cell's micro-batches stay as they are unless it is live."""
    options = SchedulerOptions(
        micro_batches=plan.micro_batches,
        start=None if cell.most is None else cell.micro_batches,
        slots=cell.batch,
        tiers=plan.tiers,
        prefill_tokens=cell.batch,
        look_ahead=cell.batch + 1,  # all are seated at once
        depth=plan.depth,
        most_guesses=cell.guesses,
    )
    if cell.most is not None:
        return Scheduler(options)
    pace = KeptPace(
        micro_batches=options.micro_batches, depth=options.depth, prefill_tokens=options.prefill_tokens
    )
    if not cell.guesses:
        return Scheduler(options, pace)
    if not cell.adapts:
        return Scheduler(options, pace, PlayedDrafter(), AlwaysGuesses(cell.guesses))
    speculation = MeasuredSpeculation(pace, PlayedDrafter(), cell.guesses)
    return Scheduler(options, pace, speculation.drafter, speculation)


def plans_of(cell: Cell, hosts: Sequence[str]) -> list[PlanHeader]:
    """Each stage's plan, the same but for what the stage pretends to be; an arena for all sequences.

    `hosts` have the nodes; a cell that names none of them takes the first.
    """
    stages, first = [], 0
    for host, blocks in zip(cell.hosts or hosts[: len(cell.blocks)], cell.blocks, strict=True):
        stages.append(Stage(node_on(host), first, first + blocks))
        first += blocks
    room = 3 * (cell.guesses + 1) if cell.guesses else 0  # for a tree and its holes
    need = aligned(len(PROMPT) + cell.tokens + room)
    most = cell.most or cell.micro_batches
    rows = -(-cell.batch // most)
    job = new_job_id()
    return [
        PlanHeader(
            job=job,
            epoch=0,
            model=stand_in.manifest().model,
            dtype=cell.dtype,
            stages=tuple(stages),
            tiers=((1 if cell.most is None else 2) * need * rows * most + CELL_ALIGNMENT,),
            micro_batches=most,
            depth=DEPTH,
            manifest=stand_in.manifest(),
            codec=cell.codec,
        )
        for stand_in in cell.stand_ins()
    ]


async def run(endpoint: Endpoint, peers: dict[str, Peer], hosts: Sequence[str], cell: Cell) -> Log:
    """One cell, from plan to release."""
    plans, log = plans_of(cell, hosts), Log()
    plan = plans[0]
    finished: list[Outcome] = []

    async def requests() -> AsyncIterator[Request]:
        for line in range(1, cell.batch + 1):
            yield Request(line, PROMPT, cell.tokens, Sampling())

    async def keep(outcomes: Sequence[Outcome]) -> None:
        finished.extend(outcomes)

    used = [peers[stage.node] for stage in plan.stages]
    async with dialled(endpoint, used, DEADLINES) as channels:
        links = [
            StageLink(stage, ObservedChannel(channel, log))
            for stage, channel in zip(plan.stages, channels, strict=True)
        ]
        failed = True
        try:
            await deploy(links, plans, DEADLINES, lambda _: None)
            scheduler = scheduler_of(cell, plan)
            coordinator = Coordinator(links, plan, scheduler, ends=frozenset(), text=NoText)
            with suppress(TimeoutError):  # a cell that is to end after some time is not done by then
                async with asyncio.timeout(cell.longest):
                    await coordinator.run(requests(), keep)
                    failed = False
        finally:
            await release(links, plan.job, cancel=failed, deadlines=DEADLINES)
    assert len(finished) == cell.batch or cell.longest is not None
    return log


async def serve(setup: dict[str, Any]) -> None:
    peers = read_peers(setup)
    identity = load_identity(Path(setup["keys"]) / f"{COORDINATOR}.key")
    endpoint = await open_endpoint(identity, peers, Role.COMMAND, host=setup["host"])
    print(json.dumps({"open": True}), flush=True)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            log = await run(endpoint, peers, setup["nodes"], msgspec.json.decode(line, type=Cell))
            print(msgspec.json.encode({"passes": log.done}).decode(), flush=True)
    finally:
        await endpoint.close()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    take_short_turns()
    asyncio.run(serve(json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
