"""What a layout will do: its step, its pace, the time of the whole job, and what holds it up. Pure.

A layout's pass is a list of parts, each of a resource that it keeps busy and of what it adds to the loop
(architecture §4). Whoever made the layout, it is judged by the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import Cluster, JobShape, Layout, LinkProfile, ModelSizes, PlannedStage
from bbquic.plan.controller import NOTHING
from bbquic.plan.cost import (
    Load,
    MemoryOptions,
    StageMemory,
    circulating_step,
    ends_time,
    held_memory,
    hop_time,
    host_share,
    leg_time,
    load_of,
    overlapped_block_time,
    steady_time,
)
from bbquic.plan.speculation import PLAIN, Trees
from bbquic.units import BytesPerSecond, Seconds

MISSING = LinkProfile(rate=BytesPerSecond(1.0), delay=Seconds(float("inf")))


class Kind(StrEnum):
    """Of a resource, or of what no single one is to blame for."""

    COMPUTE = "compute"
    OUTBOUND = "outbound lane"  # copy from the device, encode
    LINK = "link"
    DRAFTER = "drafter"  # one for all micro-batches
    INBOUND = "inbound lane"  # decode, copy to the device
    LEG = "leg"  # coordinator to first stage, last stage to coordinator: in the loop alone
    LOOP = "loop"


@dataclass(frozen=True, slots=True)
class Resource:
    """By name: `str` of it is "compute of X", "link A -> B", "loop"."""

    kind: Kind
    source: str = ""
    target: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.LOOP:
            return "loop"
        if self.target:
            return f"{self.kind} {self.source} -> {self.target}"
        return f"{self.kind} of {self.source}"


@dataclass(frozen=True, slots=True)
class Part:
    """How long a micro-batch keeps a resource busy, and what it adds to the loop, waiting apart."""

    resource: Resource
    busy: Seconds
    passes: Seconds


@dataclass(frozen=True, slots=True)
class Prediction:
    """A layout's figures. Infinite where a link is missing.

    step = max(M · cycle, loop); `tokens_per_second` of answers at the steady pace; `steady_time` is the
    objective, `job_time` counts start and end too (`job_time`). `limit` is the loop, or the busiest resource.
    """

    step: Seconds
    cycle: Seconds
    loop: Seconds
    tokens_per_second: float
    steady_time: Seconds
    job_time: Seconds
    limit: Resource
    parts: tuple[Part, ...]


def predict(
    cluster: Cluster,
    model: ModelSizes,
    job: JobShape,
    layout: Layout,
    memory: MemoryOptions | None = None,
    trees: Trees = PLAIN,
) -> Prediction:
    """Of any layout, whether its stages' memory suffices or not; `memory` says how large packs become, and
    `trees` what decode rows are."""
    parts = passage(cluster, model, layout, load_of(job, layout.batch, layout.micro_batches, trees), trees)
    cycle, loop = _cycle(parts), _loop(parts)
    step = circulating_step(layout.micro_batches, cycle, loop)
    full = layout.micro_batches * cycle >= loop
    rows = min(layout.batch, job.sequences)
    return Prediction(
        step=step,
        cycle=cycle,
        loop=loop,
        tokens_per_second=rows * trees.committed / step,
        steady_time=steady_time(job, layout.batch, step / trees.committed),
        job_time=job_time(cluster, model, job, layout, memory or MemoryOptions(), trees),
        limit=max(parts, key=lambda part: part.busy).resource if full else Resource(Kind.LOOP),
        parts=parts,
    )


def passage(
    cluster: Cluster, model: ModelSizes, layout: Layout, load: Load, trees: Trees = PLAIN
) -> tuple[Part, ...]:
    """A pack's way from the coordinator through all stages and back, part by part. Of its trees, only what
    is kept goes on from the first stage."""
    stages, onward = layout.stages, replace(load, guesses=min(load.guesses, trees.kept))
    size = onward.tokens * model.hidden * model.value_bytes
    parts = [_leg(cluster, layout.coordinator, stages[0].node, load, back=False)]
    if load.guesses and trees.drafting != NOTHING:
        busy = Seconds(trees.drafting(load.rows))
        parts.insert(0, Part(Resource(Kind.DRAFTER, layout.coordinator), busy, busy))
    for position, stage in enumerate(stages):
        if position:
            before, way = stages[position - 1].node, layout.ways[position - 1]
            parts += _hop(cluster, before, stage.node, size, way)
        ends = position == 0, position == len(stages) - 1
        alpha = host_share(cluster.node(stage.node), stage.offloaded, layout.batch)
        parts.append(_compute(cluster, stage, onward if position else load, alpha, ends))
    parts.append(_leg(cluster, stages[-1].node, layout.coordinator, load, back=True))
    return tuple(parts)


def _compute(
    cluster: Cluster, stage: PlannedStage, load: Load, alpha: float, ends: tuple[bool, bool]
) -> Part:
    node = cluster.node(stage.node)
    own = node.overhead + ends_time(node, load, embeds=ends[0], heads=ends[1])
    busy = Seconds(own + stage.blocks * overlapped_block_time(node, load, alpha))
    return Part(Resource(Kind.COMPUTE, stage.node), busy, busy)


def _hop(cluster: Cluster, source: str, target: str, size: float, way: Way) -> list[Part]:
    link = cluster.links.get((source, target))
    hop = hop_time(cluster.node(source), cluster.node(target), link, size, way)
    return [
        Part(Resource(Kind.OUTBOUND, source, target), hop.out, hop.out),
        Part(Resource(Kind.LINK, source, target), hop.wire, Seconds(hop.wire + hop.delay)),
        Part(Resource(Kind.INBOUND, source, target), hop.into, hop.into),
    ]


def _leg(cluster: Cluster, source: str, target: str, load: Load, *, back: bool) -> Part:
    link = None if source == target else cluster.links.get((source, target), MISSING)
    return Part(Resource(Kind.LEG, source, target), Seconds(0.0), leg_time(link, load, back=back))


def _cycle(parts: Sequence[Part]) -> Seconds:
    return max(part.busy for part in parts)


def _loop(parts: Sequence[Part]) -> Seconds:
    return Seconds(sum(part.passes for part in parts))


def job_time(
    cluster: Cluster,
    model: ModelSizes,
    job: JobShape,
    layout: Layout,
    memory: MemoryOptions,
    trees: Trees = PLAIN,
) -> Seconds:
    """The job from its first pack to its last token, in three stretches.

    1. The first B prompts, in packs of at most `pack_tokens` one behind the other: a loop and then a cycle
       for each further pack.
    2. Steps at the steady pace, until the last sequence is seated: (N - B) · s̄ / B of them.
    3. The tail: as many steps as the longest answer has tokens, without prompts, in which B · s̄ tokens are
       left to make, so B · s̄ / longest rows on average; micro-batches are put together where that is shorter.

    With trees a step commits E[a] tokens a row.
    """
    batch = min(layout.batch, job.sequences)
    steady = steady_step(cluster, model, job, layout, trees)
    if steady == float("inf"):
        return Seconds(steady)
    refilled = (job.sequences - batch) * job.output / batch
    longest = max(job.longest, job.output)
    active = max(1.0, batch * job.output / longest)
    context = job.prompt + job.output / 2
    ways_down = {
        max(1, layout.micro_batches >> halved) for halved in range(layout.micro_batches.bit_length())
    }
    tail = min(
        _step(cluster, model, layout, Load(active / count, context, guesses=trees.guesses), count, trees)
        for count in sorted(ways_down)
        if count <= active
    )
    first = _first_prompts(cluster, model, layout, batch * job.read, job.read_context, memory.pack_tokens)
    return Seconds(first + (refilled * steady + longest * tail) / trees.committed)


def steady_step(
    cluster: Cluster, model: ModelSizes, job: JobShape, layout: Layout, trees: Trees = PLAIN
) -> Seconds:
    """A step with as many prompt tokens beside decode rows as it takes to refill slots."""
    load = load_of(job, layout.batch, layout.micro_batches, trees)
    return Seconds(_step(cluster, model, layout, load, layout.micro_batches, trees))


def _step(
    cluster: Cluster, model: ModelSizes, layout: Layout, load: Load, micro_batches: int, trees: Trees
) -> float:
    parts = passage(cluster, model, layout, load, trees)
    return circulating_step(micro_batches, _cycle(parts), _loop(parts))


def _first_prompts(
    cluster: Cluster, model: ModelSizes, layout: Layout, tokens: float, context: float, largest: int
) -> float:
    if tokens <= 0:
        return 0.0
    packs = ceil(tokens / largest)
    parts = passage(cluster, model, layout, Load(0.0, 0.0, tokens / packs, context))
    return _loop(parts) + (packs - 1) * _cycle(parts)


def layout_memory(
    model: ModelSizes, job: JobShape, layout: Layout, memory: MemoryOptions | None = None
) -> tuple[StageMemory, ...]:
    """What every stage of a layout takes, with as many slots on the host as the layout says."""
    rows = -(-layout.batch // layout.micro_batches)
    last = len(layout.stages) - 1
    return tuple(
        held_memory(
            model,
            memory or MemoryOptions(),
            blocks=stage.blocks,
            batch=layout.batch,
            rows=rows,
            slot=job.slot,
            embeds=position == 0,
            heads=position == last,
        ).offloading(stage.offloaded, layout.batch)
        for position, stage in enumerate(layout.stages)
    )


def dollars_per_million(cluster: Cluster, layout: Layout, tokens_per_second: float) -> float | None:
    """What the used nodes cost for a million tokens of answers at the steady pace.

    A node without a price is its owner's and costs nothing; None where none of them has one.
    """
    prices = [cluster.node(name).price for name in layout.nodes]
    known = [price for price in prices if price is not None]
    if not known or tokens_per_second <= 0:
        return None
    return sum(known) / 3600 * 1e6 / tokens_per_second
