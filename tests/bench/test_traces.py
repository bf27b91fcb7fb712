"""The controller beside settings that stay, on a short trace; `bench/planner.py` has the long ones."""

from __future__ import annotations

from bench.plan_sim.traces import compare, evening_trace, stepping_trace


def test_a_step_of_a_links_rate_is_answered_at_once_and_by_no_more_than_it_takes() -> None:
    figures = compare(stepping_trace(15.0))
    assert figures["of_phases"] > 0.96, (
        "of which the first two seconds, from four micro-batches on, are a part"
    )
    assert figures["of_best"] > 0.98
    changes = [time for time, _, _ in figures["decisions"]]
    for phase, step in ((15.0, 0.4), (30.0, 0.1)):  # seconds of a step there
        assert any(phase < time < phase + 20 * step for time in changes)
    assert len(changes) <= 10
    assert figures["changes_of_micro_batches"] == len(figures["reasons"]) <= 3


def test_an_evening_is_the_same_each_time_and_slower_than_noon() -> None:
    trace = evening_trace(hour=1.0)
    assert trace == evening_trace(hour=1.0)
    up = [rate for _, rate in trace.links[1]]
    assert sum(up[80:90]) / 10 < 25 < 70 < sum(up[:40]) / 40
