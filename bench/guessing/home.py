"""The coordinator of jobs on real nodes: `python -m bench.guessing.home`, on a host of bench.wan.

Reads `{"folder": with peers.toml and keys, "host": address, "nodes": names}` and prints `{"open": true}`;
then a `Work` as JSON each time, runs it as `bbquic generate` would, and prints what `Told` says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bbquic.config import load_peers
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import manifest_of
from bbquic.model.registry import user_cache
from bbquic.model.sampling import Sampling
from bbquic.runtime.clocks import ClockEstimate
from bbquic.runtime.coordinator import Coordinator
from bbquic.runtime.drafters import DraftMode, DraftOptions, make_drafter
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.generate import Deployment, RunModel, RunOptions, deployed
from bbquic.runtime.hop import CodecMode
from bbquic.runtime.layout import LayoutOptions
from bbquic.runtime.memory import host_memory_free
from bbquic.runtime.observer import Passage
from bbquic.runtime.request import Completion, Outcome, Request
from bbquic.runtime.scheduler import SchedulerOptions
from bbquic.runtime.speculating import scheduler_of
from bbquic.runtime.timing import StageTiming
from bbquic.transport.channel import Endpoint, Role
from bbquic.transport.identity import Peer, load_identity
from bbquic.transport.threaded import open_endpoint
from bbquic.transport.turns import take_short_turns

MODEL = "smollm2-135m"
COMMAND = "command"
Mode = Literal["off", "auto", "always"]


class Work(msgspec.Struct, frozen=True):
    """A job, greedy and in float32: prompts in tokens, and how their answers are made."""

    prompts: tuple[tuple[int, ...], ...]
    answer: int  # tokens at most
    batch: int
    mode: Mode  # auto: by n-grams where it pays
    guesses: int = 8
    micro_batches: int | None = None  # None: as many as pay
    ends: bool = True  # whether end tokens end an answer
    codec: CodecMode = CodecMode.AUTO


class Line(msgspec.Struct, frozen=True):
    """An answer; seconds from the job's start to its first token and to its last."""

    tokens: tuple[int, ...]
    began: float
    ended: float


class Pass(msgspec.Struct, frozen=True):
    """A pack that came around: seconds from the job's start, rows, their tokens, and those committed."""

    sent: float
    came: float
    rows: int
    tokens: int
    committed: int
    reads: bool  # whether a prompt's first token came of it
    timings: tuple[StageTiming, ...]


class Told(msgspec.Struct, frozen=True):
    """What became of a job: lines in the prompts' order."""

    seconds: float
    lines: tuple[Line, ...]
    passes: tuple[Pass, ...]
    drafts: Drafts
    decisions: tuple[str, ...]

    @property
    def rate(self) -> float:
        """Tokens a second of the whole job."""
        return sum(len(line.tokens) for line in self.lines) / self.seconds


class Begun:
    """A text that nobody reads: it notes when its first token came."""

    def __init__(self) -> None:
        self.at: float | None = None

    def push(self, token: int) -> str:
        self.at = time.monotonic() if self.at is None else self.at
        return ""

    def finish(self) -> str:
        return ""


class Log:
    """Lines and passes as they come. A recorder, a sink, and what makes texts in the prompts' order."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.passes: list[Pass] = []
        self._texts: list[Begun] = []
        self._lines: dict[int, Line] = {}

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(self._lines[number] for number in sorted(self._lines))

    def text(self) -> Begun:
        self._texts.append(Begun())
        return self._texts[-1]

    async def keep(self, outcomes: Sequence[Outcome]) -> None:
        now = time.monotonic()
        for one in outcomes:
            assert isinstance(one, Completion), one
            began = self._texts[one.line - 1].at or now
            self._lines[one.line] = Line(one.tokens, began - self.start, now - self.start)

    def record(self, passage: Passage, clocks: Sequence[ClockEstimate | None]) -> None:
        launch = passage.launch
        self.passes.append(
            Pass(
                launch.at - self.start,
                passage.came - self.start,
                launch.rows,
                launch.tokens,
                passage.answers,
                bool(launch.first_tokens),
                passage.timings,
            )
        )


async def run(endpoint: Endpoint, nodes: Sequence[Peer], model: RunModel, work: Work) -> Told:
    """One job, from plan to release; only what is between is timed."""
    mode = DraftMode.OFF if work.mode == "off" else DraftMode.NGRAM
    options = RunOptions(
        layout=LayoutOptions(
            batch=work.batch, micro_batches=work.micro_batches, dtype="float32", codec=work.codec
        ),
        drafting=DraftOptions(mode, guesses=work.guesses, always=work.mode == "always"),
    )
    async with deployed(endpoint, nodes, model, options, lambda _: None) as ready:
        return await _timed(ready, model, work, options)


async def _timed(ready: Deployment, model: RunModel, work: Work, options: RunOptions) -> Told:
    plan, drafting = ready.plan, options.drafting
    scheduling = SchedulerOptions(
        micro_batches=plan.micro_batches,
        slots=work.batch,
        tiers=plan.tiers,
        depth=plan.depth,
        start=ready.layout.start(len(plan.stages)),
        most_guesses=drafting.most_guesses,
        always_guesses=drafting.always,
    )
    drafter = make_drafter(drafting, model.directory, free=host_memory_free())
    log, ends = Log(), model.directory.eos if work.ends else frozenset[int]()
    scheduler = scheduler_of(scheduling, drafter)
    loop = Coordinator(ready.links, plan, scheduler, ends=ends, text=log.text, recorder=log)

    async def requests() -> AsyncIterator[Request]:
        for number, tokens in enumerate(work.prompts, 1):
            yield Request(number, tokens, work.answer, Sampling())

    log.start = time.monotonic()
    await loop.run(requests(), log.keep)
    seconds = time.monotonic() - log.start
    assert len(log.lines) == len(work.prompts)
    return Told(seconds, log.lines, tuple(log.passes), scheduler.drafts, tuple(scheduler.decisions()))


async def serve(setup: dict[str, Any]) -> None:
    folder = Path(setup["folder"])
    peers = load_peers(folder / "peers.toml")
    identity = load_identity(folder / f"{COMMAND}.key")
    directory = fetch_model(MODEL, user_cache(), lambda line: print(line, file=sys.stderr))
    model = RunModel(directory, manifest_of(directory))
    endpoint = await open_endpoint(identity, peers, Role.COMMAND, host=setup["host"])
    print(json.dumps({"open": True}), flush=True)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            told = await run(
                endpoint,
                [peers[name] for name in setup["nodes"]],
                model,
                msgspec.json.decode(line, type=Work),
            )
            print(msgspec.json.encode(told).decode(), flush=True)
    finally:
        await endpoint.close()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    take_short_turns()
    asyncio.run(serve(json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
