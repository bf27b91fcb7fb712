"""A whole run: a job file, a model and a cluster in; answers on disk out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bbquic.errors import BBQuicError, ConfigError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.model.tokenizer import StreamDecoder
from bbquic.plan.cluster import JobShape
from bbquic.runtime.advice import Advisor, advising
from bbquic.runtime.answers import open_answers
from bbquic.runtime.cluster import (
    ClusterDeadlines,
    Report,
    StageLink,
    deploy,
    describe_all,
    dialled,
    new_job_id,
    release,
)
from bbquic.runtime.coordinator import Coordinator, CoordinatorOptions, JobLoop
from bbquic.runtime.drafters import DraftOptions, TimedDrafter, make_drafter
from bbquic.runtime.job import JobFile
from bbquic.runtime.layout import CoordinatorPlace, LayoutOptions, for_stage, make_plan
from bbquic.runtime.memory import host_memory_free
from bbquic.runtime.monitor import Monitor
from bbquic.runtime.observer import Recorder
from bbquic.runtime.planning import USUAL_JOB, PlanningOptions, ask, best_plan, planned_layout, summary
from bbquic.runtime.protocol import DescriptionHeader, PlanHeader, ReadyHeader, Stage
from bbquic.runtime.pruner_choice import PruneOptions, with_pruner
from bbquic.runtime.remote import RemoteCoordinator
from bbquic.runtime.scheduler import SchedulerOptions
from bbquic.runtime.sizes import job_shape, with_trees
from bbquic.runtime.source import RecordSource
from bbquic.runtime.speculating import scheduler_of
from bbquic.runtime.tasks import owned_tasks
from bbquic.runtime.telemetry import JobStatistics
from bbquic.runtime.trace import TraceWriter
from bbquic.transport.channel import Channel, Endpoint
from bbquic.transport.identity import Peer
from bbquic.units import Seconds

LEAST_LOADING = 0.5  # s; a node that was quicker had its weights still

Watch = Callable[[Callable[[], JobStatistics]], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything a run can be told beside its files, its model and its nodes."""

    layout: LayoutOptions = field(default_factory=LayoutOptions)
    prefill_tokens: int = 512
    look_ahead: int = 256
    coordinator: CoordinatorOptions = field(default_factory=CoordinatorOptions)
    deadlines: ClusterDeadlines = field(default_factory=ClusterDeadlines)
    trace: Path | None = None  # where a Chrome trace of the run goes
    planning: PlanningOptions | None = None  # None: the nodes as given, split by weight
    drafting: DraftOptions = field(default_factory=DraftOptions)
    pruning: PruneOptions = field(default_factory=PruneOptions)

    def __post_init__(self) -> None:
        """Raises: ConfigError for what a coordinator on another machine cannot do."""
        if self.trace is not None and self.layout.coordinator is CoordinatorPlace.STAGE:
            raise ConfigError(
                "a trace is made by the coordinator, which is to run on another machine",
                hint="leave out --trace, or say --coordinator here",
            )
        if self.drafting.model is not None and self.layout.coordinator is CoordinatorPlace.STAGE:
            raise ConfigError(
                f"the draft model {self.drafting.model.name} runs beside the coordinator, which is to run on "
                "another machine",
                hint="use --draft ngram there, or say --coordinator here",
            )


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model as the command holds it: tokenizer and manifest; the weights are the nodes' matter."""

    directory: ModelDirectory
    manifest: Manifest

    def label(self, dtype: str) -> str:
        """What the answers call it: name, digest and dtype decide every token."""
        return f"{self.directory.name}@{self.manifest.digest[:12]}/{dtype}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model laid out over nodes that are ready: `layout` has what was chosen for the run, `advisor` why."""

    links: tuple[StageLink, ...]
    plan: PlanHeader
    layout: LayoutOptions
    advisor: Advisor | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """Nodes in the order of their stages, and how the model is to be laid out over them."""

    channels: tuple[Channel, ...]
    descriptions: tuple[DescriptionHeader, ...]
    layout: LayoutOptions
    advisor: Advisor | None = None


async def _planned(
    found: _Placed,
    nodes: Sequence[Peer],
    model: RunModel,
    job: JobShape,
    planning: PlanningOptions,
    report: Report,
) -> _Placed:
    """The best plan for the nodes that were found, said in a few lines."""
    peers = {peer.name: peer for peer in nodes}
    question = await ask(
        found.channels,
        [peers[channel.peer.name] for channel in found.channels],
        found.descriptions,
        model.directory,
        model.manifest,
        job,
        planning,
        dtype=found.layout.dtype,
        report=report,
    )
    chosen = await best_plan(question)
    for line in (*question.notes, *summary(chosen)):
        report(line)
    channels = {channel.peer.name: channel for channel in found.channels}
    descriptions = {one.node: one for one in found.descriptions}
    return _Placed(
        tuple(channels[name] for name in chosen.layout.nodes),
        tuple(descriptions[name] for name in chosen.layout.nodes),
        planned_layout(chosen, question.dtype, question.job.slot, found.layout),
        Advisor(question, chosen),
    )


@asynccontextmanager
async def deployed(
    endpoint: Endpoint,
    nodes: Sequence[Peer],
    model: RunModel,
    options: RunOptions,
    report: Report,
    job: JobShape = USUAL_JOB,
) -> AsyncIterator[Deployment]:
    """The model laid out over the nodes, ready for rows; released at the end, cancelled on an error.

    Where planning is asked for, the nodes that answer are looked at, and those that the plan leaves out hear
    no more of it; `job` is what it plans for.
    """
    planning = options.planning
    without = report if planning is not None and not planning.search.given else None
    async with dialled(endpoint, nodes, options.deadlines, without) as channels:
        guesses = options.drafting.most_guesses
        wanted = replace(options.layout, memory=replace(options.layout.memory, guesses=guesses))
        placed = _Placed(channels, await describe_all(channels, options.deadlines), wanted)
        if planning is not None:
            search = replace(planning.search, memory=replace(planning.search.memory, guesses=guesses))
            planning = replace(planning, search=search)
            placed = await _planned(placed, nodes, model, job, planning, report)
        layout = placed.layout
        plan = make_plan(new_job_id(), model.directory, model.manifest, placed.descriptions, layout)
        if options.drafting.is_on or options.pruning.file is not None:
            # n-grams that nobody asked for say nothing of what could prune them
            asked = options.drafting.model is not None or options.pruning != PruneOptions()
            heard = report if asked else lambda _: None
            plan = with_pruner(plan, model.directory, model.manifest, options.pruning, heard)
        links = tuple(map(StageLink, plan.stages, placed.channels))
        plans = [for_stage(plan, link.stage, model.directory) for link in links]
        failed = True
        try:
            answers = await deploy(links, plans, options.deadlines, report)
            advisor = placed.advisor
            if advisor is not None:
                advisor = replace(advisor, loading=_loading(plan.stages, answers))
            yield Deployment(links, plan, layout, advisor)
            failed = False
        finally:
            await release(links, plan.job, cancel=failed, deadlines=options.deadlines)


async def generate(
    endpoint: Endpoint,
    nodes: Sequence[Peer],
    model: RunModel,
    job: JobFile,
    output: str,
    options: RunOptions,
    *,
    report: Report,
    watch: Watch,
) -> JobStatistics:
    """Answer every line of the job that `output` does not answer yet; gives a snapshot of the whole run.

    `watch` wraps the run proper and is handed the source of snapshots. Raises: BBQuicError; what was
    finished by then is on disk, and the same call goes on from there.
    """
    directory = model.directory
    shape = USUAL_JOB
    if options.planning is not None:
        before = None if output == "-" else Path(output)
        known = await asyncio.to_thread(
            lambda: job_shape(job, directory.tokenizer, directory.context_length, answers=before)
        )
        shape = with_trees(known or USUAL_JOB, options.drafting.most_guesses)
    drafter = await _drafter(directory, options, report)
    async with deployed(endpoint, nodes, model, options, report, shape) as ready:
        links, plan = ready.links, ready.plan
        answers = open_answers(output, model=model.label(plan.dtype))
        try:
            total = await asyncio.to_thread(job.count)
            source = RecordSource(job, answers, directory.tokenizer, context_length=directory.context_length)
            with _traced(options.trace, plan, report) as recorder:
                chosen = replace(options, layout=ready.layout)
                loop = job_loop(links, plan, directory, chosen, recorder, drafter)
                monitor = Monitor(source, loop, total=total)
                try:
                    async with (
                        _advised(ready.advisor, monitor.snapshot) as look,
                        watch(look),
                        aclosing(source.requests()) as requests,
                    ):
                        await loop.run(requests, source.keep)
                except BBQuicError as error:
                    error.hint = error.hint or resume_hint(output)
                    raise
                finally:
                    source.close()
            return monitor.whole_run()
        finally:
            answers.close()


def _loading(stages: Sequence[Stage], answers: Sequence[ReadyHeader]) -> dict[str, float]:
    """Bytes of weights a second by node, of those that had to load some."""
    return {
        stage.node: answer.weights / answer.seconds
        for stage, answer in zip(stages, answers, strict=True)
        if answer.weights and answer.seconds > LEAST_LOADING
    }


@asynccontextmanager
async def _advised(
    advisor: Advisor | None, look: Callable[[], JobStatistics]
) -> AsyncIterator[Callable[[], JobStatistics]]:
    """The source of snapshots; with what another layout would bring, where there is an advisor to say it."""
    if advisor is None:
        yield look
        return
    newest: tuple[str, ...] = ()

    def tell(advice: str) -> None:
        nonlocal newest
        newest = (advice,)

    def with_advice() -> JobStatistics:
        seen = look()
        return replace(seen, decisions=(*seen.decisions, *newest))

    async with owned_tasks() as tasks:
        task = tasks.create_task(advising(advisor, look, tell))
        yield with_advice
        task.cancel()


def job_loop(
    links: Sequence[StageLink],
    plan: PlanHeader,
    directory: ModelDirectory,
    options: RunOptions,
    recorder: Recorder | None = None,
    drafter: TimedDrafter | None = None,
) -> JobLoop:
    """The coordinator where the plan wants it: in this process, where the `drafter` is, or on the first
    stage's node, which has its own."""
    work, ends = _scheduling(plan, options), directory.eos
    if plan.coordinator is not None:
        name = "" if drafter is None else drafter.name
        return RemoteCoordinator(links, plan, work, ends=ends, options=options.coordinator, drafter=name)
    return Coordinator(
        links,
        plan,
        scheduler_of(work, drafter),
        ends=ends,
        text=lambda: StreamDecoder(directory.tokenizer),
        options=options.coordinator,
        recorder=recorder,
    )


def _scheduling(plan: PlanHeader, options: RunOptions) -> SchedulerOptions:
    return SchedulerOptions(
        micro_batches=plan.micro_batches,
        slots=options.layout.batch,
        tiers=plan.tiers,
        prefill_tokens=options.prefill_tokens,
        look_ahead=options.look_ahead,
        depth=plan.depth,
        start=options.layout.start(len(plan.stages)),
        most_guesses=options.drafting.most_guesses,
        always_guesses=options.drafting.always,
    )


async def _drafter(directory: ModelDirectory, options: RunOptions, report: Report) -> TimedDrafter | None:
    """The run's, before any node is asked for anything. Raises: as `make_drafter`."""
    drafting = options.drafting
    if drafting.model is not None:
        report(f"loading the draft model {drafting.model.name}")
    return await asyncio.to_thread(make_drafter, drafting, directory, free=host_memory_free())


@contextmanager
def _traced(path: Path | None, plan: PlanHeader, report: Report) -> Iterator[TraceWriter | None]:
    """What writes the trace, where one is wanted; `report` hears of one that ended early."""
    if path is None:
        yield None
        return
    now = Seconds(asyncio.get_running_loop().time())
    writer = TraceWriter(path, [stage.node for stage in plan.stages], now)
    try:
        yield writer
    finally:
        writer.close()
        if writer.trouble is not None:
            report(writer.trouble)


def resume_hint(output: str) -> str | None:
    """How to go on after an error; None where answers went to a stream that nobody kept."""
    if output == "-":
        return None
    return f"the answers so far are in {output}; run the same command again to do what is missing"
