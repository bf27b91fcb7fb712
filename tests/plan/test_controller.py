"""What the controller decides, against its rule, with constant, changing and noisy measurements."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bbquic.plan.controller import (
    REPAYS,
    Grouping,
    Line,
    Load,
    Measured,
    MoveCost,
    Prospect,
    StageFigures,
    hop_roles,
    relayout,
    steps_by_count,
)
from bbquic.units import BytesPerSecond, Seconds

LOOKS = 60

lines = st.builds(Line, st.floats(0, 0.2), st.floats(0, 0.02))
rates = st.none() | st.floats(1e5, 1e8).map(BytesPerSecond)
stages = st.lists(
    st.builds(
        StageFigures,
        name=st.sampled_from(["home", "paris"]),
        inbound=lines,
        compute=st.builds(Line, st.floats(0.001, 0.2), st.floats(0, 0.02)),
        outbound=lines,
        sent=st.builds(Line, st.just(100.0), st.floats(1e3, 1e5)),
        rate=rates,
    ),
    min_size=1,
    max_size=4,
)
pipelines = st.builds(Measured, stages.map(tuple), st.floats(0, 1).map(Seconds))


def noisy(measured: Measured, rng: random.Random, share: float = 0.1) -> Measured:
    """Every figure off by up to `share`, each by its own."""

    def off(line: Line) -> Line:
        factor = rng.uniform(1 - share, 1 + share)
        return Line(line.fixed * factor, line.each * factor)

    return Measured(
        tuple(
            replace(
                stage,
                inbound=off(stage.inbound),
                compute=off(stage.compute),
                outbound=off(stage.outbound),
                rate=None
                if stage.rate is None
                else BytesPerSecond(stage.rate * rng.uniform(1 - share, 1 + share)),
            )
            for stage in measured.stages
        ),
        Seconds(measured.latency * rng.uniform(1 - share, 1 + share)),
    )


def settle(grouping: Grouping, measured: Measured, rows: int, most: int) -> int:
    """Looks until nothing changes for long; the number of changes."""
    return sum(grouping.look(measured, rows, most) is not None for _ in range(LOOKS))


@settings(max_examples=40)
@given(measured=pipelines, rows=st.integers(1, 64), most=st.integers(1, 12), start=st.integers(1, 12))
def test_the_same_figures_lead_to_one_change_at_most_and_nearly_to_the_least_step(
    measured: Measured, rows: int, most: int, start: int
) -> None:
    grouping = Grouping(start)
    assert settle(grouping, measured, rows, most) <= 1
    steps = steps_by_count(measured, rows, most)
    chosen = steps[min(grouping.target, len(steps))]
    assert math.log(chosen / min(steps.values())) <= 0.02 + 1.6 / LOOKS + 1e-9


@settings(max_examples=40)
@given(
    measured=pipelines,
    rows=st.integers(1, 64),
    most=st.integers(1, 8),
    start=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_noise_of_a_tenth_changes_nothing_that_was_settled(
    measured: Measured, rows: int, most: int, start: int, seed: int
) -> None:
    grouping, rng = Grouping(start), random.Random(seed)
    settle(grouping, measured, rows, most)
    steps = steps_by_count(measured, rows, most)
    before = steps[min(grouping.target, len(steps))]
    assume(before <= 1.0001 * min(steps.values()))  # else a gain below the threshold is still to be had
    assert not any(grouping.look(noisy(measured, rng), rows, most) for _ in range(200))


@settings(max_examples=40)
@given(measured=pipelines, rows=st.integers(1, 64), seed=st.integers(0, 2**32), factor=st.floats(0.04, 25))
def test_a_step_in_the_links_rates_is_answered_within_twenty_looks_where_it_matters(
    measured: Measured, rows: int, seed: int, factor: float
) -> None:
    grouping, rng = Grouping(1), random.Random(seed)
    settle(grouping, measured, rows, 8)
    slower = Measured(
        tuple(
            replace(one, rate=None if one.rate is None else BytesPerSecond(one.rate * factor))
            for one in measured.stages
        ),
        measured.latency,
    )
    steps = steps_by_count(slower, rows, 8)
    gain = math.log(steps[min(grouping.target, len(steps))] / min(steps.values()))
    changes = sum(grouping.look(noisy(slower, rng, 0.01), rows, 8) is not None for _ in range(20))
    if gain > 0.04 + 1.6 / 20:
        assert changes == 1
        assert steps[grouping.target] <= 1.05 * min(steps.values())
    else:
        assert changes <= 1


def test_a_fall_of_a_links_rate_and_its_rise_are_answered_by_other_numbers() -> None:
    """A pack costs the first stage 50 ms, whatever is in it. At 500 Mbit/s that is most of the loop of one
    micro-batch, 77 ms, and two would take 100 ms; at 20 the link alone takes 419 ms, beside which two hide
    the stages; at 125 two take 100 ms and one would take 127."""
    grouping, counts = Grouping(4), []
    for rate in (500, 20, 125, 500):
        link = BytesPerSecond(rate / 8 * 1e6)
        first = StageFigures("home", Line(), Line(0.05), Line(), Line(0, 8192), link)
        last = StageFigures("paris", Line(), Line(0.01), Line(), Line(0, 4))
        measured = Measured((first, last), Seconds(0.0))
        assert sum(grouping.look(measured, 128, 8) is not None for _ in range(20)) <= 1
        counts.append(grouping.target)
    assert counts == [1, 2, 2, 1]


def test_small_gains_are_acted_on_late_and_none_that_are_smaller_than_the_least() -> None:
    """One micro-batch of 10 rows takes a loop of 0.1 s and what of it rows cost, halved by a second one."""
    for rows_cost, looks in ((0.02, range(15, 30)), (0.005, range(150, 330)), (0.001, range(0))):
        stage = StageFigures("home", Line(), Line(0.001, rows_cost / 10), Line(), Line(0, 4))
        measured, grouping = Measured((stage,), Seconds(0.1)), Grouping(1)
        changes = [look for look in range(2000) if grouping.look(measured, 10, 2) is not None]
        assert len(changes) == (1 if looks else 0)
        assert all(look in looks for look in changes)


def line_of(compute: Line, *, sent: float, rate: float, latency: float = 0.0) -> Measured:
    stage = StageFigures("home", Line(), compute, Line(), Line(0, sent), BytesPerSecond(rate))
    return Measured((stage, replace(stage, name="paris", rate=None)), Seconds(latency))


def test_reasons_have_the_figures() -> None:
    measured = line_of(Line(0.010, 0.001), sent=12_500, rate=2.5e6)
    grouping = Grouping(4)
    words = grouping.state(measured, 16, 4)
    assert words == (
        "4 micro-batches, 80.0 ms a step: 4 x 20.0 ms of home's link of 20 Mbit/s, over a loop of 48.0 ms; "
        "3 would take 80.0 ms"
    ), "equal numbers are named, and nothing changes"
    fewer = [grouping.look(line_of(Line(0.1, 0.001), sent=125, rate=2.5e6), 16, 4) for _ in range(4)]
    assert [one is not None for one in fewer] == [False, False, False, True]
    assert fewer[-1] == (
        "2 micro-batches in place of 4, 216 ms a step in place of 416 ms: "
        "a loop of 216 ms, 2 x 108 ms of home's compute"
    )
    assert list(grouping.reasons) == [fewer[-1]]


def test_nothing_changes_without_rows_or_stages() -> None:
    measured = line_of(Line(0.010, 0.001), sent=12_500, rate=2.5e6)
    for empty, rows in ((measured, 0), (Measured((), Seconds(0.0)), 5)):
        grouping = Grouping(3)
        assert grouping.look(empty, rows, 8) is None
        assert grouping.target == 3
        assert grouping.state(empty, rows, 8) == "nothing measured yet"


def test_a_hop_is_the_bottleneck_or_part_of_the_loop_or_neither() -> None:
    slow = line_of(Line(0.010, 0.001), sent=12_500, rate=2.5e6)
    assert "is the bottleneck, 20.0 ms a pack" in hop_roles(slow, 16, 4)[0]
    assert "of the loop: each byte less shortens it" in hop_roles(replace(slow, latency=Seconds(9)), 16, 4)[0]
    fast = line_of(Line(0.010, 0.001), sent=12_500, rate=2.5e7)
    assert "fewer bytes change nothing" in hop_roles(fast, 16, 4)[0]
    unknown = Measured((replace(fast.stages[0], rate=None), fast.stages[1]), Seconds(0.0))
    assert hop_roles(unknown, 16, 4) == ("home's link was never seen full",)


times = st.floats(0.001, 10).map(Seconds)


@given(
    measured=times,
    predicted=times,
    other=times,
    batch=st.integers(1, 64),
    other_batch=st.integers(1, 64),
    left=st.floats(0, 1e7),
    load=st.floats(0, 1e11),
    live=st.integers(0, 10**6),
)
def test_a_new_layout_repays_exactly_when_the_job_ends_clearly_earlier_with_it(
    measured: Seconds,
    predicted: Seconds,
    other: Seconds,
    batch: int,
    other_batch: int,
    left: float,
    load: float,
    live: int,
) -> None:
    cost = MoveCost((Load("a", from_disk=load, disk_rate=1e9), Load("b")), live, prefill_rate=500.0)
    found = relayout(Prospect(measured, predicted, batch, other, other_batch), cost, left)
    assert cost.time == pytest.approx(2 + load / 1e9 + live / 500)
    assert found.stays == pytest.approx(left / batch * measured)
    expected = cost.time + left / other_batch * (other * measured / predicted)
    assert found.moves == pytest.approx(expected)
    assert found.repays == (found.moves < REPAYS * found.stays)


def test_a_new_layout_says_what_it_costs_and_what_it_saves() -> None:
    cost = MoveCost((Load("a", from_network=2e9, network_rate=1e8),), 5000, prefill_rate=1000.0)
    prospect = Prospect(Seconds(0.5), Seconds(0.4), 10, Seconds(0.16), 10)
    assert relayout(prospect, cost, 1000).reason == (
        "a new layout would not repay: 50.0 tokens/s in place of 20.0, for 27.0 s (20.0 s to load, 5.0 s to "
        "read 5000 tokens again); the rest would take 47.0 s in place of 50.0 s"
    )
    assert relayout(prospect, cost, 100_000).repays
    nothing_can_be_read = replace(cost, prefill_rate=0.0)
    assert not relayout(prospect, nothing_can_be_read, 1e12).repays
    for wrong in (replace(prospect, batch=0), replace(prospect, predicted=Seconds(0.0))):
        with pytest.raises(ValueError, match="above 0"):
            relayout(wrong, cost, 1)
