"""A search finds what trying everything finds, in any order of the nodes, and never more than memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from clusters import link, mesh, random_cluster, simple_node, small_job, small_model

from bbquic.errors import ConfigError, PlanImpossible
from bbquic.plan.bounds import least_step
from bbquic.plan.breakeven import Way
from bbquic.plan.build import Setting, Tables
from bbquic.plan.candidates import MOST_ROWS, SearchOptions, batches, settings
from bbquic.plan.cluster import COMMAND, Cluster, JobShape, Layout, ModelSizes, PlannedStage
from bbquic.plan.cost import MemoryOptions, held_memory, stage_memory, steady_time
from bbquic.plan.impossible import cheapest_change
from bbquic.plan.instance import FIRST, LAST, Assignment, Objective, evaluate, place_of
from bbquic.plan.paths import best_path
from bbquic.plan.predict import predict
from bbquic.plan.search import TIE, Plan, search
from bbquic.plan.whatif import with_memory
from bbquic.units import Bytes

MEMORY = MemoryOptions(share=1.0, pack_tokens=1)
OPTIONS = SearchOptions(memory=MEMORY)


def assignments(nodes: int, blocks: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every order of every subset, with all splits."""
    for count in range(1, min(nodes, blocks) + 1):
        for order in permutations(range(nodes), count):
            for inner in combinations(range(1, blocks), count - 1):
                yield order, tuple(b - a for a, b in pairwise((0, *inner, blocks)))


def least_time(cluster: Cluster, model: ModelSizes, job: JobShape, options: SearchOptions) -> float:
    """By trying everything."""
    least = float("inf")
    for setting in settings(job, options):
        instance = Tables.of(cluster, model).circulating(job, setting, options.memory)
        for order, blocks in assignments(len(cluster.nodes), model.blocks):
            if any(
                instance.busy[node, place_of(at, len(order)), held] == float("inf")
                for at, (node, held) in enumerate(zip(order, blocks, strict=True))
            ):
                continue
            value = evaluate(instance, Objective.CIRCULATING, order, blocks).value
            least = min(least, steady_time(job, setting.batch, value))
    return least


def check(cluster: Cluster, model: ModelSizes, job: JobShape, plan: Plan, options: SearchOptions) -> None:
    """The plan's layout is whole, fits, and is predicted at what the plan says."""
    layout, memory = plan.layout, options.memory
    assert [block for one in layout.stages for block in range(one.first, one.stop)] == list(
        range(model.blocks)
    )
    assert len(set(layout.nodes)) == len(layout.nodes) == len(layout.ways) + 1 == len(plan.memory)
    assert layout.coordinator in (COMMAND, layout.nodes[0])
    assert 1 <= layout.micro_batches <= layout.batch <= job.sequences
    for position, (stage, held) in enumerate(zip(layout.stages, plan.memory, strict=True)):
        node, place = cluster.node(stage.node), place_of(position, len(layout.stages))
        found = stage_memory(
            node,
            model,
            memory,
            blocks=stage.blocks,
            batch=layout.batch,
            rows=-(-layout.batch // layout.micro_batches),
            slot=job.slot,
            embeds=bool(place & FIRST),
            heads=bool(place & LAST),
        )
        assert found == (held, stage.offloaded)
        assert held.device <= node.memory * memory.share
        assert held.host_kv <= node.host_memory * memory.share
    assert set(plan.left_out) == {node.name for node in cluster.nodes} - set(layout.nodes)
    assert predict(cluster, model, job, layout, memory) == plan.prediction


@pytest.mark.parametrize("part", range(8))
def test_a_search_is_as_good_as_trying_everything(part: int) -> None:
    possible = 0
    for seed in range(30 * part, 30 * part + 30):
        random = Random(seed)
        cluster = random_cluster(random, random.randint(1, 3), missing=random.choice([0, 0.3]))
        model, job = small_model(random.randint(1, 4)), small_job(random.randint(1, 3))
        wanted = least_time(cluster, model, job, OPTIONS)
        if wanted == float("inf"):
            with pytest.raises(PlanImpossible):
                search(cluster, model, job, OPTIONS)
            continue
        possible += 1
        plan = search(cluster, model, job, OPTIONS)
        assert wanted * (1 - 1e-9) <= plan.prediction.steady_time <= wanted * (1 + TIE + 1e-9)
        check(cluster, model, job, plan, OPTIONS)
    assert possible > 15
