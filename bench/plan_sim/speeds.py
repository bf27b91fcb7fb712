"""How long planning takes, and how close it comes where the optimum is known by construction."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

from bbquic.plan.build import Setting, circulating, pipeline, serial
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import COMMAND, Cluster, LinkProfile
from bbquic.plan.cost import WIRE, load_of
from bbquic.plan.instance import Objective
from bbquic.plan.partition import best_partition
from bbquic.plan.search import search
from bbquic.units import Bytes, BytesPerSecond, Seconds
from bench.baselines.helix import solve
from bench.baselines.settle import MEMORY, SEATS, most_blocks
from bench.plan_sim.clusters import CODECS, GB, JOBS, MBIT, MODELS, Case, links, machine, profile

LARGE = MODELS[-1]  # 80 blocks
JOB = JOBS[0]
ROOMY = 160 * GB  # no node is short of memory: the most to choose from
NODES = 8
MANY = 64
POOR = LinkProfile(BytesPerSecond(5 * MBIT), Seconds(0.1))
GOOD = LinkProfile(BytesPerSecond(500 * MBIT), Seconds(0.005))
LEG = LinkProfile(BytesPerSecond(100 * MBIT), Seconds(0.02))


def partition_times(instances: int = 5, repeats: int = 20) -> dict[str, float]:
    """Median ms of `best_partition`, 8 nodes and 80 blocks in a given order, for the three objectives."""
    kinds: dict[Objective, Callable[[Case], Any]] = {
        Objective.SUM: lambda case: serial(case.cluster, case.model, 16, 128.0),
        Objective.PIPELINE: lambda case: pipeline(case.cluster, case.model, 16, 4, 128.0),
        Objective.CIRCULATING: lambda case: circulating(
            case.cluster, case.model, case.job, Setting(16, 4), MEMORY
        ),
    }
    figures = {}
    for objective, build in kinds.items():
        times = []
        for seed in range(instances):
            work = partial(best_partition, build(random_case(NODES, seed)), objective)
            work()
            times += [_timed(work) for _ in range(repeats)]
        figures[f"partition_{objective}_ms"] = 1e3 * statistics.median(times)
    return figures


def search_times(count: int = 5) -> dict[str, float]:
    """Longest whole search for 8 nodes, seconds."""
    cases = [random_case(NODES, seed) for seed in range(count)]
    times = [_timed(partial(search, case.cluster, case.model, case.job)) for case in cases]
    return {"search_8_s": max(times), "search_8_median_s": statistics.median(times)}


def helix_times(count: int = 3, limit: float = 60.0) -> dict[str, float]:
    """Helix' program on the first of the same clusters: longest seconds, and how many it proved."""
    flows = [
        solve(case.cluster, case.model, case.job, SEATS[0], limit=limit)
        for case in (random_case(NODES, seed) for seed in range(count))
    ]
    found = [flow for flow in flows if flow is not None]
    return {
        "helix_8_s": max((flow.seconds for flow in found), default=limit),
        "helix_8_found": len(found),
        "helix_8_proven": sum(flow.proven for flow in found),
    }


def planted(counts: tuple[int, ...] = (4, 8, 12), seed: int = 1) -> dict[str, float]:
    """Whole search for 64 nodes: the longest in seconds, and the largest loss against planted optima."""
    losses, times = [], []
    for stages in counts:
        case, order = planted_case(stages, seed)
        best = search(case.cluster, case.model, case.job, SearchOptions(nodes=order, ordered=True))
        began = perf_counter()
        found = search(case.cluster, case.model, case.job)
        certify(case, stages, best.prediction.steady_time)
        times.append(perf_counter() - began)
        losses.append(found.prediction.steady_time / best.prediction.steady_time - 1)
    return {"search_64_s": max(times), "search_64_loss": max(losses)}


def random_case(nodes: int, seed: int) -> Case:
    source = random.Random(seed)
    names = [f"n{number}" for number in range(nodes)]
    machines = tuple(replace(machine(name, LARGE, source), memory=Bytes(int(ROOMY))) for name in names)
    return Case(f"{nodes} nodes, seed {seed}", Cluster(machines, links(names, source)), LARGE, JOB)


def planted_case(stages: int, seed: int, count: int = MANY) -> tuple[Case, tuple[str, ...]]:
    """A case and the order that is best in it; `certify` proves that.

    All machines and legs are alike, and one holds a little more than 1 / `stages` of the model. Good links
    lead along the planted order; all others form decoys, good chains of half as many. Between chains links
    are poor.
    """
    source = random.Random(f"{seed} {stages} {count}")
    names = [f"n{number:02}" for number in range(count)]
    source.shuffle(names)
    order, rest, half = tuple(names[:stages]), names[stages:], max(1, stages // 2)
    decoys = [rest[at : at + half] for at in range(0, len(rest), half)]
    memory = (LARGE.blocks / stages + 0.5) * (LARGE.block_weights + JOB.slot * LARGE.kv_bytes * 64)
    memory = (memory + LARGE.embed_weights + 1 * GB) / MEMORY.share
    machines = tuple(profile(name, LARGE, 400 * GB, memory) for name in sorted(names))
    found = {(a, b): POOR for a in names for b in names if a != b}
    found |= {pair: GOOD for chain in (order, *decoys) for pair in pairwise(chain)}
    found |= {pair: LEG for name in names for pair in ((COMMAND, name), (name, COMMAND))}
    return Case(f"{count} nodes, {stages} planted", Cluster(machines, found), LARGE, JOB), order


def certify(case: Case, stages: int, planted_time: float) -> None:
    """That nothing beats the planted order: a decoy does not hold the model at any batch, and whoever uses a
    poor link is kept longer by its bytes alone. Raises: AssertionError."""
    node, model, job = case.cluster.nodes[0], case.model, case.job
    assert max(1, stages // 2) * most_blocks(node, model, job, 1) < model.blocks
    a_token = load_of(job, 1, 1).tokens * model.hidden * model.value_bytes
    least = min(ratio for _, ratio, _ in CODECS) * a_token * WIRE / POOR.rate
    assert job.sequences * job.output * least > planted_time


def _timed(work: Callable[[], Any]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began
