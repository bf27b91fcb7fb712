"""A cluster in one process: real nodes, coordinator and files; the network is memory or QUIC on loopback."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bbquic.draft.drafter import AlwaysGuesses, Drafter
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import manifest_of
from bbquic.model.sampling import Sampling
from bbquic.model.tokenizer import StreamDecoder
from bbquic.runtime.cluster import ClusterDeadlines
from bbquic.runtime.coordinator import Coordinator, CoordinatorOptions
from bbquic.runtime.generate import RunModel, RunOptions, deployed, generate
from bbquic.runtime.job import JobFile
from bbquic.runtime.layout import LayoutOptions
from bbquic.runtime.loading import DiskLoader, ModelStore
from bbquic.runtime.machine import Machine
from bbquic.runtime.measure import Profiler
from bbquic.runtime.node import Node
from bbquic.runtime.pace import Pace
from bbquic.runtime.profile_cache import ProfileCache
from bbquic.runtime.request import Completion, Outcome, Request
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from bbquic.runtime.survey import SurveyOptions
from bbquic.runtime.telemetry import JobStatistics
from bbquic.transport.channel import Endpoint, Role
from bbquic.transport.identity import Identity, Peer, make_identity
from bbquic.transport.memory import MemoryNetwork
from bbquic.transport.threaded import open_endpoint
from bbquic.units import Seconds

DEADLINE = 120.0  # seconds; a test that waits for what never comes fails, in place of hanging
CPU = Machine(torch.device("cpu"), threads=1)
COMMAND = "command"
PROMPTS = [{"prompt": f"the of {n}", "max_tokens": 24} for n in range(6)]
QUICK = SurveyOptions(profile=Seconds(60), look=Seconds(60), probe=Seconds(60), ask=Seconds(0.01))


@dataclass
class Cluster:
    """Nodes that are up. `endpoints` has theirs and, under the names of the commands, ours."""

    peers: dict[str, Peer]
    identities: dict[str, Identity]
    endpoints: dict[str, Endpoint]
    names: tuple[str, ...]
    nodes: dict[str, Node] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def command(self) -> Endpoint:
        return self.endpoints[COMMAND]

    def places(self, names: Sequence[str] | None = None) -> list[Peer]:
        return [self.peers[name] for name in names or self.names]


@asynccontextmanager
async def cluster_of(
    models: Sequence[Path],
    *,
    quic: bool = False,
    order: random.Random | None = None,
    commands: dict[str, frozenset[str]] | None = None,
    profiles: Path | None = None,
) -> AsyncIterator[Cluster]:
    """A node for each of `models`, node-1 and on, that serves the model in it under the name `tiny`.

    All keep what they measure of themselves in the folder `profiles`.
    """
    names = tuple(f"node-{number + 1}" for number in range(len(models)))
    commands = commands or {COMMAND: frozenset({"coordinate"})}
    identities = {name: make_identity(name) for name in (*names, *commands)}
    peers = {
        name: Peer(name, ("memory", place + 1), (identities[name].fingerprint,))
        for place, name in enumerate(names)
    }
    for name, may in commands.items():
        peers[name] = Peer(name, None, (identities[name].fingerprint,), may)
    network = MemoryNetwork(order)
    endpoints: dict[str, Endpoint] = {}
    for name in (*names, *commands):
        role = Role.NODE if name in names else Role.COMMAND
        if quic:
            endpoint: Endpoint = await open_endpoint(identities[name], peers, role, host="127.0.0.1")
            if name in names:
                peers[name] = Peer(name, endpoint.address, peers[name].keys)
        else:
            endpoint = network.endpoint(identities[name], peers, role)
        endpoints[name] = endpoint
    cluster = Cluster(peers, identities, endpoints, names)
    try:
        for name, model in zip(names, models, strict=True):
            loader = DiskLoader(ModelStore({"tiny": model}, model / "no-cache"), CPU, name)
            profiler = Profiler(CPU, ProfileCache(profiles), budget=Seconds(0.5))
            node = Node(endpoints[name], peers[name], peers, loader, CPU, profiler)
            cluster.nodes[name] = node
            cluster.tasks[name] = asyncio.create_task(node.serve())
        yield cluster
    finally:
        for task in cluster.tasks.values():
            task.cancel()
        await asyncio.gather(*cluster.tasks.values(), return_exceptions=True)
        for endpoint in endpoints.values():
            await endpoint.close()


def run_model(path: Path) -> RunModel:
    directory = ModelDirectory(path, "tiny")
    return RunModel(directory, manifest_of(directory))


def options(**layout: Any) -> RunOptions:
    """Small and quick: packs of few prompt tokens, so that prompts are read in chunks."""
    prefill = layout.pop("prefill_tokens", 24)
    return RunOptions(
        layout=LayoutOptions(**{"batch": 8, "kv_tokens": 4096} | layout),
        prefill_tokens=prefill,
        coordinator=CoordinatorOptions(heartbeat=Seconds(0.05), slow=Seconds(5), stall=Seconds(60)),
        deadlines=ClusterDeadlines(dial=Seconds(20), describe=Seconds(20), load=Seconds(60)),
    )


@asynccontextmanager
async def unwatched(source: Callable[[], JobStatistics]) -> AsyncIterator[None]:
    source()
    yield


async def answer(
    cluster: Cluster, model: Path, prompts: Path, output: Path, how: RunOptions, **more: Any
) -> JobStatistics:
    """A whole run, as `bbquic generate` does it."""
    return await generate(
        more.get("endpoint", cluster.command),
        cluster.places(more.get("nodes")),
        more.get("held") or run_model(model),
        JobFile(prompts),
        str(output),
        how,
        report=more.get("report", lambda _: None),
        watch=more.get("watch", unwatched),
    )


async def serve(
    cluster: Cluster,
    model: Path,
    records: Sequence[dict[str, Any]],
    how: RunOptions,
    *,
    pace: Callable[[SchedulerOptions], Pace] | None = None,
    start: int | None = None,
    shares_prefixes: bool = True,
    drafter: Drafter | None = None,
    guesses: int = 0,
    kept_guesses: int | None = None,
    sampling: Callable[[int], Sampling] | None = None,
    nodes: int | None = None,
    during: Callable[[Coordinator, Scheduler], Coroutine[Any, Any, None]] | None = None,
) -> tuple[dict[int, Completion], Scheduler]:
    """A run without files, which a test may look into, steer and disturb; completions by line.

    On the first `nodes` of the cluster, all where None; with as many `guesses` as a drafter is asked for.
    """
    held = run_model(model)
    tokenizer = held.directory.tokenizer
    outcomes: list[Outcome] = []

    async def requests() -> AsyncIterator[Request]:
        for line, record in enumerate(records, 1):
            chat = record.get("messages")
            tokens = tokenizer.encode_chat(chat) if chat else tokenizer.encode(record["prompt"])
            most, stop = record.get("max_tokens", 256), record.get("stop", ())
            yield Request(line, tuple(tokens), most, sampled(line), stop)

    async def keep(group: Sequence[Outcome]) -> None:
        outcomes.extend(group)

    def sampled(line: int) -> Sampling:
        return sampling(line) if sampling else Sampling()

    places = cluster.places(cluster.names[:nodes])
    async with deployed(cluster.command, places, held, how, lambda _: None) as ready:
        links, plan = ready.links, ready.plan
        options = SchedulerOptions(
            plan.micro_batches,
            how.layout.batch,
            plan.tiers,
            how.prefill_tokens,
            depth=plan.depth,
            start=start,
            shares_prefixes=shares_prefixes,
            most_guesses=guesses,
            kept_guesses=kept_guesses,
        )
        scheduler = Scheduler(options, pace(options) if pace else None, drafter, AlwaysGuesses(guesses))
        coordinator = Coordinator(
            links,
            plan,
            scheduler,
            ends=held.directory.eos,
            text=lambda: StreamDecoder(tokenizer),
            options=how.coordinator,
        )
        disturbing = asyncio.create_task(during(coordinator, scheduler)) if during else None
        await coordinator.run(requests(), keep)
        if disturbing is not None:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
    completions = {one.line: one for one in outcomes if isinstance(one, Completion)}
    assert len(completions) == len(outcomes) == len(records)
    return completions, scheduler


def run(main: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await main()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the run does by itself. It looks now and then: a loop that never idles would keep the
    interpreter's lock from the threads that compute, 5 ms for each operation of theirs."""
    while not condition():
        await asyncio.sleep(0.002)


def write_prompts(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_answers(path: Path) -> dict[int, dict[str, Any]]:
    """The answers by line. Fails on a line with two records."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    by_line = {record["line"]: record for record in records}
    assert len(by_line) == len(records)
    return by_line
