"""A whole run: a job file, a model and a cluster in; answers on disk out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bbquic.errors import BBQuicError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.model.tokenizer import StreamDecoder
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
from bbquic.runtime.coordinator import Coordinator, CoordinatorOptions
from bbquic.runtime.job import JobFile
from bbquic.runtime.layout import LayoutOptions, for_stage, make_plan
from bbquic.runtime.monitor import Monitor
from bbquic.runtime.protocol import PlanHeader
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from bbquic.runtime.source import RecordSource
from bbquic.runtime.telemetry import JobStatistics
from bbquic.runtime.trace import TraceWriter
from bbquic.transport.channel import Endpoint
from bbquic.transport.identity import Peer
from bbquic.units import Seconds

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


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model as the command holds it: tokenizer and manifest; the weights are the nodes' matter."""

    directory: ModelDirectory
    manifest: Manifest

    def label(self, dtype: str) -> str:
        """What the answers call it: name, digest and dtype decide every token."""
        return f"{self.directory.name}@{self.manifest.digest[:12]}/{dtype}"


@asynccontextmanager
async def deployed(
    endpoint: Endpoint, nodes: Sequence[Peer], model: RunModel, options: RunOptions, report: Report
) -> AsyncIterator[tuple[tuple[StageLink, ...], PlanHeader]]:
    """The model laid out over the nodes, ready for rows; released at the end, cancelled on an error."""
    async with dialled(endpoint, nodes, options.deadlines) as channels:
        descriptions = await describe_all(channels, options.deadlines)
        plan = make_plan(new_job_id(), model.directory, model.manifest, descriptions, options.layout)
        links = [StageLink(stage, channel) for stage, channel in zip(plan.stages, channels, strict=True)]
        plans = [for_stage(plan, link.stage, model.directory) for link in links]
        failed = True
        try:
            await deploy(links, plans, options.deadlines, report)
            yield tuple(links), plan
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
    async with deployed(endpoint, nodes, model, options, report) as (links, plan):
        answers = open_answers(output, model=model.label(plan.dtype))
        try:
            total = await asyncio.to_thread(job.count)
            directory = model.directory
            source = RecordSource(job, answers, directory.tokenizer, context_length=directory.context_length)
            with _traced(options.trace, plan, report) as recorder:
                coordinator = Coordinator(
                    links,
                    plan,
                    Scheduler(_scheduling(plan, options)),
                    ends=directory.eos,
                    text=lambda: StreamDecoder(directory.tokenizer),
                    options=options.coordinator,
                    recorder=recorder,
                )
                monitor = Monitor(source, coordinator, total=total)
                try:
                    async with watch(monitor.snapshot), aclosing(source.requests()) as requests:
                        await coordinator.run(requests, source.keep)
                except BBQuicError as error:
                    error.hint = error.hint or resume_hint(output)
                    raise
                finally:
                    source.close()
            return monitor.whole_run()
        finally:
            answers.close()


def _scheduling(plan: PlanHeader, options: RunOptions) -> SchedulerOptions:
    return SchedulerOptions(
        micro_batches=plan.micro_batches,
        slots=options.layout.batch,
        cells=plan.cells,
        prefill_tokens=options.prefill_tokens,
        look_ahead=options.look_ahead,
        depth=plan.depth,
        start=options.layout.start(len(plan.stages)),
    )


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
