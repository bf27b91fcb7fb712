"""A plan for a job: the cluster looked at, the job sampled, the search run, and its choice as a layout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.plan.breakeven import Way
from bbquic.plan.build import WAYS
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import COMMAND, Cluster, JobShape, ModelSizes
from bbquic.plan.explain import Explanation, explain, limit_sentence
from bbquic.plan.finalists import search_job
from bbquic.plan.search import Plan, search
from bbquic.runtime.hop import CodecMode
from bbquic.runtime.layout import CoordinatorPlace, LayoutOptions, choose_dtype
from bbquic.runtime.protocol import DescriptionHeader
from bbquic.runtime.sizes import model_sizes
from bbquic.runtime.survey import SurveyOptions, survey
from bbquic.transport.channel import Channel
from bbquic.transport.identity import Peer

Report = Callable[[str], None]

# What a job is thought to be where none is named.
USUAL_JOB = JobShape(sequences=256, prompt=128.0, output=128.0, longest=256.0, slot=512)


@dataclass(frozen=True, slots=True)
class PlanningOptions:
    """`search` says what is given; `prices` are dollars an hour by node; `host` is the address of the machine
    that asks, where peers.toml has one: a node there is beside it."""

    search: SearchOptions = field(default_factory=SearchOptions)
    prices: Mapping[str, float] = field(default_factory=dict)
    host: str | None = None
    survey: SurveyOptions = field(default_factory=SurveyOptions)


@dataclass(frozen=True)
class Question:
    """Everything a search is asked with; `notes` say what of the cluster is not known, or not for sure."""

    cluster: Cluster
    model: ModelSizes
    job: JobShape
    options: SearchOptions
    dtype: str
    notes: tuple[str, ...] = ()

    def answer(self) -> Plan:
        """Takes seconds where there are many nodes. Raises: PlanImpossible, ConfigError."""
        return search_job(self.cluster, self.model, self.job, self.options, self._best_pace)

    def explain(self, plan: Plan) -> Explanation:
        return explain(self.cluster, self.model, self.job, plan, self.options, self._best_pace)

    @cached_property
    def _best_pace(self) -> Plan:
        return search(self.cluster, self.model, self.job, self.options)


async def ask(
    channels: Sequence[Channel],
    nodes: Sequence[Peer],
    descriptions: Sequence[DescriptionHeader],
    directory: ModelDirectory,
    manifest: Manifest,
    job: JobShape,
    options: PlanningOptions,
    *,
    dtype: str | None,
    report: Report,
) -> Question:
    """Look at the nodes and their links. Nobody else may read the channels meanwhile.

    Raises: PlanRefused, ConfigError where no common dtype is found.
    """
    limits, busy = options.search, _busy(descriptions, options.search)
    free = [place for place, one in enumerate(descriptions) if one.node not in busy]
    chosen = choose_dtype(dtype, [descriptions[place] for place in free])
    seen = await survey(
        [channels[place] for place in free],
        [nodes[place] for place in free],
        manifest,
        chosen,
        prices=options.prices,
        hosts={COMMAND: options.host} if options.host else None,
        report=report,
        options=options.survey,
    )
    known = {node.name for node in seen.cluster.nodes}
    if limits.nodes is not None and not limits.given:
        limits = replace(limits, nodes=tuple(name for name in limits.nodes if name in known))
    others = tuple(f"{name} is left out: it is busy with job {held}" for name, held in busy.items())
    sizes = model_sizes(directory, manifest, chosen)
    return Question(seen.cluster, sizes, job, limits, chosen, (*others, *seen.notes))


def _busy(descriptions: Sequence[DescriptionHeader], search: SearchOptions) -> dict[str, str]:
    """Nodes that serve a job, with its name, where others are free. Where none is, the job is likely one of
    ours that was cut off; if it is not, they say so themselves."""
    found = {one.node: one.job for one in descriptions if one.job is not None}
    return {} if search.given or len(found) == len(descriptions) else found


async def best_plan(question: Question) -> Plan:
    """Its answer, worked out beside the event loop. Raises: PlanImpossible."""
    return await asyncio.to_thread(question.answer)


def ways_of(codec: CodecMode) -> tuple[Way, ...]:
    """What hops may be planned with, when they are told to use a codec."""
    return WAYS if codec is CodecMode.AUTO else (Way(codec.value),)


def planned_layout(plan: Plan, dtype: str, slot: int, options: LayoutOptions) -> LayoutOptions:
    """The plan's choices where `options` left them open; it was made for slots of `slot` tokens."""
    layout = plan.layout
    at_stage = layout.coordinator != COMMAND
    return replace(
        options,
        batch=layout.batch,
        first=layout.micro_batches,
        split=tuple(stage.blocks for stage in layout.stages),
        coordinator=CoordinatorPlace.STAGE if at_stage else CoordinatorPlace.HERE,
        dtype=dtype,
        offloaded=tuple(stage.offloaded for stage in layout.stages),
        slot=slot,
    )


def summary(plan: Plan) -> list[str]:
    """A plan in a few lines, for whoever starts a run by it."""
    layout, prediction = plan.layout, plan.prediction
    stages = ", ".join(
        f"{stage.node} {stage.first}-{stage.stop - 1}{_offloading(stage.offloaded)}"
        for stage in layout.stages
    )
    where = "here" if layout.coordinator == COMMAND else f"on {layout.coordinator}"
    lines = [
        f"plan: blocks {stages}; {layout.batch} sequences in {layout.micro_batches} micro-batches, "
        f"coordinator {where}",
        f"predicted: {prediction.tokens_per_second:.1f} tokens/s generated, "
        f"a step of {prediction.step * 1e3:.0f} ms; {limit_sentence(layout, prediction)}",
    ]
    if plan.left_out:
        lines.append(f"left out: {', '.join(plan.left_out)} (`bbquic plan` says why)")
    return lines


def _offloading(slots: int) -> str:
    return f" with the KV of {slots} on the host" if slots else ""
