"""A step's parts against simulated machines, whose clocks disagree and whose truth is known."""

from __future__ import annotations

import math

import pytest
from clock_helpers import Clock, exchange, timing
from hypothesis import given
from hypothesis import strategies as st

from bbquic.runtime.accounting import Loop, LoopSums, account, is_known
from bbquic.runtime.clocks import ClockEstimate, ClockMeter
from bbquic.runtime.timing import StageTiming
from bbquic.units import Bytes, Seconds

durations = st.floats(0, 0.2)
stage = st.tuples(
    st.floats(-1e4, 1e4),  # the clock's offset
    st.floats(-1e-4, 1e-4),  # and its drift
    st.tuples(*[durations] * 9),  # lanes
    durations,  # to_wire
    durations,  # flight from the stage before
)
Stages = list[tuple[float, float, tuple[float, ...], float, float]]


def pass_through(stages: Stages, back: float, said: list[float] | None = None) -> tuple[Loop, list[float]]:
    """A pack launched at 100 s through simulated stages; `said` is what each notes as its to_wire, as that is
    of another message. Gives the accounts and each hop's true time from HANDED to arrival."""
    meters = []
    clocks = [Clock(offset, drift) for offset, drift, *_ in stages]
    for clock in clocks:
        meter = ClockMeter()
        for second in range(0, 100, 5):
            exchange(meter, clock, float(second), 0.02, 0.001, 0.05)
        meters.append(meter)
    now, waited = 100.0, 0.0
    timings: list[StageTiming] = []
    hops = []
    for place, (_, drift, lanes, to_wire, flight) in enumerate(stages):
        hops.append(waited + flight)
        now += waited + flight
        noted = to_wire if said is None else said[place]
        timings.append(timing(f"s{place}", clocks[place], now, lanes, to_wire=noted))
        now += timings[-1].marks[-1] / 1e6 / (1 + drift)
        waited = to_wire
    hops.append(waited + back)
    now += waited + back
    estimates = [meter.estimate(Seconds(now)) for meter in meters]
    return account(Seconds(100.0), timings, estimates, Seconds(now)), hops


@given(st.lists(stage, min_size=1, max_size=5), durations)
def test_the_parts_sum_to_the_measured_step_and_flights_are_as_good_as_stated(
    stages: Stages, back: float
) -> None:
    loop, hops = pass_through(stages, back)
    assert len(loop.hops) == len(stages) + 1
    # a stage's own durations are by its own clock, which may be 1e-4 too fast
    assert loop.total == pytest.approx(loop.measured, rel=3e-4, abs=1e-5)
    assert abs(loop.unexplained) <= 0.05 * loop.measured + 1e-5
    for hop, true in zip(loop.hops, hops, strict=True):
        assert abs(hop.to_wire + hop.flight - true) <= hop.uncertainty + 3e-4 * loop.measured + 1e-5


@given(st.lists(stage, min_size=1, max_size=4), durations, st.lists(durations, min_size=4, max_size=4))
def test_a_to_wire_of_another_message_only_moves_time_between_it_and_the_flight(
    stages: Stages, back: float, said: list[float]
) -> None:
    right, _ = pass_through(stages, back)
    off, _ = pass_through(stages, back, said)
    assert off.total == pytest.approx(right.total, abs=1e-5)
    for one, other in zip(off.hops, right.hops, strict=True):
        assert one.to_wire + one.flight == pytest.approx(other.to_wire + other.flight, abs=1e-5)


def estimate(offset: float) -> ClockEstimate:
    return ClockEstimate(Seconds(0), Seconds(offset), Seconds(0.01), 0.0, 0.0)


LANES = (0.001, 0.0, 0.002, 0.0, 0.003, 0.05, 0.0, 0.004, 0.005)


def test_a_wrong_clock_moves_time_from_one_hop_to_the_next_and_the_sum_stays() -> None:
    noted = [timing("a", Clock(5.0), 0.02, LANES)]
    came = Seconds(0.02 + 0.065 + 0.03)
    for wrong in (0.0, 0.1, -0.1):
        loop = account(Seconds(0), noted, [estimate(5.0 + wrong)], came)
        assert loop.hops[0].flight == pytest.approx(0.02 - wrong)
        assert loop.hops[1].flight == pytest.approx(0.03 + wrong)
        assert loop.unexplained == pytest.approx(0, abs=1e-9)


def test_a_clock_that_is_not_known_leaves_its_two_flights_unexplained() -> None:
    loop = account(Seconds(0), [timing("a", Clock(5e4), 0.02, LANES)], [None], Seconds(0.115), rows=Bytes(70))
    assert [is_known(hop) for hop in loop.hops] == [False, False]
    assert loop.unexplained == pytest.approx(0.02 + 0.03)
    assert loop.hops[0].sent == 70


def test_every_stage_has_its_clock() -> None:
    with pytest.raises(ValueError, match="zip"):
        account(Seconds(0), [timing("a", Clock(0), 0.0, LANES)], [], Seconds(1))


@given(st.lists(st.lists(stage, min_size=2, max_size=2), min_size=1, max_size=6), st.integers(0, 6))
def test_sums_are_those_of_their_packs_and_differences_those_of_the_later_ones(
    packs: list[Stages], seen: int
) -> None:
    loops = [pass_through(pack, 0.01)[0] for pack in packs]
    sums = before = LoopSums.none(2)
    for number, loop in enumerate(loops):
        if number == seen:
            before = sums
        sums = sums.plus(loop)
    later = loops if seen >= len(loops) else loops[seen:]
    mean = sums.since(before).mean()
    assert mean is not None
    assert mean.measured == pytest.approx(sum(loop.measured for loop in later) / len(later))
    assert mean.total == pytest.approx(sum(loop.total for loop in later) / len(later))
    assert mean.stages[1].compute == pytest.approx(sum(one.stages[1].compute for one in later) / len(later))
    assert mean.hops[1].sent == 500


def test_the_mean_of_nothing_is_nothing_and_unknown_flights_do_not_spoil_known_ones() -> None:
    assert LoopSums.none(1).mean() is None
    noted = [timing("a", Clock(5.0), 0.02, LANES)]
    known = account(Seconds(0), noted, [estimate(5.0)], Seconds(0.115))
    unknown = account(Seconds(0), noted, [None], Seconds(0.115))
    mean = LoopSums.none(1).plus(unknown).plus(known).mean()
    assert mean is not None
    assert mean.hops[0].flight == pytest.approx(0.02)
    only = LoopSums.none(1).plus(unknown).mean()
    assert only is not None
    assert math.isinf(only.hops[0].uncertainty)
