"""The switch: close to the better of always and never, whatever link and codec are like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.plan.breakeven import (
    LEAST_PAYLOAD,
    PROBE_EVERY,
    CodecSample,
    CodecSwitch,
    HopConditions,
    Way,
)
from bbquic.units import Bytes, BytesPerSecond, Seconds

MBIT = 1e6 / 8


@dataclass(frozen=True)
class World:
    """What is really so: a codec's ratio and seconds a byte, by its way."""

    codecs: dict[Way, tuple[float, float, float]]

    def sample(self, way: Way, size: int) -> CodecSample:
        ratio, encode, decode = self.codecs[way]
        return CodecSample(
            Bytes(size), Bytes(round(ratio * size)), Seconds(encode * size), Seconds(decode * size)
        )

    def time(self, way: Way, conditions: HopConditions) -> float:
        """Seconds of one message."""
        assert conditions.rate is not None
        ratio, encode, decode = self.codecs.get(way, (1.0, 0.0, 0.0))
        parts = (encode, ratio / conditions.rate, decode)
        return conditions.payload * (max(parts) if conditions.overlapped else sum(parts))


def run(world: World, phases: list[tuple[HopConditions, int]]) -> tuple[float, list[Way]]:
    """Seconds that messages take under the switch, probes included, and the way of each."""
    switch = CodecSwitch()
    total, ways = 0.0, []
    for conditions, count in phases:
        for _ in range(count):
            probe = switch.probe(conditions, tuple(world.codecs))
            if probe is not None:
                way, size = probe
                _, encode, decode = world.codecs[way]
                total += size * (encode + decode)
                switch.note(way, world.sample(way, size))
            way = switch.choose(conditions).way
            total += world.time(way, conditions)
            ways.append(way)
            if way is not Way.RAW:
                switch.note(way, world.sample(way, conditions.payload))
    return total, ways


speeds = st.floats(1e6, 1e10).map(lambda speed: 1 / speed)
ratios = st.floats(0.3, 1.05)
codecs = st.tuples(ratios, speeds, speeds)


@settings(max_examples=200)
@given(
    rate=st.floats(1e5, 1e9),
    payload=st.integers(LEAST_PAYLOAD, 1 << 22),
    overlapped=st.booleans(),
    h8=codecs,
    rec=codecs,
)
def test_never_more_than_a_hundredth_worse_than_the_best_that_stays_as_it_is(
    rate: float,
    payload: int,
    overlapped: bool,
    h8: tuple[float, float, float],
    rec: tuple[float, float, float],
) -> None:
    world = World({Way.H8: h8, Way.REC: rec})
    conditions = HopConditions(BytesPerSecond(rate), Bytes(payload), overlapped)
    first_probes = sum(min(payload, 65536) * (one[1] + one[2]) for one in (h8, rec))
    count = 4_000
    total, _ = run(world, [(conditions, count)])
    best = count * min(world.time(way, conditions) for way in Way)
    assert total - first_probes <= 1.01 * best


def test_a_rate_that_hovers_at_break_even_does_not_make_it_flap() -> None:
    world = World({Way.H8: (0.7, 2e-9, 2e-9)})
    even = 0.3 / 4e-9  # (1 - r) / B = 1 / C + 1 / D
    near = [
        (HopConditions(BytesPerSecond(even * (1 + 0.002 * (-1) ** n)), Bytes(1 << 18), False), 1)
        for n in range(500)
    ]
    _, ways = run(world, near)
    assert sum(one is not other for one, other in pairwise(ways)) <= 1


def test_a_step_of_the_rate_is_followed_at_once() -> None:
    world = World({Way.H8: (0.67, 1 / 800e6, 1 / 1e9)})
    slow, fast = (HopConditions(BytesPerSecond(mbit * MBIT), Bytes(37_000), False) for mbit in (20, 5000))
    _, ways = run(world, [(slow, 100), (fast, 100), (slow, 100)])
    assert ways[5:100] == [Way.H8] * 95
    assert ways[101:200] == [Way.RAW] * 99
    assert ways[201:] == [Way.H8] * 99


def test_a_slow_link_takes_the_smaller_codec_and_a_faster_one_the_quicker() -> None:
    world = World({Way.H8: (0.68, 1 / 2.5e9, 1 / 1.5e9), Way.REC: (0.66, 1 / 1.2e9, 1 / 0.8e9)})
    slow, fast = (HopConditions(BytesPerSecond(mbit * MBIT), Bytes(416_000), False) for mbit in (20, 1000))
    assert run(world, [(slow, 200)])[1][-1] is Way.REC
    assert run(world, [(fast, 200)])[1][-1] is Way.H8


def test_while_off_each_codec_is_tried_once_in_64_messages() -> None:
    world = World({Way.H8: (0.999, 1e-10, 1e-10)})
    switch, conditions = CodecSwitch(), HopConditions(BytesPerSecond(1e6), Bytes(100_000), True)
    probed = []
    for number in range(1 + 3 * PROBE_EVERY):
        if switch.probe(conditions, (Way.H8,)) is not None:
            probed.append(number)
            switch.note(Way.H8, world.sample(Way.H8, 65536))
        assert switch.choose(conditions).way is Way.RAW
    assert probed == [0, PROBE_EVERY, 2 * PROBE_EVERY, 3 * PROBE_EVERY]


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (HopConditions(BytesPerSecond(1e6), Bytes(2000), False), "2000 bytes are too short"),
        (HopConditions(None, Bytes(20_000), False), "so its rate is not known"),
        (
            HopConditions(BytesPerSecond(20 * MBIT), Bytes(40_000), False),
            "H8 leaves 67%.*20 Mbit/s.*saves 32%",
        ),
        (HopConditions(BytesPerSecond(9000 * MBIT), Bytes(40_000), False), "9000 Mbit/s it would cost"),
    ],
)
def test_every_choice_has_a_reason_with_its_figures(conditions: HopConditions, reason: str) -> None:
    switch = CodecSwitch()
    switch.note(Way.H8, CodecSample(Bytes(1000), Bytes(670), Seconds(1e-6), Seconds(1e-6)))
    assert re.search(reason, switch.choose(conditions).reason)


def test_a_codec_that_saves_nothing_is_said_to() -> None:
    switch = CodecSwitch()
    switch.note(Way.H8, CodecSample(Bytes(1000), Bytes(1000), Seconds(1e-6), None))
    choice = switch.choose(HopConditions(BytesPerSecond(20 * MBIT), Bytes(40_000), False))
    assert choice.way is Way.RAW
    assert "100% of the bytes" in choice.reason
