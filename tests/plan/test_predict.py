"""What a layout is predicted to do, against figures worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import COMMAND, AttentionCost, CodecSpeed, Curve, Layout, PlannedStage
from bbquic.plan.cost import ROW_BYTES, WIRE, MemoryOptions
from bbquic.plan.predict import dollars_per_million, job_time, layout_memory, predict
from bbquic.units import Seconds
from clusters import link, mesh, simple_node, small_job, small_model

H8 = {Way.H8: CodecSpeed(0.5, 1e-4, 2e-4)}
A = simple_node("a", block=0.1, overhead=Seconds(0.05), codecs=H8, price=0.9)
B = simple_node("b", block=0.2, codecs=H8, head=Curve(((1, 0.03),)))
CLUSTER = mesh((A, B), 1e4, 0.2, {("b", COMMAND): link(1e4, 0.7)})
LAYOUT = Layout((PlannedStage("a", 0, 3), PlannedStage("b", 3, 4)), 8, 2, (Way.H8,))
JOB = small_job(32, prompt=4, output=8)  # a pack: 4 rows and 2 prompt tokens, 1,200 bytes


def test_every_part_of_a_pass_by_hand() -> None:
    found = predict(CLUSTER, small_model(), JOB, LAYOUT)
    wanted = {
        "leg command -> a": (0.0, 0.2 + (6 * 4 + 4 * ROW_BYTES) * WIRE / 1e4),
        "compute of a": (0.35, 0.35),
        "outbound lane a -> b": (0.12, 0.12),
        "link a -> b": (0.06 * WIRE, 0.06 * WIRE + 0.2),
        "inbound lane a -> b": (0.24, 0.24),
        "compute of b": (0.23, 0.23),
        "leg b -> command": (0.0, 0.7 + 4 * ROW_BYTES * WIRE / 1e4),
    }
    assert [str(part.resource) for part in found.parts] == list(wanted)
    for part in found.parts:
        assert (part.busy, part.passes) == pytest.approx(wanted[str(part.resource)])
    assert found.cycle == pytest.approx(0.35)
    assert found.loop == pytest.approx(sum(passes for _, passes in wanted.values()))
    assert found.step == found.loop
    assert str(found.limit) == "loop"
    assert found.tokens_per_second == pytest.approx(8 / found.step)
    assert found.steady_time == pytest.approx(32 * 8 / 8 * found.step)


def test_the_busiest_resource_is_the_limit_when_the_pipe_is_full() -> None:
    full = replace(LAYOUT, batch=32, micro_batches=8)
    found = predict(CLUSTER, small_model(), JOB, full)
    assert str(found.limit) == "compute of a"
    assert found.step == pytest.approx(8 * 0.35)
    slow = mesh((A, B), 1e4, 0.2, {("a", "b"): link(1e3, 0.2)})
    found = predict(slow, small_model(), JOB, full)
    assert str(found.limit) == "link a -> b"
    assert found.step == pytest.approx(8 * 0.6 * WIRE)
    coding = replace(A, codecs={Way.H8: CodecSpeed(0.5, 1e-3, 0)})
    found = predict(mesh((coding, B), 1e4), small_model(), JOB, full)
    assert str(found.limit) == "outbound lane a -> b"


def test_a_coordinator_on_the_first_stage_has_one_leg_and_it_comes_from_the_last() -> None:
    there = predict(CLUSTER, small_model(), JOB, replace(LAYOUT, coordinator="a"))
    assert there.parts[0].passes == 0.0
    assert str(there.parts[-1].resource) == "leg b -> a"
    assert there.parts[-1].passes == pytest.approx(0.2 + 4 * ROW_BYTES * WIRE / 1e4)


def test_offloaded_slots_are_computed_on_the_host() -> None:
    host = replace(
        A, attention=AttentionCost(0, 0.01, 0), attention_host=AttentionCost(0, 0.5, 0), offloads=True
    )
    stage = PlannedStage("a", 0, 4, offloaded=2)
    found = predict(mesh((host,)), small_model(), JOB, Layout((stage,), 8, 2, ()))
    # 1 of 4 rows on the host: 0.5, beside 0.03; prompts 0.02
    assert found.cycle == pytest.approx(0.05 + 4 * (0.1 + 0.5 + 0.02))
    # where device and host are one, nothing is computed elsewhere
    one = predict(mesh((replace(host, offloads=False),)), small_model(), JOB, Layout((stage,), 8, 2, ()))
    assert one.cycle == pytest.approx(0.05 + 4 * (0.1 + 0.04 + 0.02))


def test_a_missing_link_takes_for_ever() -> None:
    for pair in (("a", "b"), (COMMAND, "a"), ("b", COMMAND)):
        found = predict(mesh((A, B), other={pair: None}), small_model(), JOB, LAYOUT)
        assert found.step == found.job_time == float("inf")
        assert found.tokens_per_second == 0


def test_a_job_s_time_is_first_prompts_steady_steps_and_a_tail() -> None:
    """One stage without links, 0.1 s a pack whatever is in it: 4 blocks of 0.025."""
    cluster = mesh((simple_node("a", block=0.025),), 1e15)
    layout = Layout((PlannedStage("a", 0, 4),), 8, 2, ())
    # 8 · 4 prompt tokens in packs of 10: 4 packs; 24 · 8 / 8 = 24 steps of two packs; 16 of a single one
    memory = MemoryOptions(pack_tokens=10)
    assert job_time(cluster, small_model(), JOB, layout, memory) == pytest.approx(0.4 + 24 * 0.2 + 16 * 0.1)
    assert predict(cluster, small_model(), JOB, layout, memory).job_time == pytest.approx(6.8)
    short = replace(JOB, sequences=8, prompt=0)
    assert job_time(cluster, small_model(), short, layout, memory) == pytest.approx(16 * 0.1)


def test_memory_of_a_layout_is_its_stages_with_their_ends_and_what_is_offloaded() -> None:
    layout = replace(LAYOUT, stages=(PlannedStage("a", 0, 3, offloaded=2), PlannedStage("b", 3, 4)))
    first, last = layout_memory(small_model(), JOB, layout, MemoryOptions(pack_tokens=2))
    assert (first.weights, last.weights) == (3400, 1500)
    assert (first.kv, first.host_kv, last.kv) == (6 * 3 * 200, 2 * 3 * 200, 8 * 200)


def test_dollars_are_those_of_the_used_nodes_for_the_time_of_a_million_tokens() -> None:
    assert dollars_per_million(CLUSTER, LAYOUT, 50.0) == pytest.approx(0.9 / 3600 * 1e6 / 50)
    priced = mesh((A, replace(B, price=1.8)))
    assert dollars_per_million(priced, LAYOUT, 50.0) == pytest.approx(2.7 / 3600 * 1e6 / 50)
    assert dollars_per_million(mesh((replace(A, price=None), B)), LAYOUT, 50.0) is None
    assert dollars_per_million(CLUSTER, LAYOUT, 0.0) is None
