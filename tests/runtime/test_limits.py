"""What limits a step: the full resource, else what the loop goes to; always with figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.runtime.accounting import Loop
from bbquic.runtime.limits import (
    Cause,
    Limit,
    Load,
    believed_rate,
    limit_of,
    link_load,
    loop_shares,
    stage_loads,
    transmission_of,
)
from bbquic.runtime.timing import Hop, Parts, WireLink
from bbquic.units import Bytes, BytesPerSecond, Seconds

NONE = Seconds(0.0)
NAMES = ("home-a", "cloud-b")


def parts(compute: float = 0.0, queue: float = 0.0, encode: float = 0.0) -> Parts:
    return Parts(NONE, NONE, NONE, Seconds(compute), NONE, Seconds(encode), Seconds(queue))


def hop(
    flight: float, *, sent: int = 0, rate: float | None = None, to_wire: float = 0.0, sure: bool = True
) -> Hop:
    believed = None if rate is None else BytesPerSecond(rate)
    unsure = Seconds(0.001 if sure else math.inf)
    return Hop(Seconds(to_wire), Seconds(flight), unsure, Bytes(sent), Bytes(sent), believed)


def loop(stages: list[Parts], hops: list[Hop]) -> Loop:
    measured = sum(part.total for part in stages) + sum(one.to_wire + one.flight for one in hops)
    return Loop(Seconds(measured), tuple(stages), tuple(hops))


def said(limit: Limit | None) -> str:
    assert limit is not None
    return limit.sentence


def test_a_full_link_is_named_with_what_it_carries() -> None:
    load = link_load("home-a -> cloud-b", 23.25e6 * 20, Seconds(20), BytesPerSecond(25e6))
    assert load is not None
    words = "hop home-a -> cloud-b: link busy 93 % (23.2 MB/s of 25.0 MB/s)"
    assert said(limit_of([load], None, NAMES)) == words


def test_a_full_device_is_named_with_its_time_a_step() -> None:
    loads = stage_loads("home-a", parts(compute=19.4), steps=400, elapsed=Seconds(20))
    assert said(limit_of(loads, None, NAMES)) == "home-a: compute busy 97 % (48.5 ms a step)"


def test_a_full_lane_is_named_with_its_side() -> None:
    loads = stage_loads("home-a", parts(compute=5, encode=18), steps=10, elapsed=Seconds(20))
    assert said(limit_of(loads, None, NAMES)) == "home-a, outbound: copies and codec busy 90 %"


def test_where_nothing_is_full_latency_is_named_with_its_largest_hop() -> None:
    step = loop([parts(0.02), parts(0.01)], [hop(0.01), hop(0.05), hop(0.01)])
    loads = [Load(Cause.COMPUTE, "home-a", 0.2)]
    assert said(limit_of(loads, step, NAMES)) == (
        "latency: 70 % of the 100 ms step is flight (largest: hop home-a -> cloud-b, 50.0 ms); "
        "nothing is full (home-a 20 %); more micro-batches or sequences would fill it"
    )


def test_a_flight_at_a_known_rate_is_bytes_first_and_latency_after() -> None:
    slow = hop(0.05, sent=1_000_000, rate=25e6)
    assert transmission_of(slow) == pytest.approx(0.04)
    shares = loop_shares(loop([parts(0.01)], [slow, hop(0.01)]))
    assert shares[Cause.TRANSMISSION] == pytest.approx(0.04)
    assert shares[Cause.LATENCY] == pytest.approx(0.02)
    limit = limit_of([], loop([parts(0.01)], [slow, hop(0.01)]), ["home-a"])
    assert limit is not None
    assert limit.cause is Cause.TRANSMISSION


def test_a_flight_below_zero_counts_as_none_and_an_unknown_one_is_not_guessed() -> None:
    assert transmission_of(hop(-0.01, sent=10, rate=1.0)) == NONE
    shares = loop_shares(Loop(Seconds(0.1), (parts(0.02),), (hop(-0.05), hop(5000.0, sure=False))))
    assert shares[Cause.LATENCY] == NONE


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (loop([parts(0.2)], [hop(0.01), hop(0.01)]), Cause.COMPUTE),
        (loop([parts(0.01, queue=0.3)], [hop(0.01), hop(0.01)]), Cause.WAITING),
        (loop([parts(0.01, encode=0.3)], [hop(0.01), hop(0.01)]), Cause.LANE),
        (loop([parts(0.01)], [hop(0.01, to_wire=0.3), hop(0.01)]), Cause.TRANSMISSION),
    ],
)
def test_the_loop_is_named_by_what_dominates_it(step: Loop, cause: Cause) -> None:
    limit = limit_of([], step, ["home-a"])
    assert limit is not None
    assert limit.cause is cause
    assert "ms step is" in limit.sentence
    assert "%" in limit.sentence


def test_nothing_known_is_nothing_said() -> None:
    assert limit_of([], None, NAMES) is None
    assert limit_of([Load(Cause.LINK, "hop a -> b", 0.5)], None, NAMES) is None


def test_a_link_that_was_never_full_cannot_be_said_to_be_busy() -> None:
    assert believed_rate(WireLink(1e6, True, None, None, None)) is None
    assert believed_rate(WireLink(1e6, False, None, None, None)) == 1e6
    assert believed_rate(None) is None
    assert link_load("a -> b", 100, Seconds(1), None) is None
    assert link_load("a -> b", 100, NONE, BytesPerSecond(1)) is None


@given(
    st.lists(st.tuples(st.floats(0, 2), st.sampled_from(list(Cause)[:4])), max_size=6),
    st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=4),
    st.floats(-1, 1),
)
def test_whatever_the_figures_a_sentence_names_a_share_between_0_and_100(
    busy: list[tuple[float, Cause]], stages: list[tuple[float, float, float]], flight: float
) -> None:
    step = Loop(Seconds(1.0), tuple(parts(*one) for one in stages), (hop(flight),) * (len(stages) + 1))
    loads = [Load(cause, f"r{place}", share) for place, (share, cause) in enumerate(busy)]
    limit = limit_of(loads, step, [f"s{place}" for place in range(len(stages))])
    assert limit is not None
    full = max((share for share, _ in busy), default=0) > 0.85
    assert full == ("busy" in limit.sentence and "nothing is full" not in limit.sentence)
