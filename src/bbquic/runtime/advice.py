"""Whether another layout would repay moving to it, looked at now and then while a planned job runs.

A plan rests on what was measured before the job. Where its links or its pace turn out otherwise, the search
is asked again with the new figures, and `plan.controller.relayout` weighs what it finds against the move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bbquic.plan.cluster import COMMAND, Cluster, Layout, LinkProfile
from bbquic.plan.controller import Load, MoveCost, Prospect, Relayout, relayout
from bbquic.plan.cost import Load as PackLoad
from bbquic.plan.predict import passage, predict
from bbquic.plan.search import Plan
from bbquic.runtime.limits import COORDINATOR
from bbquic.runtime.planning import Question
from bbquic.runtime.telemetry import JobStatistics
from bbquic.units import BytesPerSecond, Seconds

DIFFERS = 1.3  # times more or less than planned: less is what measurements err by
LOOK = Seconds(30.0)  # between two looks
SETTLED = Seconds(60.0)  # of a job: before, its pace is not the steady one
DISK = BytesPerSecond(500e6)  # of a node whose loading was not seen


PACE = ("", "")  # beside pairs of names
Figures = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Advisor:
    """One job's. `loading` is how fast each node loaded its weights, in bytes a second."""

    question: Question
    plan: Plan
    loading: Mapping[str, float] = field(default_factory=dict)

    def measured_cluster(self, seen: JobStatistics) -> Cluster:
        """The cluster with what the job shows of its links now; the others as they were."""
        links = dict(self.question.cluster.links)
        for pair, rate in _believed(seen).items():
            known = links.get(pair)
            if known is not None:
                links[pair] = LinkProfile(rate, known.delay, known.loss)
        return Cluster(self.question.cluster.nodes, links)

    def planned(self) -> Figures:
        """What the plan rests on: rates of links, and the pace in tokens a second."""
        links = {pair: float(link.rate) for pair, link in self.question.cluster.links.items()}
        return {**links, PACE: self.plan.prediction.tokens_per_second}

    def advise(self, seen: JobStatistics, tokens_left: float) -> Relayout | None:
        """What a search finds now; None where it is the same layout. Takes as long as a search."""
        pace, rows = seen.decode_tokens_per_second, seen.in_flight_sequences
        if not pace or not rows:
            return None
        question = replace(self.question, cluster=self.measured_cluster(seen))
        other, present = question.answer(), self.plan.layout
        if _same(other.layout, present):
            return None
        model, job, memory = question.model, question.job, question.options.memory
        expected = predict(question.cluster, model, job, present, memory)
        prospect = Prospect(
            measured=Seconds(rows / pace),
            predicted=expected.step,
            batch=rows,
            other=other.prediction.step,
            other_batch=min(other.layout.batch, job.sequences),
        )
        return relayout(prospect, self._cost(question, other.layout, rows), tokens_left)

    def _cost(self, question: Question, layout: Layout, rows: int) -> MoveCost:
        job, chunk = question.job, question.options.memory.pack_tokens
        parts = passage(question.cluster, question.model, layout, PackLoad(0.0, 0.0, chunk, job.read_context))
        live = rows * (job.prompt + job.output / 2)
        return MoveCost(self._loads(layout), round(live), chunk / max(part.busy for part in parts))

    def _loads(self, layout: Layout) -> tuple[Load, ...]:
        """Blocks that their new nodes do not hold yet, from those nodes' disks."""
        held = {one.node: set(range(one.first, one.stop)) for one in self.plan.layout.stages}
        known = min(self.loading.values(), default=float(DISK))
        return tuple(
            Load(
                one.node,
                from_disk=self.question.model.block_weights
                * len(set(range(one.first, one.stop)) - held.get(one.node, set())),
                disk_rate=self.loading.get(one.node, known),
            )
            for one in layout.stages
        )


async def advising(
    advisor: Advisor,
    look: Callable[[], JobStatistics],
    tell: Callable[[str], None],
    *,
    interval: Seconds = LOOK,
) -> None:
    """Look every `interval` seconds, until cancelled; `tell` hears what another layout would bring.

    A search takes from the cores that the job may compute on, so there is one only where something differs
    from what the plan, or the search before, went by.
    """
    known = advisor.planned()
    while True:
        await asyncio.sleep(interval)
        seen = look()
        now = shown(seen)
        if not differs(now, known):
            continue
        known = {**known, **now}
        found = await asyncio.to_thread(advisor.advise, seen, tokens_left(seen, advisor.question.job.output))
        if found is not None:
            tell(found.reason)


def shown(seen: JobStatistics) -> Figures:
    """What a job shows of what a plan rests on: nothing before its first prompts are behind it."""
    if seen.elapsed < SETTLED:
        return {}
    rates = {pair: float(rate) for pair, rate in _believed(seen).items()}
    pace = seen.decode_tokens_per_second
    return {**rates, PACE: pace} if pace else rates


def differs(now: Figures, known: Figures) -> bool:
    """Whether a figure is DIFFERS times more or less than it was."""
    both = [(now[key], known[key]) for key in now if key in known]
    return any(not old / DIFFERS <= new <= old * DIFFERS for new, old in both)


def tokens_left(seen: JobStatistics, output: float) -> float:
    """Of answers: lines without a record, each as long as those so far, or as planned."""
    if seen.total is None:
        return 0.0
    mean = seen.generated_tokens / seen.done if seen.done else output
    return max(0, seen.total - seen.settled) * mean


def _believed(seen: JobStatistics) -> dict[tuple[str, str], BytesPerSecond]:
    """Rates of links that the job saw full, by the names that plans have."""
    return {
        (_planned(hop.source), _planned(hop.target)): hop.link_rate
        for hop in seen.hops
        if hop.link_rate and not hop.rate_is_lower_bound
    }


def _planned(name: str) -> str:
    return COMMAND if name == COORDINATOR else name


def _same(a: Layout, b: Layout) -> bool:
    """Whether the same blocks lie on the same nodes: the rest follows measurements anyway."""

    def places(layout: Layout) -> Sequence[tuple[str, int, int]]:
        return [(one.node, one.first, one.stop) for one in layout.stages]

    return places(a) == places(b)
