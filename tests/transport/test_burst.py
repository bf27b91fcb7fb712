"""The rate of a link from arrival times: right within 5 % on every bottleneck that can be timed at all."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.transport.burst import Arrival, BurstWatch, link_rate
from bbquic.units import Bytes, Seconds

MBIT = 1e6 / 8
RATES = st.floats(20 * MBIT, 250 * MBIT)
SIZES = st.sampled_from([1200, 1452])
ROUND_TRIP = Seconds(0.05)


def train(
    rate: float,
    count: int = 28,
    size: int = 1200,
    *,
    bucket: int = 0,
    jitter: float = 0.0,
    grain: int = 1,
    grant: float = 0.0,
    cross: float = 0.0,
    seed: int = 0,
) -> list[Arrival]:
    """Arrivals of packets sent at once through a bottleneck that starts with `bucket` bytes of tokens, sends
    in grants every `grant` seconds if so told, and serves a packet of another flow before one in `cross`."""
    dice = random.Random(seed)
    leaves = last = 0.0
    arrivals = []
    for _ in range(count):
        if cross and dice.random() < cross:
            leaves += size / rate
        if bucket >= size:
            bucket -= size
            leaves += size / 125e6
        else:
            leaves += size / rate
        time = leaves if not grant else -(-leaves // grant) * grant
        last = max(last, time + dice.random() * jitter)
        nanoseconds = int(last * 1e9)
        arrivals.append((-(-nanoseconds // grain) * grain + 10**18, size))
    return arrivals


def error_of(arrivals: list[Arrival], rate: float, size: int = 1200) -> float:
    measured = link_rate(arrivals, size)
    assert measured is not None
    return abs(measured[0] / rate - 1)


@given(rate=RATES, size=SIZES, count=st.integers(20, 40))
def test_a_plain_bottleneck_is_read_to_a_thousandth(rate: float, size: int, count: int) -> None:
    assert error_of(train(rate, count, size), rate, size) < 0.001


@given(rate=RATES, bucket=st.integers(0, 12_000))
def test_a_token_bucket_that_lets_the_first_packets_through_is_seen_past(rate: float, bucket: int) -> None:
    assert error_of(train(rate, bucket=bucket), rate) < 0.05


@given(rate=RATES, grain=st.integers(1, 20_000))
def test_a_clock_with_a_grain_of_20_microseconds_will_do(rate: float, grain: int) -> None:
    assert error_of(train(rate, grain=grain), rate) < 0.05


@given(rate=st.floats(20 * MBIT, 50 * MBIT), grant=st.floats(0.0003, 0.001))
def test_a_modem_that_sends_in_grants_is_read_over_several_of_them(rate: float, grant: float) -> None:
    estimates = []
    for count in range(28, 36):
        measured = link_rate(train(rate, count, grant=grant))
        if measured is not None:
            estimates.append(measured[0])
    assert abs(median(estimates) / rate - 1) < 0.1


@given(rate=RATES, share=st.floats(0, 0.3), seed=st.integers(0, 1 << 30))
@settings(max_examples=50)
def test_jitter_shorter_than_the_head_cancels_over_a_few_bursts(rate: float, share: float, seed: int) -> None:
    jitter = share * 28 * 1200 / rate / 10
    estimates = [link_rate(train(rate, jitter=jitter, seed=seed + i)) for i in range(9)]
    assert abs(median(estimate[0] for estimate in estimates if estimate) / rate - 1) < 0.05


@pytest.mark.parametrize("rate", [20 * MBIT, 125 * MBIT, 250 * MBIT])
def test_a_thin_flow_beside_ours_is_not_taken_for_the_rate(rate: float) -> None:
    estimates = [link_rate(train(rate, cross=0.03, seed=seed)) for seed in range(200)]
    assert abs(median(estimate[0] for estimate in estimates if estimate) / rate - 1) < 0.05


@given(rate=RATES, run=st.integers(2, 3))
def test_super_packets_with_one_stamp_count_as_one_arrival(rate: float, run: int) -> None:
    single = train(rate, 30)
    joined = [
        (single[min(i + run, len(single)) - 1][0], sum(size for _, size in single[i : i + run]))
        for i in range(0, len(single), run)
    ]
    same_stamp = [
        (single[min(i // run * run + run, len(single)) - 1][0], size) for i, (_, size) in enumerate(single)
    ]
    assert error_of(joined, rate) < 0.05
    assert error_of(same_stamp, rate) < 0.05


def test_a_head_in_one_piece_says_nothing() -> None:
    assert link_rate([(10**18, 1200)] * 28) is None


def test_jitter_longer_than_the_head_is_not_called_a_rate() -> None:
    refused = sum(link_rate(train(250 * MBIT, jitter=0.02, seed=seed)) is None for seed in range(100))
    assert refused > 80


@given(arrivals=st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(1, 65_000)), max_size=120))
def test_no_arrivals_break_the_watch(arrivals: list[Arrival]) -> None:
    watch = BurstWatch()
    for found in watch.observe(arrivals, ROUND_TRIP):
        assert found.rate > 0
        assert 0 <= found.spread <= 1


def paced(*gaps_us: int) -> list[Arrival]:
    """Full datagrams with these gaps between them."""
    times = [10**18 + 1000 * sum(gaps_us[:i]) for i in range(len(gaps_us) + 1)]
    return [(time, 1200) for time in times]


def test_what_a_token_bucket_lets_through_at_first_is_not_the_rate() -> None:
    found = link_rate(paced(*[100] * 12, *[1000] * 12))
    assert found is not None
    assert found[0] == pytest.approx(1.2e6)


def test_a_head_that_speeds_up_half_way_is_unclear() -> None:
    found = link_rate(paced(*[1000] * 12, *[100] * 12))
    assert found is None or found[1] > 0.5


@pytest.mark.parametrize("lump", [3, 4])
def test_a_receiver_that_wakes_late_and_then_in_steps_still_sees_the_rate(lump: int) -> None:
    """A polled card: what waited comes at once, a few us apart, and from then on a lump in each step."""
    step = 40 * lump  # us; 1200 bytes in 40 us are 240 Mbit/s
    late = [4] * 10
    steps = ([step - 4 * (lump - 1)] + [4] * (lump - 1)) * 6
    found = link_rate(paced(*late, *steps)[:28])
    assert found is not None
    assert found[0] == pytest.approx(240e6 / 8, rel=0.05)


# Finding bursts.


def shifted(arrivals: list[Arrival], seconds: float) -> list[Arrival]:
    return [(time + int(seconds * 1e9), size) for time, size in arrivals]


def test_a_burst_is_reported_as_soon_as_its_head_is_there_and_once() -> None:
    watch = BurstWatch()
    burst = train(20 * MBIT, 300)
    assert watch.observe(burst[:27], ROUND_TRIP) == []
    [found] = watch.observe(burst[27:], ROUND_TRIP)
    assert found.rate == pytest.approx(20 * MBIT, rel=0.01)
    assert (found.number, found.packets) == (1, 28)


def test_each_burst_after_a_silence_is_timed() -> None:
    watch = BurstWatch()
    found = [
        rate for i in range(5) for rate in watch.observe(shifted(train(125 * MBIT, 40), 0.2 * i), ROUND_TRIP)
    ]
    assert [rate.number for rate in found] == [1, 2, 3, 4, 5]


def test_a_paced_stream_is_no_row_of_bursts() -> None:
    watch = BurstWatch()
    head = train(250 * MBIT, 32)
    quanta = [arrival for i in range(1, 100) for arrival in shifted(train(250 * MBIT, 20), 0.004 * i)]
    assert [found.number for found in watch.observe(head + quanta, ROUND_TRIP)] == [1]


def test_a_burst_shorter_than_a_head_is_reported_when_the_next_begins() -> None:
    watch = BurstWatch()
    assert watch.observe(train(20 * MBIT, 20), ROUND_TRIP) == []
    [found] = watch.observe(shifted(train(20 * MBIT, 1), 1.0), ROUND_TRIP)
    assert found.packets == 20
    assert found.rate == pytest.approx(20 * MBIT, rel=0.01)


def test_a_handful_of_packets_is_no_burst() -> None:
    watch = BurstWatch()
    watch.observe(train(20 * MBIT, 12), ROUND_TRIP)
    assert watch.observe(shifted(train(20 * MBIT, 1), 1.0), ROUND_TRIP) == []


def test_acknowledgements_begin_no_burst_and_hide_none() -> None:
    watch = BurstWatch()
    burst = shifted(train(20 * MBIT, 40), 1.0)
    acks = [(burst[0][0] - 1_000_000 * i, 40) for i in range(5, 0, -1)]
    [found] = watch.observe(acks + burst, ROUND_TRIP)
    assert found.rate == pytest.approx(20 * MBIT, rel=0.01)


def test_a_clock_set_back_spoils_one_burst_and_no_more() -> None:
    watch = BurstWatch()
    burst = train(20 * MBIT, 40)
    assert watch.observe(burst[:20] + shifted(burst[20:], -3600), ROUND_TRIP) == []
    [found] = watch.observe(shifted(burst, -3599), ROUND_TRIP)
    assert found.rate == pytest.approx(20 * MBIT, rel=0.01)


def test_larger_datagrams_make_a_longer_head() -> None:
    watch = BurstWatch(Bytes(1452))
    [found] = watch.observe(train(50 * MBIT, 40, 1452), ROUND_TRIP)
    assert found.packets == 28
