"""`bbquic generate`: a prompts file in, an answers file out."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from bbquic.cli.cluster import Joined, joined, opened
from bbquic.cli.render import make_view, print_note, print_summary, showing
from bbquic.cli.sizes import parse_split
from bbquic.errors import ConfigError
from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import manifest_of
from bbquic.model.registry import ModelMissing, resolve_model, user_cache
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cost import MemoryOptions
from bbquic.runtime.drafters import GUESSES, DraftMode, DraftOptions
from bbquic.runtime.generate import RunModel, RunOptions, resume_hint
from bbquic.runtime.generate import generate as run_generate
from bbquic.runtime.hop import CodecMode
from bbquic.runtime.job import JobFile
from bbquic.runtime.layout import CoordinatorPlace, LayoutOptions
from bbquic.runtime.local import LocalTurns, local_nodes
from bbquic.runtime.memory import host_memory_free
from bbquic.runtime.planning import PlanningOptions, ways_of
from bbquic.runtime.pruner_choice import PruneOptions
from bbquic.runtime.record import Defaults
from bbquic.runtime.scheduler import DEPTH
from bbquic.runtime.telemetry import JobStatistics
from bbquic.transport.turns import take_short_turns
from bbquic.units import Bytes

PARTIAL = 3  # exit code: every line has its record, but some of them are errors
INTERRUPTED = 130
DEFAULT_PEERS = Path("peers.toml")
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_BATCH = 32
LOCAL_NODES = 3
LOCAL_MEMORY_SHARE = 0.7  # of free memory, for all local nodes together

Snapshot = Callable[[], JobStatistics]


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Where the run's nodes are: theirs and ours in peers.toml, or processes started here."""

    peers: Path | None
    certs: Path
    key: Path | None
    nodes: tuple[str, ...]  # names from peers.toml in order; empty: all with an address
    local: int  # how many to start where there is no peers.toml
    turns: LocalTurns | None = None  # of those


def generate(
    prompts: Annotated[Path, typer.Argument(help="A JSON Lines file, one prompt a line.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="Answers file, - for standard output. Default: beside the prompts."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="A known model's name, or a directory.")] = DEFAULT_MODEL,
    peers: Annotated[
        Path | None,
        typer.Option(help="The cluster. Default: ./peers.toml; without one, local nodes are started."),
    ] = None,
    certs: Annotated[Path, typer.Option(help="Where this machine's key lies.")] = Path("certs"),
    key: Annotated[Path | None, typer.Option(help="Which key, where several here are pinned.")] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="Names from peers.toml in order, a,b,c; without a cluster, how many to start."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Blocks for each node, such as 10,10,10: nothing is planned. Default: the plan's; "
            "even by weight on nodes started here."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences in flight. Default: the plan's; 32 without one.")
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1, help="Default: the plan's; one for each stage without, and in all on nodes started here."
        ),
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(min=16, help="KV memory of each stage, in tokens.")] = None,
    offload: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of every stage's sequences whose KV is in host memory. Default: the least that fits.",
        ),
    ] = None,
    prefill_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens that travel together at most.")
    ] = 512,
    codec: Annotated[
        CodecMode, typer.Option(help="How hops are compressed; auto: only where measurements say it pays.")
    ] = CodecMode.AUTO,
    coordinator: Annotated[
        CoordinatorPlace,
        typer.Option(help="Where the loop begins and ends: in this process, or on the first stage's node."),
    ] = CoordinatorPlace.AUTO,
    draft: Annotated[
        DraftMode,
        typer.Option(
            help="Guess tokens ahead where measurements say it pays: ngram looks them up in prompt and "
            "answer; auto takes the draft model where one is named, else ngram."
        ),
    ] = DraftMode.AUTO,
    draft_model: Annotated[
        str | None, typer.Option(help="A small model with the same tokenizer that guesses, on this machine.")
    ] = None,
    guesses: Annotated[int, typer.Option(min=1, help="Guesses for a sequence and step at most.")] = GUESSES,
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Drop poor guesses behind the first stage.")
    ] = True,
    pruner: Annotated[
        Path | None,
        typer.Option(help="What `bbquic draft train-pruner` made. Default: the one found for the model."),
    ] = None,
    prune_threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Retention score below which a guess is dropped. Default: its own."),
    ] = None,
    always_guess: Annotated[bool, typer.Option(help="Guess whether it pays or not, to compare.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="For lines that do not say.")] = 256,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of every step here; Perfetto opens it.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Refuse a file with a bad line before any work.")] = False,
) -> None:
    """Answer every prompt of a file. Run it again after an interruption: only what is missing is done."""
    job = JobFile(prompts, Defaults(max_tokens=max_tokens))
    if strict:
        job.refuse_bad_lines()
    else:
        job.count()  # an unreadable file is an error before any node is started
    if trace is not None and not trace.parent.is_dir():
        raise ConfigError(f"cannot write the trace {trace}: {trace.parent} is not a directory")
    drafting = _drafting(draft, draft_model, guesses, always=always_guess)
    target = output or str(prompts.with_suffix("")) + ".answers.jsonl"
    cluster = _find_cluster(peers, certs, key, nodes, split)
    turns = LocalTurns.of(microbatches, nodes=cluster.local, cores=_cores()) if cluster.local else None
    cluster = replace(cluster, turns=turns)
    layout = LayoutOptions(
        batch=batch or DEFAULT_BATCH,
        micro_batches=turns.micro_batches if turns is not None else microbatches,
        depth=turns.depth if turns is not None else DEPTH,
        split=parse_split(split) if split is not None else None,
        kv_tokens=kv_tokens,
        dtype=dtype,
        codec=codec,
        coordinator=coordinator,
        memory=MemoryOptions(offload=offload, pack_tokens=prefill_tokens),
    )
    planning = None
    if cluster.peers is not None and split is None:
        here = trace is not None or drafting.model is not None
        planning = planning_options(layout, batch, microbatches, cluster.nodes, here=here)
    options = RunOptions(
        layout=layout,
        prefill_tokens=prefill_tokens,
        trace=trace,
        planning=planning,
        drafting=drafting,
        pruning=PruneOptions(pruner, prune_threshold, is_on=prune),
    )
    held = open_model(model)
    take_short_turns()
    statistics = asyncio.run(_run(cluster, model, held, job, target, options))
    if statistics is None:
        print_note(f"interrupted; {resume_hint(target) or 'the answers on standard output are whole'}")
        raise typer.Exit(INTERRUPTED)
    print_summary(statistics, target, resumable=target != "-")
    if statistics.failed:
        raise typer.Exit(PARTIAL)


def _find_cluster(
    peers: Path | None, certs: Path, key: Path | None, nodes: str | None, split: str | None
) -> _Cluster:
    """The cluster that was named, or that is here, or local nodes."""
    if peers is None and DEFAULT_PEERS.is_file():
        peers = DEFAULT_PEERS
        print_note(f"using {peers}")
    if peers is not None:
        return _Cluster(peers, certs, key, tuple(nodes.split(",")) if nodes else (), 0)
    count = LOCAL_NODES if split is None else len(parse_split(split))
    if nodes is not None:
        if not nodes.isascii() or not nodes.isdigit() or int(nodes) < 1:
            raise ConfigError(
                f"without a cluster, --nodes is how many to start, not {nodes!r}",
                hint="name a cluster with --peers peers.toml",
            )
        count = int(nodes)
    return _Cluster(None, certs, key, (), count)


def planning_options(
    layout: LayoutOptions,
    batch: int | None,
    micro_batches: int | None,
    nodes: tuple[str, ...],
    *,
    here: bool = False,
) -> PlanningOptions:
    """What the planner is told: all that was said on the command line is given, the rest is free. `here`: the
    coordinator cannot be on another machine."""
    at_stage = {CoordinatorPlace.HERE: False, CoordinatorPlace.STAGE: True}.get(layout.coordinator)
    return PlanningOptions(
        SearchOptions(
            memory=layout.memory,
            batch=batch,
            micro_batches=micro_batches,
            at_stage=False if here else at_stage,
            ways=ways_of(layout.codec),
            nodes=nodes or None,
            ordered=bool(nodes),
        )
    )


def open_model(name: str) -> RunModel:
    """The model, fetched first where it is a known one that is missing."""
    directory = _directory(name)
    return RunModel(directory, manifest_of(directory))


def _directory(name: str) -> ModelDirectory:
    try:
        return resolve_model(name, user_cache())
    except ModelMissing:
        print_note(f"the model {name} is not here yet; getting it")
        return fetch_model(name, user_cache(), print_note)


def _drafting(draft: DraftMode, model: str | None, guesses: int, *, always: bool) -> DraftOptions:
    """What was asked for. Raises: ConfigError, ModelError."""
    return DraftOptions(draft, None if model is None else _directory(model), guesses, always=always)


async def _run(
    cluster: _Cluster, model: str, held: RunModel, job: JobFile, output: str, options: RunOptions
) -> JobStatistics | None:
    """The run; None when it was interrupted by SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if not interrupted.is_set():
            interrupted.set()
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    title = f"{job.path.name} → {output}"

    @asynccontextmanager
    async def watch(source: Snapshot) -> AsyncIterator[None]:
        async with showing(make_view(source, title=title, plain=output == "-")):
            yield

    try:
        async with _nodes(cluster, model, held.directory) as found:
            if options.planning is not None:
                planning = replace(options.planning, prices=found.prices, host=found.host)
                options = replace(options, planning=planning)
            return await run_generate(
                found.endpoint, found.nodes, held, job, output, options, report=print_note, watch=watch
            )
    except asyncio.CancelledError:
        if interrupted.is_set():
            return None
        raise


@asynccontextmanager
async def _nodes(cluster: _Cluster, model: str, directory: ModelDirectory) -> AsyncIterator[Joined]:
    """Our end of the network, and the nodes to use, started here where there is no cluster."""
    if cluster.peers is not None:
        async with joined(cluster.peers, cluster.certs, cluster.key, cluster.nodes) as found:
            yield found
        return
    print_note(
        f"no peers.toml here: starting {cluster.local} node{'s' if cluster.local > 1 else ''} on this machine"
    )
    assert cluster.turns is not None
    memory = Bytes(int(host_memory_free() * LOCAL_MEMORY_SHARE) // cluster.local)
    models = [str(directory.path)] if model != directory.name else []
    async with (
        local_nodes(cluster.local, models=models, turns=cluster.turns, memory=memory) as local,
        opened(local.identity, local.peers, "127.0.0.1") as endpoint,
    ):
        yield Joined(endpoint, local.nodes, {})


def _cores() -> int:
    return len(os.sched_getaffinity(0))
