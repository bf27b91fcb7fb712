"""What the planner's bench makes of a description, of runs and of what they took, without a network."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from bench.plan_emul import papers
from bench.plan_emul.calibration import overhead
from bench.plan_emul.choice import Chosen
from bench.plan_emul.contenders import OURS
from bench.plan_emul.figures import Figures, Overhead, codec_speeds
from bench.plan_emul.llama_30b import (
    BATCH,
    FITTED,
    TESTED,
    WITH,
    WITHOUT,
    best,
    extra,
    paper_step,
    published,
)
from bench.plan_emul.llama_30b import scene as llama_30b
from bench.plan_emul.predict import layout_of, predict
from bench.plan_emul.prediction import JOB, SET_UPS, THREE, TWO, TWO_EVEN, TWO_FAST, Ran, SetUp, ranked
from bench.plan_emul.scenarios import all_scenarios, far_command
from bench.plan_emul.scene import HOME, Scene, cost_table, home_of, joined, link_profile, machine, model
from bench.plan_emul.traces import LIVE, Traced
from bench.stand_in.bounds import Pipeline
from bench.stand_in.cell import Cell, tokens_between
from bench.stand_in.coordinator import KeptPace, plans_of, scheduler_of
from bench.stand_in.cost import CostTable, StandIn
from bench.stand_in.observed import Passed
from bench.wan import Link

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import COMMAND, AttentionCost
from bbquic.plan.instance import FIRST, LAST, MIDDLE, ONLY
from bbquic.units import BytesPerSecond, Seconds


def test_a_stand_in_computes_its_blocks_and_the_ends_it_has() -> None:
    node = machine("a", 2.0, embed_ms=1, head_ms=4)
    tables = [cost_table(node, 6, place) for place in (MIDDLE, FIRST, LAST, ONLY)]
    assert [table(32) for table in tables] == pytest.approx([0.012, 0.013, 0.016, 0.017])
    assert [table(8) for table in tables] == pytest.approx(
        [12e-3 * (0.85 + 0.15 / 4) + ends for ends in (0, 1e-3, 4e-3, 5e-3)]
    )


def test_offloaded_rows_of_a_stand_in_take_the_host_s_time_beside_the_device_s() -> None:
    node = replace(
        machine("a", 2.0),
        attention=AttentionCost(0.0, 1e-3, 1e-4),
        attention_host=AttentionCost(0.0, 0.01, 0.0),
    )
    half, all_there = (cost_table(node, 6, MIDDLE, alpha=alpha, context=10.0) for alpha in (0.5, 0.0))
    assert half(8) == pytest.approx(12e-3 * (0.85 + 0.15 / 4) + 6 * 4 * 0.01)
    assert all_there(8) == pytest.approx(12e-3 * (0.85 + 0.15 / 4) + 6 * 8 * 2e-3)
    with pytest.raises(ValueError, match="no line through 0"):
        cost_table(replace(node, attention=AttentionCost(1.0, 0.0, 0.0)), 6, MIDDLE)


def test_a_stand_in_of_llama_30b_takes_what_was_fitted_and_that_is_what_is_published_elsewhere() -> None:
    assert [paper_step(name) for name in TESTED] == pytest.approx(
        [published(name).steps[1] for name in TESTED], rel=0.05
    )
    where = llama_30b(FITTED)
    steps = []
    for nodes in (WITHOUT, WITH):
        layout = best(where, nodes, BATCH, 1).layout
        costs = where.cell(layout, codec="raw", warm_up=1, counted=1).costs
        steps.append(sum(cost(BATCH) for cost in costs))
    assert steps[0] == pytest.approx(3 * 44.2e-3)
    assert steps[1] - steps[0] == pytest.approx(extra())


def test_each_stage_gets_a_plan_with_its_own_time_on_its_own_host() -> None:
    cell = TWO.cell(layout_of((("b", 6), ("a", 18)), 16, 2), codec="raw", warm_up=1, counted=1)
    plans = plans_of(cell, ("a", "b"))
    assert [stage.node for stage in plans[0].stages] == ["node-b", "node-a"]
    assert plans[0].stages == plans[1].stages
    assert plans[0].job == plans[1].job
    waits = [StandIn.of_config(plan.manifest.config).cost(32) for plan in plans]
    assert waits == pytest.approx(
        [6 * 3.0e-3, 18 * 1.5e-3]
    )  # a embeds only where it is first, b heads if last


def test_a_cell_that_names_no_hosts_takes_the_first() -> None:
    cell = Cell((1, 1), StandIn(576, CostTable.of_step(0.01), 16), "float16", 32, 2, warm_up=2, counted=3)
    assert [stage.node for stage in plans_of(cell, ("a", "b", "c"))[0].stages] == ["node-a", "node-b"]


def test_micro_batches_stay_as_they_are_unless_a_cell_is_live() -> None:
    cell = Cell((1, 1), StandIn(576, CostTable.of_step(0.01), 16), "float16", 32, 4, warm_up=2, counted=3)
    kept = scheduler_of(cell, plans_of(cell, ("a", "b"))[0])
    assert [kept.pace.micro_batches([32 // count] * count, 4) for count in (4, 2)] == [4, 2]
    live = replace(cell, most=8)
    plan = plans_of(live, ("a", "b"))[0]
    scheduler = scheduler_of(live, plan)
    assert (plan.micro_batches, scheduler.micro_batches) == (8, 4)
    assert not isinstance(scheduler.pace, KeptPace)


def test_a_cell_with_fewer_hosts_than_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="1 hosts or costs for 2 stages"):
        Cell((1, 1), StandIn(576, CostTable.of_step(0.01), 16), "float16", 32, 2, 2, 3, hosts=("a",))


def test_an_emulated_rate_counts_packets_and_a_planned_one_what_is_in_them() -> None:
    profile = link_profile(Link(rate_mbps=98.24, delay_ms=25))
    assert profile.rate == pytest.approx(12e6)
    assert profile.delay == 0.025
    with pytest.raises(ValueError, match="without a limit"):
        link_profile(Link())


def test_the_coordinator_is_at_home_or_on_the_first_stage() -> None:
    blocks = (("b", 6), ("a", 18))
    assert home_of(layout_of(blocks, 8, 1)) == "b"
    assert home_of(layout_of(blocks, 8, 1, COMMAND)) == HOME
    assert far_command().hosts == ("a", "b", HOME)
    assert TWO.hosts == ("a", "b")


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_row_of_like_stages_is_predicted_as_its_bound_with_headers(micro_batches: int) -> None:
    names = ("a", "b", "c")
    links = joined(*((one, other, 80, 10) for one in names for other in names if one < other))
    scene = Scene("row", model("row", 12, 4096), tuple(machine(name, 2.0) for name in names), links, JOB)
    found = predict(scene, Figures(), layout_of(tuple((name, 4) for name in names), 32, micro_batches))
    rate = BytesPerSecond(80e6 / 8 * 1200 / 1228 / 1.031)
    bound = Pipeline(3, 4096, CostTable.of_step(0.008), rate, Seconds(0.010))
    assert found.step == pytest.approx(bound.step(32, micro_batches), rel=0.005)  # tokens have a size, here


def test_overheads_count_at_each_stage_on_each_hop_and_once_a_loop() -> None:
    layout = layout_of(TWO_EVEN, 16, 1)
    plain = predict(TWO, Figures(), layout)
    loaded = predict(TWO, Figures(Overhead(Seconds(0.002), Seconds(0.003), Seconds(0.005))), layout)
    assert loaded.loop == pytest.approx(plain.loop + 2 * 0.002 + 2 * 0.003 + 0.005)
    assert loaded.cycle >= plain.cycle


def test_a_prediction_uses_codecs_where_they_pay_and_none_where_all_is_sent_raw() -> None:
    figures = Figures(codecs=codec_speeds("bfloat16", 576, 32, repeats=2))
    assert 0.5 < figures.codecs[Way.REC].ratio < figures.codecs[Way.H8].ratio < 0.8
    slow = layout_of((("b", 6), ("a", 18)), 32, 1)
    coded, raw = predict(TWO, figures, slow), predict(TWO, figures, slow, raw=True)
    assert coded.layout.ways[0] is not Way.RAW
    assert raw.layout.ways == (Way.RAW,)
    assert coded.step < raw.step


def test_overheads_are_found_in_what_is_left_and_never_negative() -> None:
    rows = {1: 0.002 + 0.005, 2: 2 * 0.002 + 2 * 0.003 + 0.005, 4: 4 * 0.002 + 4 * 0.003 + 0.005}
    found = overhead(4 * 0.002, rows)
    assert (found.stage, found.hop, found.coordinator) == pytest.approx((0.002, 0.003, 0.005))
    assert overhead(-0.1, {1: -0.1, 2: -0.1}) == Overhead()


def ran(scene: str, predicted: float, measured: float) -> Ran:
    layout = layout_of(TWO_FAST, 10, 1)
    one = predict(TWO, Figures(), layout)
    set_up = SetUp(10, 1, "raw", (TWO_FAST,))
    return Ran(scene, set_up, type(one)(layout, predicted, predicted, predicted, "loop"), measured)


def test_only_pairs_on_one_scene_that_differ_enough_have_to_be_ranked_right() -> None:
    pairs, wrong = ranked([ran("x", 1.0, 1.0), ran("x", 1.1, 0.5), ran("y", 2.0, 0.1)])
    assert (pairs, wrong) == (0, [])
    right, late = ran("x", 1.0, 1.0), ran("x", 1.2, 0.99)
    assert ranked([right, late]) == (1, [(late, right)])
    assert ranked([right, ran("x", 1.2, 1.01)]) == (1, [])
    assert late.error == pytest.approx(1.2 / 0.99 - 1)


def test_there_are_set_ups_enough_and_all_can_be_predicted() -> None:
    assert sum(len(tried) for _, tried in SET_UPS) >= 12
    for scene, tried in SET_UPS:
        for one in tried:
            for layout in one.layouts():
                assert sum(stage.blocks for stage in layout.stages) == scene.model.blocks
                assert math.isfinite(predict(scene, Figures(), layout).step)
                assert all(link.rate_mbps for link in scene.hops(layout))


def test_every_scenario_links_all_its_hosts() -> None:
    for scene in (*all_scenarios(), THREE):
        hosts = scene.hosts
        assert {(a, b) for a in hosts for b in hosts if a != b} == set(scene.links)


def test_the_papers_tables_are_predicted_from_its_own_figures() -> None:
    rows = {row.name: row for row in papers.tables()}
    assert len(rows) == 20
    row = rows["falcon_7b_E5"]  # 284.4 KB at 20 Mbit/s are 116 ms; 105 ms away; 35.21 ms at either stage
    assert row.equation_1 == pytest.approx(2 * 0.03521 + 0.105 + 284 * 1024 * 8 / 20e6, rel=1e-3)
    assert row.equation_4 == pytest.approx(3 * (0.105 + 142 * 1024 * 8 / 20e6), rel=1e-3)
    assert row.circulating_two < row.circulating_one
    assert "published" in str(row)
    assert "M=2 not published" in str(rows["falcon_40b_E1"])


def test_a_choice_is_held_against_the_best_of_the_others() -> None:
    layout = layout_of(TWO_FAST, 10, 1)
    rates = {OURS: [9.0, 10.0, 30.0], "even": [1.0, 2.0, 50.0], "other": [8.0, 8.0, 8.0]}
    chosen = Chosen("x", dict.fromkeys(rates, layout), rates)
    assert chosen.best_other == "other"
    assert chosen.ratio == pytest.approx(10 / 8)


def test_a_trace_is_held_against_the_best_over_all_and_in_each_phase() -> None:
    found = Traced(
        "x",
        {LIVE: [9.0], "one": [10.0], "two": [6.0]},
        {LIVE: [[10.0, 8.0]], "one": [[12.0, 8.0]], "two": [[2.0, 10.0]]},
    )
    assert found.ratio == pytest.approx(0.9)
    assert found.phase_ratios() == pytest.approx([10 / 12, 8 / 10])


def test_a_setting_that_is_near_the_best_in_no_phase_does_not_run_again() -> None:
    found = Traced(
        "x",
        {LIVE: [1.0], "one": [10.0], "two": [6.0], "three": [8.0]},
        {LIVE: [[1.0, 1.0]], "one": [[12.0, 8.0]], "two": [[2.0, 10.0]], "three": [[10.0, 8.9]]},
    )
    assert [name for name in found.whole if found.may_be_best(name)] == [LIVE, "one", "two"]


def test_tokens_count_by_the_moment_at_which_they_came_back() -> None:
    passes = [Passed(0, step, sent=0.0, received=float(step), tokens=10) for step in range(1, 9)]
    assert tokens_between(passes, 2.0, 6.0) == pytest.approx(10)
