"""When guessing ahead pays, by the paper's equations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bbquic.plan.speculation import (
    Passes,
    autoregressive_time,
    break_even_bandwidth,
    pays,
    speculative_time,
)
from bbquic.units import Bytes, BytesPerSecond, Seconds

TIMES = st.floats(0, 1).map(Seconds)


@st.composite
def passes(draw: st.DrawFn) -> Passes:
    guesses = draw(st.integers(1, 64))
    return Passes(
        batch=draw(st.integers(1, 64)),
        stages=draw(st.integers(1, 6)),
        hidden=Bytes(draw(st.integers(64, 20_000))),
        compute=draw(TIMES),
        latency=draw(TIMES),
        guesses=guesses,
        committed=draw(st.floats(1, guesses)),
        ratio=draw(st.floats(1, 8)),
        drafting=draw(TIMES),
    )


@given(of=passes(), exponent=st.floats(2, 10))
def test_speculation_is_the_shorter_exactly_above_the_break_even_bandwidth(
    of: Passes, exponent: float
) -> None:
    bandwidth, least = BytesPerSecond(10**exponent), break_even_bandwidth(of)
    with_trees = speculative_time(of, bandwidth, 100)
    without = autoregressive_time(of, bandwidth, 100)
    assume(abs(with_trees - without) > 1e-9 * without)
    assert (with_trees < without) == (least is not None and bandwidth > least)
    # one micro-batch: a pass is a step, and the two rules are one
    step = Seconds(with_trees * of.committed)
    assert pays(of.committed, step, without) == (with_trees < without)


def test_where_nothing_is_saved_no_bandwidth_helps() -> None:
    near = Passes(
        batch=8,
        stages=2,
        hidden=Bytes(8192),
        compute=Seconds(0.03),
        latency=Seconds(0.0),
        guesses=8,
        committed=1.5,
        ratio=2.0,
        drafting=Seconds(0.01),
    )
    assert break_even_bandwidth(near) is None
    assert break_even_bandwidth(replace(near, latency=Seconds(0.1))) is not None


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"latency": Seconds(-1.0)}, {"committed": 0.5}, {"committed": 9.0}]
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    good = Passes(
        batch=8,
        stages=2,
        hidden=Bytes(8192),
        compute=Seconds(0.03),
        latency=Seconds(0.1),
        guesses=8,
        committed=2.0,
        ratio=1.2,
        drafting=Seconds(0.01),
    )
    with pytest.raises(ValueError, match=r"above 0|below 0|guesses"):
        replace(good, **wrong)  # type: ignore[arg-type]
