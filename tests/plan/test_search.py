"""A search finds what trying everything finds, in any order of the nodes, within what memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest

from bbquic.errors import ConfigError, PlanImpossible
from bbquic.plan.bounds import least_step
from bbquic.plan.breakeven import Way
from bbquic.plan.build import Setting, Tables
from bbquic.plan.candidates import MOST_ROWS, SearchOptions, batches, settings
from bbquic.plan.cluster import COMMAND, AttentionCost, Cluster, Curve, JobShape, LinkProfile, ModelSizes
from bbquic.plan.cost import MemoryOptions, held_memory, stage_memory, steady_time
from bbquic.plan.impossible import cheapest_change
from bbquic.plan.instance import FIRST, LAST, Assignment, Objective, evaluate, place_of
from bbquic.plan.paths import best_path
from bbquic.plan.predict import predict
from bbquic.plan.search import TIE, Plan, search
from bbquic.plan.whatif import with_memory
from bbquic.units import Bytes
from clusters import link, mesh, random_cluster, simple_node, small_job, small_model

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
            micro_batches=layout.micro_batches,
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


@pytest.mark.parametrize("seed", range(12))
def test_no_value_is_below_its_bound(seed: int) -> None:
    random = Random(seed)
    cluster, model = random_cluster(random, random.randint(1, 5)), small_model(random.randint(1, 12))
    for setting in settings(small_job(24), OPTIONS):
        instance = Tables.of(cluster, model).circulating(small_job(24), setting, MEMORY)
        solved: Assignment | None = best_path(instance, Objective.CIRCULATING)
        bound = least_step(instance)
        assert solved is None or bound <= solved.value * (1 + 1e-9)
        if solved is not None and len(cluster.nodes) == 1:
            assert bound == pytest.approx(solved.value)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_nodes_in_a_file_decides_nothing(seed: int) -> None:
    random = Random(seed)
    cluster = random_cluster(random, 5 if seed < 4 else 10, missing=0)
    model, job = small_model(8), small_job(12)
    plan = search(cluster, model, job, OPTIONS)
    check(cluster, model, job, plan, OPTIONS)
    names = [node.name for node in cluster.nodes]
    random.shuffle(names)
    again = search(cluster.only(names), model, job, OPTIONS)
    assert (again.layout, again.prediction) == (plan.layout, plan.prediction)


def offloading(host: float) -> Cluster:
    """Three like nodes far apart; two hold `small_model(6)` with some keys of four sequences on hosts."""
    nodes = tuple(
        simple_node(
            name,
            memory=18_400,
            attention=AttentionCost(0.0, 0.0001, 0.0),
            attention_host=AttentionCost(0.0, host, 0.0),
            host_memory=Bytes(20_000),
            offloads=True,
        )
        for name in "abc"
    )
    return mesh(nodes, 1e6, 0.05)


@pytest.mark.parametrize(("host", "stages"), [(0.001, 2), (1.0, 3)])
def test_two_nodes_that_offload_are_chosen_over_three_that_do_not_where_that_is_better(
    host: float, stages: int
) -> None:
    cluster, model, job = offloading(host), small_model(6), small_job(4, slot=100)
    options = replace(OPTIONS, batch=4, ways=(Way.RAW,))
    plan = search(cluster, model, job, options)
    check(cluster, model, job, plan, options)
    assert len(plan.layout.stages) == stages
    assert any(stage.offloaded for stage in plan.layout.stages) == (stages == 2)
    assert plan.prediction.steady_time == pytest.approx(least_time(cluster, model, job, options), rel=TIE)
    without = replace(options, memory=replace(MEMORY, offload=0.0))
    three = search(cluster, model, job, without)
    assert len(three.layout.stages) == 3
    assert three.prediction.steady_time == pytest.approx(least_time(cluster, model, job, without), rel=TIE)
    assert (three.prediction.steady_time > plan.prediction.steady_time) == (stages == 2)


@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_an_offload_that_is_given_is_every_stage_s_and_what_is_found_the_best_with_it(share: float) -> None:
    cluster, model, job = offloading(0.001), small_model(6), small_job(4, slot=100)
    options = replace(OPTIONS, batch=4, ways=(Way.RAW,), memory=replace(MEMORY, offload=share))
    plan = search(cluster, model, job, options)
    check(cluster, model, job, plan, options)
    least = round(share * 4)
    assert all(least <= stage.offloaded <= 4 for stage in plan.layout.stages)
    assert plan.prediction.steady_time == pytest.approx(least_time(cluster, model, job, options), rel=TIE)


def test_nor_does_it_among_nodes_that_are_alike() -> None:
    nodes = tuple(simple_node(name, memory=20_000) for name in "abcd")
    plans = [search(mesh(order), small_model(12), small_job(4), OPTIONS) for order in (nodes, nodes[::-1])]
    assert plans[0].layout == plans[1].layout


def test_candidates_are_powers_of_two_and_halfway_and_the_whole_job() -> None:
    assert batches(small_job(20), SearchOptions()) == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert batches(small_job(10_000), SearchOptions())[-3:] == (2048, 3072, MOST_ROWS)
    assert batches(small_job(20), SearchOptions(batch=5)) == (5,)
    assert batches(small_job(20), SearchOptions(batch=50)) == (20,)
    every = settings(small_job(10_000, prompt=800), SearchOptions())
    assert {(one.batch, one.micro_batches) for one in every} >= {(1, 1), (3072, 1), (MOST_ROWS, 32)}
    assert all(one.micro_batches <= one.batch for one in every)
    assert Setting(MOST_ROWS, 1) not in every  # with 512 prompt tokens beside its rows a pack is too large
    assert {one.at_stage for one in settings(small_job(20), SearchOptions(at_stage=True))} == {True}


def test_a_far_command_leaves_the_coordinator_to_the_first_stage_s_node() -> None:
    nodes = tuple(simple_node(name, block=0.001, memory=13_000) for name in "ab")
    near, far = (mesh(nodes, 1e6, 0.03, legs(delay)) for delay in (0.001, 0.08))
    model, job = small_model(8), small_job(4)
    assert search(near, model, job, OPTIONS).layout.coordinator == COMMAND
    plan = search(far, model, job, OPTIONS)
    assert plan.layout.coordinator == plan.layout.nodes[0]
    stays = search(far, model, job, replace(OPTIONS, at_stage=False))
    assert stays.layout.coordinator == COMMAND
    assert stays.prediction.steady_time > 1.5 * plan.prediction.steady_time


def legs(delay: float) -> dict[tuple[str, str], LinkProfile | None]:
    return {pair: link(1e6, delay) for name in "ab" for pair in ((COMMAND, name), (name, COMMAND))}


def test_a_slow_node_and_one_behind_a_slow_link_are_left_out() -> None:
    fast = tuple(simple_node(name, block=0.01, memory=16_000) for name in ("a", "b"))
    slow = simple_node("slow", block=1.0)
    cut_off = simple_node("cut off", block=0.01, memory=16_000)
    others = {
        pair: link(100.0)
        for name in (COMMAND, "a", "b", "slow")
        for pair in ((name, "cut off"), ("cut off", name))
    }
    cluster = mesh((slow, cut_off, *fast), 1e6, 0.001, others)
    plan = search(cluster, small_model(8), small_job(8), OPTIONS)
    assert sorted(plan.layout.nodes) == ["a", "b"]
    assert plan.left_out == ("slow", "cut off")


def test_equals_go_to_fewer_nodes_a_smaller_batch_and_fewer_micro_batches_in_the_command_s_process() -> None:
    """Two like nodes without distance, one pack at a time, where time is by row alone: nothing matters."""
    nodes = tuple(simple_node(name, mlp=Curve(((0, 0.0), (1, 0.01)))) for name in "ab")
    cluster = mesh(nodes, 1e15)
    plan = search(cluster, small_model(1), small_job(8, prompt=0), OPTIONS)
    layout = plan.layout
    assert (layout.nodes, layout.batch, layout.micro_batches) == (("a",), 1, 1)
    assert layout.coordinator == COMMAND


def test_what_is_given_is_kept() -> None:
    cluster, model, job = random_cluster(Random(1), 4, missing=0), small_model(8), small_job(12)
    roomy = Cluster(tuple(replace(node, memory=Bytes(10**6)) for node in cluster.nodes), cluster.links)
    order = ("n2", "n0", "n3")
    plan = search(roomy, model, job, replace(OPTIONS, nodes=order, ordered=True))
    assert plan.layout.nodes == order
    assert plan.left_out == ("n1",)
    split = search(roomy, model, job, replace(OPTIONS, nodes=order, split=(1, 5, 2)))
    assert [stage.blocks for stage in split.layout.stages] == [1, 5, 2]
    assert split.prediction.steady_time >= plan.prediction.steady_time
    some = search(roomy, model, job, replace(OPTIONS, nodes=("n3", "n1")))
    assert set(some.layout.nodes) <= {"n1", "n3"}
    fixed = replace(
        OPTIONS, nodes=order, ordered=True, batch=5, micro_batches=3, ways=(Way.RAW,), at_stage=True
    )
    layout = search(roomy, model, job, fixed).layout
    assert (layout.batch, layout.micro_batches, layout.coordinator) == (5, 3, "n2")
    assert set(layout.ways) == {Way.RAW}
    free = search(roomy, model, job, OPTIONS)
    for one in (plan, split, some):
        assert one.prediction.steady_time >= free.prediction.steady_time * (1 - TIE)


def test_an_order_and_a_split_that_are_given_are_the_best_of_theirs() -> None:
    model, job = small_model(5), small_job(3)
    for seed in range(20):
        cluster = random_cluster(Random(seed), 3, missing=0)
        options = replace(OPTIONS, nodes=("n2", "n0", "n1"), ordered=True)
        instances = [
            (one, Tables.of(cluster.only(options.nodes or ()), model).circulating(job, one, MEMORY))
            for one in settings(job, options)
        ]
        times = [
            steady_time(job, one.batch, evaluate(instance, Objective.CIRCULATING, (0, 1, 2), blocks).value)
            for one, instance in instances
            for order, blocks in assignments(3, 5)
            if order == (0, 1, 2)
        ]
        if min(times) == float("inf"):
            with pytest.raises(PlanImpossible):
                search(cluster, model, job, options)
        else:
            found = search(cluster, model, job, options)
            assert found.prediction.steady_time == pytest.approx(min(times), rel=2 * TIE)
            assert found.layout.nodes == options.nodes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SearchOptions(nodes=("a", "x")), "x"),
        (SearchOptions(nodes=("a", "a")), "twice"),
        (SearchOptions(nodes=()), "none"),
        (SearchOptions(split=(1, 2)), "not one of 4 blocks over 2 nodes"),
        (SearchOptions(batch=0), "at least 1"),
        (SearchOptions(micro_batches=0), "at least 1"),
    ],
)
def test_options_that_contradict_the_cluster_are_refused(options: SearchOptions, said: str) -> None:
    cluster = mesh((simple_node("a"), simple_node("b")))
    with pytest.raises(ConfigError, match=said):
        search(cluster, small_model(4), small_job(), options)


def test_where_nothing_fits_need_and_have_are_named_and_the_cheapest_change_would_do() -> None:
    nodes = (simple_node("a", memory=8_000), simple_node("b", memory=7_000))
    cluster, model, job = mesh(nodes), small_model(8), small_job()
    with pytest.raises(PlanImpossible) as caught:
        search(cluster, model, job, OPTIONS)
    error = caught.value
    # one row and a token: workspace 2,520, buffers 2,400, a block 1,000 with 200 of KV
    needs = {
        "a": 4 * 1200 + 2520 + 2400 + 400,
        "b": 4 * 1200 + 2520 + 2400 + 500 + 80,
    }
    assert {name: need for name, (need, _) in error.needs.items()} == needs
    assert {name: have for name, (_, have) in error.needs.items()} == {"a": 8_000, "b": 7_000}
    assert error.change is not None
    name, more = error.change
    assert name in (error.hint or "")
    for node, (need, have) in error.needs.items():
        assert f"{node} needs {need / 1e9:.1f} GB and has {have / 1e9:.1f} GB" in error.message
    search(with_memory(cluster, name, more), model, job, OPTIONS)
    with pytest.raises(PlanImpossible):
        search(with_memory(cluster, name, more - 1), model, job, OPTIONS)


def test_the_cheapest_change_minds_who_can_have_the_ends() -> None:
    """For a sequence 4,920 of workspace and buffers; a block takes 1,200, the embedding 400, the head 580."""
    model, job = small_model(4), small_job()
    first = simple_node("first", memory=4920 + 2 * 1200 + 400)  # with the head it holds one block
    lacking = simple_node("lacking", memory=6_000)
    assert cheapest_change(mesh((first, lacking)), model, job, MEMORY) == ("lacking", 4920 + 2980 - 6000)
    tiny = simple_node("tiny", memory=1_000)  # cannot be a stage, so the other is the only one
    assert cheapest_change(mesh((tiny, lacking)), model, job, MEMORY) == ("lacking", 4920 + 5780 - 6000)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_change_is_the_least_on_any_one_node(seed: int) -> None:
    random = Random(seed)
    cluster = random_cluster(random, random.randint(1, 4), missing=0)
    model, job = small_model(20), small_job()
    found = cheapest_change(cluster, model, job, MEMORY)

    def fits(changed: Cluster) -> bool:
        instance = Tables.of(changed, model).circulating(job, Setting(1, 1), MEMORY)
        return best_path(instance, Objective.CIRCULATING) is not None

    assert fits(cluster) == (found is None)
    if found is not None:
        assert fits(with_memory(cluster, *found))
        for node in cluster.nodes:
            assert not fits(with_memory(cluster, node.name, found[1] - 1))


def test_a_batch_that_is_too_large_is_told_which_one_fits() -> None:
    cluster = mesh((simple_node("a", memory=30_000),))
    options = replace(OPTIONS, batch=100)
    with pytest.raises(PlanImpossible) as caught:
        search(cluster, small_model(4), small_job(200), options)
    assert "100 sequences of 20 tokens in flight do not fit" in caught.value.message
    fits = int((caught.value.hint or "").split()[0])
    search(cluster, small_model(4), small_job(200), replace(options, batch=fits))
    larger = next(one for one in batches(small_job(200), OPTIONS) if one > fits)
    with pytest.raises(PlanImpossible):
        search(cluster, small_model(4), small_job(200), replace(options, batch=larger))


def test_links_that_are_missing_are_not_taken_for_memory() -> None:
    nodes = (simple_node("a"), simple_node("b"))
    cluster = Cluster(nodes, {("a", "b"): link(), ("b", "a"): link()})
    with pytest.raises(PlanImpossible, match="no links join") as caught:
        search(cluster, small_model(4), small_job(), OPTIONS)
    assert "command -> a" in (caught.value.hint or "")
    assert caught.value.needs == {}


def test_a_split_that_does_not_fit_says_whose_part_is_too_large() -> None:
    nodes = (simple_node("a", memory=8_000), simple_node("b"))
    options = replace(OPTIONS, split=(7, 1))
    with pytest.raises(PlanImpossible, match=r"a needs 0\.0 GB and has 0\.0 GB") as caught:
        search(mesh(nodes), small_model(8), small_job(), options)
    assert caught.value.needs["a"] == (7 * 1200 + 2520 + 2400 + 400, 8_000)
    held = held_memory(small_model(8), MEMORY, blocks=1, batch=1, rows=1, slot=20, embeds=False, heads=True)
    assert caught.value.needs["b"] == (held.device, 10**9)


def test_of_splits_that_are_as_good_the_most_even_one_is_taken() -> None:
    model = small_model(blocks=6)
    rest = held_memory(
        model, MEMORY, blocks=5, batch=4, rows=4, slot=small_job(4).slot, embeds=True, heads=True
    )
    nodes = tuple(simple_node(name, memory=int(rest.device / MEMORY.share) + 1) for name in ("a", "b"))
    options = replace(OPTIONS, batch=4, micro_batches=1)
    layout = search(mesh(nodes, delay=0.05), model, small_job(4), options).layout
    assert [stage.blocks for stage in layout.stages] == [3, 3]
