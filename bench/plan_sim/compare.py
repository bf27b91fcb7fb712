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
from bbquic.plan.finalists import search_job
from bbquic.plan.search import search
from bbquic.plan.simulate import simulate_steps
from bbquic.plan.simulate_job import JobOptions, simulate_job
from bbquic.units import Seconds
from bench.baselines import even, helix, petals
from bench.baselines.settle import MEMORY
from bench.plan_sim.clusters import Case, cases

OURS = "planner"
LEAST = 0.999  # what the planner counts as equal
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


def planner_of_jobs(cluster: Cluster, model: ModelSizes, job: JobShape) -> Layout:
    return search_job(cluster, model, job, SearchOptions(memory=MEMORY)).layout


def run(
    case: Case, tried: Mapping[str, Policy], *, to_the_end: bool = False, options: JobOptions | None = None
) -> Outcome:
    """`to_the_end` simulates whole jobs too, with `options`, which takes seconds."""
    found = {name: policy(case.cluster, case.model, case.job) for name, policy in tried.items()}
    layouts = {name: layout for name, layout in found.items() if layout is not None}
    to_end = {**layouts, OURS: planner_of_jobs(case.cluster, case.model, case.job)} if to_the_end else {}
    return Outcome(
        case.name,
        layouts,
        {name: steady(case, layout) for name, layout in layouts.items()},
        {name: whole(case, layout, options) for name, layout in to_end.items()},
    )


def steady(case: Case, layout: Layout) -> Seconds:
    step = simulate_steps(case.cluster, case.model, case.job, layout).step
    return steady_time(case.job, layout.batch, step)


def whole(case: Case, layout: Layout, options: JobOptions | None = None) -> Seconds:
    given = sequences(case.job, case.name)
    return simulate_job(case.cluster, case.model, layout, given, options=options).seconds


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


def compare(
    count: int = 200,
    *,
    wholes: int = 40,
    limit: float = 3.0,
    options: JobOptions | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Figures by name. For each other policy: how often it finds a layout, its time over the planner's
    (least and geometric mean; at the steady pace, and to the end for the first `wholes` clusters), and on how
    many clusters the planner is slower by more than a thousandth, which is what it counts as equal."""
    outcomes: list[Outcome] = []
    for case in cases(count):
        outcomes.append(run(case, policies(limit), to_the_end=len(outcomes) < wholes, options=options))
        if len(outcomes) % 20 == 0:
            say(f"{len(outcomes)} of {count} clusters")
    figures: dict[str, Any] = {"clusters": len(outcomes)}
    for name in list(policies(limit))[1:]:
        figures |= {f"{name}_{key}": value for key, value in _beside(outcomes, name).items()}
    return figures


def _beside(outcomes: list[Outcome], name: str) -> dict[str, float]:
    figures: dict[str, float] = {"found": sum(name in one.layouts for one in outcomes)}
    for kind in ("steady", "whole"):
        times = [one.steady if kind == "steady" else one.whole for one in outcomes]
        ratios = [one[name] / one[OURS] for one in times if name in one]
        if ratios:
            figures |= {
                f"{kind}_least": min(ratios),
                f"{kind}_mean": geometric_mean(ratios),
                f"{kind}_lost": sum(ratio < LEAST for ratio in ratios),
            }
    return figures


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
