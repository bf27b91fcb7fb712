"""The planner's layouts beside the others' in simulation, on many clusters."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import Cluster, JobShape, Layout, ModelSizes
from bbquic.plan.cost import steady_time
from bbquic.plan.search import search
from bbquic.plan.simulate import simulate_steps
from bbquic.plan.simulate_job import simulate_job
from bbquic.units import Seconds
from bench.baselines import even, helix, petals
from bench.baselines.settle import MEMORY
from bench.plan_sim.clusters import Case, cases

OURS = "planner"
Policy = Callable[[Cluster, ModelSizes, JobShape], Layout | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a case's job under each policy that found a layout: at its steady pace, and from its first
    pack to its last token."""

    case: str
    layouts: Mapping[str, Layout]
    steady: Mapping[str, Seconds]
    whole: Mapping[str, Seconds]


def policies(limit: float) -> dict[str, Policy]:
    """`limit`: seconds for Helix' program."""
    return {OURS: planner, "even": even, "petals": petals, "helix": partial(helix, limit=limit)}


def planner(cluster: Cluster, model: ModelSizes, job: JobShape) -> Layout:
    return search(cluster, model, job, SearchOptions(memory=MEMORY)).layout


def run(case: Case, tried: Mapping[str, Policy]) -> Outcome:
    found = {name: policy(case.cluster, case.model, case.job) for name, policy in tried.items()}
    layouts = {name: layout for name, layout in found.items() if layout is not None}
    return Outcome(
        case.name,
        layouts,
        {name: steady(case, layout) for name, layout in layouts.items()},
        {name: whole(case, layout) for name, layout in layouts.items()},
    )


def steady(case: Case, layout: Layout) -> Seconds:
    step = simulate_steps(case.cluster, case.model, case.job, layout).step
    return steady_time(case.job, layout.batch, step)


def whole(case: Case, layout: Layout) -> Seconds:
    return simulate_job(case.cluster, case.model, layout, sequences(case.job, case.name)).seconds


def sequences(job: JobShape, seed: str) -> list[tuple[int, int]]:
    """Prompts within a third of the mean, answers up to the longest, of the job's means."""
    source = random.Random(seed)
    low = max(1.0, 2 * job.output - job.longest)
    return [
        (
            max(1, round(job.prompt * source.uniform(2 / 3, 4 / 3))),
            max(1, round(source.uniform(low, job.longest))),
        )
        for _ in range(job.sequences)
    ]


def compare(count: int = 200, *, limit: float = 5.0, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Figures by name. For each other policy: how often it finds a layout, its time over the planner's
    (least and geometric mean, steady and whole job), and on how many clusters the planner is slower by more
    than a thousandth, which is what the planner counts as equal."""
    outcomes = []
    for case in cases(count):
        outcomes.append(run(case, policies(limit)))
        if len(outcomes) % 20 == 0:
            say(f"{len(outcomes)} of {count} clusters")
    figures: dict[str, Any] = {"clusters": len(outcomes)}
    for name in list(policies(limit))[1:]:
        figures |= {f"{name}_{key}": value for key, value in _beside(outcomes, name).items()}
    return figures


def _beside(outcomes: list[Outcome], name: str) -> dict[str, float]:
    both = [one for one in outcomes if name in one.layouts]
    if not both:
        return {"found": 0}
    steady_ratios = [one.steady[name] / one.steady[OURS] for one in both]
    whole_ratios = [one.whole[name] / one.whole[OURS] for one in both]
    return {
        "found": len(both),
        "steady_least": min(steady_ratios),
        "steady_mean": geometric_mean(steady_ratios),
        "whole_least": min(whole_ratios),
        "whole_mean": geometric_mean(whole_ratios),
        "lost": sum(ratio < 0.999 for ratio in steady_ratios),
        "lost_whole": sum(ratio < 0.999 for ratio in whole_ratios),
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
