"""A stage's sums: what was handed on, and what has left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bbquic.runtime.tally import MOST_LEAVING, Tally, wire_link
from bbquic.runtime.timing import Parts, StageTiming, WireLink
from bbquic.transport.channel import ChannelStatistics, Sent
from bbquic.transport.link import LinkEstimate
from bbquic.units import Bytes, BytesPerSecond, Seconds

gaps = st.lists(st.integers(0, 10**6), min_size=10, max_size=10)


@given(st.lists(st.tuples(gaps, st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20))
def test_the_sums_are_those_of_the_timings(packs: list[tuple[list[int], int, int]]) -> None:
    tally, timings = Tally(), []
    for steps, raw, sent in packs:
        marks = [sum(steps[: place + 1]) for place in range(10)]
        timings.append(StageTiming("n", 5.0, tuple(marks), raw, sent, 0.0))  # type: ignore[arg-type]
        tally.add(timings[-1])
    assert tally.steps == len(packs)
    assert (tally.raw, tally.sent) == (sum(raw for _, raw, _ in packs), sum(sent for *_, sent in packs))
    for place, total in enumerate(tally.parts):
        assert abs(total - sum(timing.parts[place] for timing in timings)) < 1e-6
    assert len(tally.parts) == len(Parts._fields)


def test_a_message_counts_once_it_has_begun_to_leave() -> None:
    tally = Tally()
    assert (tally.to_wire, tally.last_to_wire) == (0.0, 0.0)
    held, quick = Sent(), Sent(10.25)
    tally.leave(9.0, held)
    tally.leave(10.0, quick)
    assert (tally.to_wire, tally.last_to_wire) == (0.25, 0.25)
    held.began = 10.5
    assert (tally.to_wire, tally.last_to_wire) == (1.75, 1.5)
    assert tally.to_wire == 1.75
    tally.leave(11.0, Sent(10.999))  # read off the clock a moment before it was handed over
    assert (tally.to_wire, tally.last_to_wire) == (1.75, 0.0)


def test_messages_that_never_leave_are_forgotten() -> None:
    tally = Tally()
    for _ in range(10 * MOST_LEAVING):
        tally.leave(1.0, Sent())
    assert len(tally._leaving) <= MOST_LEAVING


def test_a_link_is_told_as_far_as_it_is_known() -> None:
    nothing = ChannelStatistics(0, 0, Bytes(0), Bytes(0), Bytes(0), None, None)
    assert wire_link(nothing) == WireLink(None, False, None, None, None)
    estimate = LinkEstimate(BytesPerSecond(1e6), True, Seconds(0.02), None, 0.01, 0, 1, 2, None)
    known = ChannelStatistics(0, 0, Bytes(0), Bytes(0), Bytes(0), Seconds(0.03), Seconds(0.025), estimate)
    assert wire_link(known) == WireLink(1e6, True, 0.03, 0.02, 0.01)
