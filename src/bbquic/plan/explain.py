"""Why a plan is as it is: what holds it up, what would move that, and why nodes are left out. Pure.

Every figure is a search, or the best split of an order, on a changed cluster: with the plan's batch and
micro-batches and those next to them, of the plan's nodes and those that were nearest to be used. What is said
to help helps as much at least, and a node's absence costs as much at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bbquic.errors import PlanImpossible
from bbquic.plan.build import Setting, Tables
from bbquic.plan.candidates import SearchOptions, settings
from bbquic.plan.cluster import COMMAND, Cluster, JobShape, Layout, ModelSizes
from bbquic.plan.cost import held_memory
from bbquic.plan.guessing import WouldPay, would_pay
from bbquic.plan.instance import FIRST, LAST, ONLY, Assignment, Instance, Objective
from bbquic.plan.partition import best_partition
from bbquic.plan.predict import Kind, Part, Prediction, predict
from bbquic.plan.search import EXACT_NODES, TIE, Plan, layout_of, search
from bbquic.plan.whatif import with_link_rate, with_memory, without
from bbquic.units import BytesPerSecond

GB = 10**9
MOST_CHANGES = 4  # nodes that are given memory, and nodes that are taken away: the largest stages first
MOST_LEFT_OUT = 16  # nodes whose absence is worked out; of the others only the names are given


@dataclass(frozen=True, slots=True)
class Change:
    """One thing otherwise: the job's steady time then, over the plan's. Infinite: nothing would fit."""

    what: str
    ratio: float

    def __str__(self) -> str:
        if self.ratio == float("inf"):
            return f"{self.what}: the model would not fit"
        if abs(self.ratio - 1) < 0.005:
            return f"{self.what}: no change"
        word = "as long" if self.ratio > 1 else "of the time"
        return f"{self.what}: {self.ratio:.2f} x {word}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A node that the plan does without. `ratio`: the best found with it, over the plan; infinite where it
    cannot be used."""

    node: str
    ratio: float
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """`limit` in a sentence; `changes` by what they would gain, the best first; from how many tokens a pass
    on `guessing` ahead pays."""

    limit: str
    changes: tuple[Change, ...]
    left_out: tuple[LeftOut, ...]
    guessing: tuple[WouldPay, ...] = ()


def explain(
    cluster: Cluster,
    model: ModelSizes,
    job: JobShape,
    plan: Plan,
    options: SearchOptions | None = None,
    best: Plan | None = None,
) -> Explanation:
    """Of a plan that `search` or `search_job` made of the same cluster, model, job and options.

    Changes and nodes are weighed by the steady pace, against the plan that is best by it: `search`'s, `best`
    where that is known.
    """
    options = options or SearchOptions()
    best = best or search(cluster, model, job, options)
    case = _Case(cluster, model, job, best, options)
    left = [
        _for_the_whole_job(name, best, plan) if name in best.layout.nodes else case.left_out(name)
        for name in plan.left_out[:MOST_LEFT_OUT]
    ]
    if not options.given:
        spare = max(1, EXACT_NODES - len(plan.layout.stages))
        nearest = sorted((one for one in left if one.ratio < float("inf")), key=lambda one: one.ratio)[:spare]
        among = (*plan.layout.nodes, *(one.node for one in nearest))
        case = replace(case, options=replace(options, nodes=among))
    changes = sorted(case.changes(), key=lambda change: change.ratio)
    limit = limit_sentence(plan.layout, plan.prediction)
    guessing = would_pay(cluster, model, job, plan.layout, options.memory.guesses)
    return Explanation(limit, tuple(changes), tuple(left), guessing)


def limit_sentence(layout: Layout, prediction: Prediction) -> str:
    """What the step waits for, with its figures."""
    full, loop = layout.micro_batches * prediction.cycle, prediction.loop
    if prediction.limit.kind is Kind.LOOP:
        most = max(prediction.parts, key=lambda part: part.passes)
        return (
            f"the loop takes {_ms(loop)}, and {layout.micro_batches} x the longest cycle {_ms(full)}: "
            f"most of it is {most.resource} with {_ms(most.passes)}"
        )
    return (
        f"{prediction.limit} is busy {_ms(prediction.cycle)} a micro-batch of {layout.micro_batches}: "
        f"{_ms(full)} a step; the loop takes {_ms(loop)}"
    )


def _for_the_whole_job(name: str, best: Plan, plan: Plan) -> LeftOut:
    """Why a node is left out that the best pace has use for."""
    ratio = best.prediction.steady_time / plan.prediction.steady_time
    return LeftOut(
        name,
        ratio,
        f"with it the steady pace would be {1 / ratio:.2f} x as high, but the way around longer: reading the "
        "first prompts and the last answers would take more than that saves",
    )


@dataclass(frozen=True)
class _Case:
    cluster: Cluster
    model: ModelSizes
    job: JobShape
    plan: Plan
    options: SearchOptions

    def changes(self) -> Iterator[Change]:
        hop = bottleneck_hop(self.plan.prediction)
        if hop is not None:
            twice = BytesPerSecond(2 * self.cluster.links[hop].rate)
            changed = with_link_rate(self.cluster, *hop, twice)
            yield Change(f"{hop[0]} -> {hop[1]} twice as fast", self._ratio(changed, self.options))
        stages = sorted(self.plan.layout.stages, key=lambda stage: -stage.blocks)[:MOST_CHANGES]
        for stage in stages:
            more = with_memory(self.cluster, stage.node, GB)
            yield Change(f"one GB more on {stage.node}", self._ratio(more, self.options))
        yield from self._offload()
        if self.options.given:
            return  # an order that is given has no place for another node
        for stage in stages if len(self.cluster.nodes) > 1 else []:
            rest = tuple(name for name in self.options.nodes or () if name != stage.node)
            less = replace(self.options, nodes=rest)
            ratio = self._ratio(without(self.cluster, stage.node), less) if rest else float("inf")
            yield Change(f"without {stage.node}", ratio)

    def _offload(self) -> Iterator[Change]:
        """With KV on devices alone, where the plan has some on hosts; as it must be, where that is given."""
        forced = self.options.memory.offload
        if any(stage.offloaded for stage in self.plan.layout.stages):
            yield Change("all KV on the devices", self._ratio(self.cluster, _offloading(self.options, 0.0)))
        if forced is not None:
            yield Change(
                "no more KV on hosts than need be", self._ratio(self.cluster, _offloading(self.options, None))
            )

    def _ratio(self, cluster: Cluster, options: SearchOptions) -> float:
        """The best time near the plan's batch and micro-batches, over the plan's."""
        try:
            found = search(
                cluster,
                self.model,
                self.job,
                options,
                among=self._near(options),
                start=self.plan.layout.nodes,
            )
        except PlanImpossible:
            return float("inf")
        return found.prediction.steady_time / self.plan.prediction.steady_time

    def _near(self, options: SearchOptions) -> list[Setting]:
        """The plan's setting and those next to it: the batch, the micro-batches and either place."""
        layout, every = self.plan.layout, settings(self.job, options)
        sizes = _beside(layout.batch, {one.batch for one in every})
        counts = _beside(layout.micro_batches, {one.micro_batches for one in every})
        return [one for one in every if one.batch in sizes and one.micro_batches in counts]

    def left_out(self, name: str) -> LeftOut:
        """Why, by the best found with it: the plan's order with the node at any place in it."""
        cluster, options, layout = self.cluster, self.options, self.plan.layout
        if options.given or (options.nodes is not None and name not in options.nodes):
            return LeftOut(name, float("inf"), "it is not among the nodes to plan with")
        names = [*layout.nodes, name]
        part = cluster.only(names)
        setting = Setting(layout.batch, layout.micro_batches, layout.coordinator != COMMAND, options.ways)
        instance = Tables.of(part, self.model).circulating(self.job, setting, options.memory)
        if not np.isfinite(instance.busy[-1]).any():
            return LeftOut(name, float("inf"), self._no_room(name))
        solved = min(_with_last(instance), key=lambda one: one.value, default=None)
        if solved is None:
            return LeftOut(name, float("inf"), "no links join it with the plan's nodes")
        forced = layout_of(part, self.model, self.job, options.memory, setting, solved)
        ratio = solved.value / self.plan.prediction.step
        if ratio <= 1 + TIE:
            return LeftOut(name, ratio, "with it the job would take as long: fewer nodes are preferred")
        cause = self._cause(name, forced)
        return LeftOut(name, ratio, f"with it the job would take {ratio:.2f} x as long: {cause}")

    def _no_room(self, name: str) -> str:
        layout, node = self.plan.layout, self.cluster.node(name)
        rows = -(-layout.batch // layout.micro_batches)
        held = held_memory(
            self.model,
            self.options.memory,
            blocks=1,
            batch=layout.batch,
            rows=rows,
            slot=self.job.slot,
            embeds=False,
            heads=False,
        )
        need = held.device / self.options.memory.share
        return (
            f"it holds no block: one with its KV needs {need / 1e9:.2f} GB, it has {node.memory / 1e9:.2f} GB"
        )

    def _cause(self, name: str, forced: Layout) -> str:
        """What of a layout with the node is to blame: the bottleneck, or the largest that the node adds."""
        prediction = predict(self.cluster, self.model, self.job, forced, self.options.memory)
        own = [part for part in prediction.parts if name in (part.resource.source, part.resource.target)]
        blamed = max(own, key=lambda part: part.passes)
        if prediction.limit.kind is not Kind.LOOP:
            blamed = next((part for part in own if part.resource == prediction.limit), blamed)
        return self._described(blamed)

    def _described(self, part: Part) -> str:
        resource = part.resource
        link = self.cluster.links.get((resource.source, resource.target))
        if resource.kind in (Kind.LINK, Kind.LEG) and link is not None:
            figures = f"{link.rate * 8 / 1e6:.0f} Mbit/s and {_ms(link.delay)}"
            return f"{resource} ({figures}) takes {_ms(part.passes)}"
        return f"{resource} takes {_ms(part.passes)}"


def _offloading(options: SearchOptions, share: float | None) -> SearchOptions:
    return replace(options, memory=replace(options.memory, offload=share))


def bottleneck_hop(prediction: Prediction) -> tuple[str, str] | None:
    """The link that is the limit, or else the one that adds most to the loop; None with a single stage."""
    if prediction.limit.kind is Kind.LINK:
        return prediction.limit.source, prediction.limit.target
    hops = [part for part in prediction.parts if part.resource.kind is Kind.LINK]
    most = max(hops, key=lambda part: part.passes, default=None)
    return None if most is None else (most.resource.source, most.resource.target)


def _with_last(instance: Instance) -> Iterator[Assignment]:
    """The best of the nodes' order with the last of them at each place of it, and not skipped."""
    others, last = list(range(instance.nodes - 1)), instance.nodes - 1
    for position in range(instance.nodes):
        order = [*others[:position], last, *others[position:]]
        solved = best_partition(_through(instance.permuted(order), position), Objective.CIRCULATING)
        if solved is not None and solved.value < float("inf"):
            yield replace(solved, order=tuple(order[number] for number in solved.order))


def _through(instance: Instance, position: int) -> Instance:
    """The same where the node at a position cannot be skipped: those before it are never last, those behind
    it never first, and no hop passes it by."""
    busy, passes = instance.busy.copy(), instance.passes.copy()
    hops = instance.hop_passes.copy()
    for times in (busy, passes):
        times[:position, [LAST, ONLY]] = np.inf
        times[position + 1 :, [FIRST, ONLY]] = np.inf
    hops[:, :position, position + 1 :] = np.inf
    return replace(instance, busy=busy, passes=passes, hop_passes=hops)


def _beside(value: int, candidates: set[int]) -> set[int]:
    """A value with the candidates next below and above it."""
    below = [one for one in candidates if one < value]
    above = [one for one in candidates if one > value]
    return {value, *sorted(below)[-1:], *sorted(above)[:1]}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
