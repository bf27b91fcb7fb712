"""An explanation names what holds a plan up, and what it says would help does, searched anew."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from bbquic.errors import ConfigError
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import AttentionCost, Curve
from bbquic.plan.cost import MemoryOptions
from bbquic.plan.explain import Change, bottleneck_hop, explain
from bbquic.plan.search import search
from bbquic.plan.whatif import with_link_rate, with_memory, with_node, without
from bbquic.units import Bytes, BytesPerSecond
from clusters import link, mesh, random_cluster, simple_node, small_job, small_model

OPTIONS = SearchOptions(memory=MemoryOptions(share=1.0, pack_tokens=1))
PAIR = (simple_node("a", memory=20_000), simple_node("b", memory=20_000))


def test_a_link_that_is_the_bottleneck_is_named_and_a_faster_one_helps() -> None:
    cluster, model, job = mesh(PAIR, 3e3), small_model(12), small_job(8)
    plan = search(cluster, model, job, OPTIONS)
    assert len(plan.layout.stages) == 2
    a, b = plan.layout.nodes
    assert bottleneck_hop(plan.prediction) == (a, b)
    found = explain(cluster, model, job, plan, OPTIONS)
    assert f"{a} -> {b}" in found.limit
    faster = next(change for change in found.changes if change.what == f"{a} -> {b} twice as fast")
    assert faster.ratio < 0.8
    again = search(with_link_rate(cluster, a, b, BytesPerSecond(6e3)), model, job, OPTIONS)
    assert again.prediction.steady_time <= faster.ratio * plan.prediction.steady_time * 1.001


def test_a_slow_stage_is_named_and_more_memory_elsewhere_helps() -> None:
    slow = simple_node("slow", mlp=Curve(((0, 0.0), (1, 0.1))), memory=20_000)
    fast = simple_node("fast", block=0.001, memory=14_000)
    cluster, model, job = mesh((slow, fast), 1e7), small_model(12), small_job(8)
    options = replace(OPTIONS, batch=4, micro_batches=4)
    plan = search(cluster, model, job, options)
    found = explain(cluster, model, job, plan, options)
    assert found.limit.startswith("compute of slow is busy")
    by_name = {change.what: change for change in found.changes}
    assert by_name["one GB more on fast"].ratio < 0.5
    assert by_name["without fast"].ratio > 1
    assert found.changes[0].what == "one GB more on fast"
    assert [change.ratio for change in found.changes] == sorted(change.ratio for change in found.changes)


def test_of_keys_on_hosts_it_is_said_what_devices_alone_would_do_and_what_fewer_would() -> None:
    offloading = replace(
        simple_node("a", memory=31_700),  # for weights of 4,900, packs and five slots of 800
        attention_host=AttentionCost(0.0, 0.1, 0.0),
        host_memory=Bytes(10**6),
        offloads=True,
    )
    cluster, model, job = mesh((offloading,)), small_model(4), small_job(8)
    forced = replace(OPTIONS, batch=8, micro_batches=1, memory=replace(OPTIONS.memory, offload=0.5))

    def told(options: SearchOptions) -> dict[str, float]:
        plan = search(cluster, model, job, options)
        assert plan.layout.stages[0].offloaded == (4 if options is forced else 3)
        return {one.what: one.ratio for one in explain(cluster, model, job, plan, options).changes}

    needed = told(replace(OPTIONS, batch=8, micro_batches=1))
    assert needed["all KV on the devices"] == float("inf")
    assert not any("need be" in what for what in needed)
    # a block takes 10 ms and 100 ms for each of its rows whose keys are on the host
    assert told(forced)["no more KV on hosts than need be"] == pytest.approx(0.31 / 0.41, rel=0.01)


def test_without_a_node_that_is_needed_the_model_would_not_fit() -> None:
    cluster, model, job = mesh(PAIR, 1e7), small_model(20), small_job(4)
    plan = search(cluster, model, job, OPTIONS)
    found = explain(cluster, model, job, plan, OPTIONS)
    gone = [str(change) for change in found.changes if change.what.startswith("without")]
    assert gone == ["without a: the model would not fit", "without b: the model would not fit"]


def test_each_node_that_is_left_out_has_its_reason() -> None:
    far = {pair: link(50.0, 0.5) for other in "ab" for pair in ((other, "far"), ("far", other))}
    gone = {
        pair: None
        for other in ("a", "b", "far", "slow", "tiny", "command")
        for pair in ((other, "gone"), ("gone", other))
    }
    nodes = (
        *PAIR,
        simple_node("slow", block=2.0),
        simple_node("far", memory=14_000),
        simple_node("tiny", memory=3_000),
        simple_node("gone"),
    )
    cluster, model, job = mesh(nodes, 1e7, 0.0, {**far, **gone}), small_model(12), small_job(8)
    cluster = replace(cluster, links={**cluster.links, ("command", "far"): link(50.0, 0.5)})
    plan = search(cluster, model, job, OPTIONS)
    assert sorted(plan.layout.nodes) == ["a", "b"]
    found = explain(cluster, model, job, plan, OPTIONS)
    reasons = {one.node: one.reason for one in found.left_out}
    assert list(reasons) == ["slow", "far", "tiny", "gone"]
    assert reasons["slow"].endswith("compute of slow takes 2000.0 ms")
    assert "x as long: link" in reasons["far"]
    assert "(0 Mbit/s and 500.0 ms)" in reasons["far"]
    assert reasons["tiny"].startswith("it holds no block: one with its KV needs")
    assert reasons["gone"] == "no links join it with the plan's nodes"
    ratios = {one.node: one.ratio for one in found.left_out}
    assert ratios["slow"] > 5
    assert ratios["gone"] == ratios["tiny"] == float("inf")
    given = explain(cluster, model, job, plan, replace(OPTIONS, nodes=("a", "b"))).left_out
    assert {one.reason for one in given} == {"it is not among the nodes to plan with"}


def test_a_node_that_would_change_nothing_is_said_to() -> None:
    nodes = tuple(simple_node(name, mlp=Curve(((0, 0.0), (1, 0.01)))) for name in "ab")
    cluster, model, job = mesh(nodes, 1e15), small_model(2), small_job(4)
    options = replace(OPTIONS, micro_batches=1)
    plan = search(cluster, model, job, options)
    assert plan.layout.nodes == ("a",)
    (other,) = explain(cluster, model, job, plan, options).left_out
    assert other.reason == "with it the job would take as long: fewer nodes are preferred"


@pytest.mark.parametrize("seed", range(6))
def test_a_node_is_never_left_out_that_would_help(seed: int) -> None:
    cluster = random_cluster(Random(seed), 5, missing=0.1)
    model, job = small_model(5), small_job(6)
    plan = search(cluster, model, job, OPTIONS)
    found = explain(cluster, model, job, plan, OPTIONS)
    assert [one.node for one in found.left_out] == list(plan.left_out)
    assert all(one.ratio >= 0.999 for one in found.left_out)
    assert all(change.ratio >= 0.998 for change in found.changes if change.what.startswith("without"))


def test_an_order_that_is_given_is_explained_as_given() -> None:
    cluster, model, job = mesh((*PAIR, simple_node("c")), 3e3), small_model(4), small_job(4)
    options = replace(OPTIONS, nodes=("b", "a"), split=(3, 1))
    plan = search(cluster, model, job, options)
    found = explain(cluster, model, job, plan, options)
    assert [change.what.split()[0] for change in found.changes].count("without") == 0
    assert {one.reason for one in found.left_out} == {"it is not among the nodes to plan with"}


def test_a_change_is_told_in_words() -> None:
    assert str(Change("x", 0.5)) == "x: 0.50 x of the time"
    assert str(Change("x", 2.0)) == "x: 2.00 x as long"
    assert str(Change("x", 1.001)) == "x: no change"


def test_what_if_changes_one_thing() -> None:
    cluster = mesh(PAIR, 1e6)
    assert with_link_rate(cluster, "a", "b", BytesPerSecond(5.0)).links["a", "b"].rate == 5.0
    assert with_link_rate(cluster, "a", "b", BytesPerSecond(5.0)).links["b", "a"].rate == 1e6
    assert with_memory(cluster, "b", 7).node("b").memory == 20_007
    less = without(cluster, "a")
    assert [node.name for node in less.nodes] == ["b"]
    assert set(less.links) == {("command", "b"), ("b", "command")}
    more = with_node(cluster, simple_node("c"), {("a", "c"): link(1.0)})
    assert [node.name for node in more.nodes] == ["a", "b", "c"]
    assert more.links["a", "c"].rate == 1.0
    assert len(cluster.nodes) == 2


def test_what_if_refuses_what_is_not_there() -> None:
    cluster = mesh(PAIR, other={("a", "b"): None})
    with pytest.raises(ConfigError, match="no link a -> b"):
        with_link_rate(cluster, "a", "b", BytesPerSecond(1.0))
    with pytest.raises(ConfigError, match="a rate of 0"):
        with_link_rate(cluster, "b", "a", BytesPerSecond(0))
    with pytest.raises(ConfigError, match="no node x"):
        without(cluster, "x")
    with pytest.raises(ConfigError, match="no node x"):
        with_memory(cluster, "x", 1)
    with pytest.raises(ConfigError, match="a node a already"):
        with_node(cluster, simple_node("a"), {})
    with pytest.raises(ConfigError, match="is no link of c"):
        with_node(cluster, simple_node("c"), {("a", "b"): link()})
