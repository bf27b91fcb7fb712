"""Instances say what the equations say, for every node, place and number of blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from bbquic.plan.breakeven import Way
from bbquic.plan.build import WAYS, Setting, circulating, pipeline, serial
from bbquic.plan.cluster import COMMAND, AttentionCost
from bbquic.plan.cost import (
    MemoryOptions,
    block_time,
    communication_time,
    ends_time,
    hop_time,
    host_share,
    leg_time,
    load_of,
    overlapped_block_time,
    pipeline_throughput,
    serial_throughput,
    stage_memory,
)
from bbquic.plan.instance import FIRST, LAST, Objective, evaluate
from bbquic.units import Bytes
from clusters import link, mesh, random_cluster, simple_node, small_job, small_model

MEMORY = MemoryOptions(pack_tokens=2)


@pytest.mark.parametrize("seed", range(20))
def test_stages_hops_and_legs_are_the_equations(seed: int) -> None:
    random = Random(seed)
    cluster, model = random_cluster(random, 3, missing=0.3), small_model(5, tied=seed % 2 == 0)
    memory = replace(MEMORY, offload=random.choice([None, None, 0.0, 0.3, 0.5, 1.0]))
    batch = random.randint(1, 40)
    setting = Setting(batch, random.randint(1, batch), at_stage=seed % 3 == 0)
    job = small_job(100)
    load = load_of(job, batch, setting.micro_batches)
    instance = circulating(cluster, model, job, setting, memory)
    for number, node in enumerate(cluster.nodes):
        for place in range(4):
            embeds, heads = bool(place & FIRST), bool(place & LAST)
            for blocks in range(1, 6):
                held = stage_memory(
                    node,
                    model,
                    memory,
                    blocks=blocks,
                    batch=batch,
                    micro_batches=setting.micro_batches,
                    slot=job.slot,
                    embeds=embeds,
                    heads=heads,
                )
                wanted = float("inf")
                if held is not None:
                    each = overlapped_block_time(node, load, host_share(node, held[1], batch))
                    wanted = ends_time(node, load, embeds=embeds, heads=heads) + node.overhead + blocks * each
                assert instance.busy[number, place, blocks] == pytest.approx(wanted)
            assert np.isinf(instance.busy[number, place, 0])
    assert np.array_equal(instance.busy, instance.passes)
    size = load.tokens * model.hidden * model.value_bytes
    for a, sender in enumerate(cluster.nodes):
        for b, receiver in enumerate(cluster.nodes):
            between = cluster.links.get((sender.name, receiver.name)) if a != b else None
            for way, name in enumerate(WAYS):
                hop = hop_time(sender, receiver, between, size, name)
                assert instance.hop_busy[way, a, b] == pytest.approx(hop.busy)
                assert instance.hop_passes[way, a, b] == pytest.approx(hop.passes)
            if setting.at_stage:
                continue
            assert instance.lead[a] == leg(cluster.links.get((COMMAND, sender.name)), load, back=False)
            assert instance.back[a, b] == leg(cluster.links.get((receiver.name, COMMAND)), load, back=True)


def leg(found: object, load: object, *, back: bool) -> object:
    if found is None:
        return float("inf")
    return pytest.approx(leg_time(found, load, back=back))  # type: ignore[arg-type]


def test_some_of_these_offload_and_some_do_not_fit() -> None:
    """Else the test above would say little."""
    clusters = [random_cluster(Random(seed), 3) for seed in range(20)]
    setting = Setting(12, 3)
    busy = [
        circulating(one, small_model(5), small_job(100), setting, MEMORY).busy[:, :, 1:] for one in clusters
    ]
    finite = np.concatenate([np.isfinite(one).ravel() for one in busy])
    assert 0.2 < finite.mean() < 0.9
    found = [
        stage_memory(
            node,
            small_model(5),
            MEMORY,
            blocks=2,
            batch=12,
            micro_batches=3,
            slot=20,
            embeds=False,
            heads=False,
        )
        for one in clusters
        for node in one.nodes
    ]
    assert sum(1 for one in found if one is not None and one[1] > 0) > 2


def test_a_coordinator_on_the_first_stage_s_node_waits_for_the_last_stage_s_link_to_it() -> None:
    others = {("b", "a"): link(1e6, 0.03), ("a", "b"): link(1e6, 0.01), (COMMAND, "a"): link(1e6, 0.2)}
    cluster = mesh((simple_node("a"), simple_node("b")), 1e6, 0.08, others)
    job, setting = small_job(), Setting(4, 2, at_stage=True)
    there = circulating(cluster, small_model(), job, setting, MEMORY)
    load = load_of(job, 4, 2)
    assert there.lead.tolist() == [0.0, 0.0]
    assert there.back[0, 1] == pytest.approx(leg_time(others["b", "a"], load, back=True))
    assert there.back[1, 0] == pytest.approx(leg_time(others["a", "b"], load, back=True))
    assert there.back[0, 0] == there.back[1, 1] == 0.0
    here = circulating(cluster, small_model(), job, Setting(4, 2), MEMORY)
    assert here.lead[0] == pytest.approx(leg_time(others[COMMAND, "a"], load))
    assert here.back[0, 0] == here.back[1, 0] == pytest.approx(leg_time(link(1e6, 0.08), load, back=True))


def test_a_coordinator_cannot_be_where_the_command_does_not_reach() -> None:
    cluster = mesh((simple_node("a"), simple_node("b")), other={("a", COMMAND): None})
    instance = circulating(cluster, small_model(), small_job(), Setting(4, 2, at_stage=True), MEMORY)
    assert np.isinf(instance.lead).tolist() == [True, False]


def test_ways_are_those_of_the_setting_in_its_order() -> None:
    cluster = random_cluster(Random(5), 3, missing=0)
    every = circulating(cluster, small_model(), small_job(), Setting(4, 2), MEMORY)
    setting = Setting(4, 2, ways=(Way.REC, Way.RAW))
    some = circulating(cluster, small_model(), small_job(), setting, MEMORY)
    assert np.array_equal(some.hop_busy, every.hop_busy[[2, 0]])


def test_the_paper_s_objectives_are_its_throughputs_turned_round() -> None:
    cluster = random_cluster(Random(3), 3, missing=0)
    model, blocks, order = small_model(6), (1, 3, 2), (2, 0, 1)
    nodes = [cluster.nodes[number] for number in order]

    def compute(rows: float) -> list[float]:
        return [count * block_time(node, rows, 30) for node, count in zip(nodes, blocks, strict=True)]

    def hops(rows: float) -> list[float]:
        pairs = pairwise(nodes)
        return [communication_time(cluster.links[a.name, b.name], rows * 200) for a, b in pairs]

    one = evaluate(serial(cluster, model, 12, 30), Objective.SUM, order, blocks)
    assert 12 / one.value == pytest.approx(serial_throughput(12, compute(12), hops(12)))
    many = evaluate(pipeline(cluster, model, 12, 4, 30), Objective.PIPELINE, order, blocks)
    assert 12 / many.value == pytest.approx(pipeline_throughput(12, 4, compute(3), hops(3)))


def test_the_paper_s_bounds_on_memory_and_its_alpha() -> None:
    node = simple_node(
        "a",
        memory=20_000,
        offloads=True,
        host_memory=Bytes(6_000),
        attention=AttentionCost(0.0, 0.1, 0.0),
        attention_host=AttentionCost(0.0, 1.0, 0.0),
    )
    cluster, memory = mesh((node,)), MemoryOptions(share=1.0, pack_tokens=1)
    stages = serial(cluster, small_model(), 20, 30, memory=memory, slot=20).busy[0, 0]
    # 21 tokens: workspace 26,460 is too much; with pipelining 2 rows: 3,780, buffers 3,600
    assert np.isinf(stages).all()
    stages = pipeline(cluster, small_model(), 20, 10, 30, memory=memory, slot=20).busy[0, 0]
    # left for KV: 11,620 with a block, 10,620 with two, 9,620 with three; a slot takes 200, 400, 600
    alpha = 10 / 20  # 20 slots of 600 are 12,000: 16 fit, of each micro-batch one whole
    wanted = [np.inf, 0.21, 0.42, 3 * (0.01 + (1 - alpha) * 0.2 + alpha * 2.0)]
    assert stages[:4] == pytest.approx(wanted)
    # four blocks: 8,620 hold 10 of 800, and the other ten do not fit the host
    assert np.isinf(stages[4])
