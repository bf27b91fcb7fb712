"""Trains of datagrams, variable-length integers, and the pacer: the pure parts below the packets."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from aioquic._buffer import Buffer
from aioquic.quic.congestion.base import QuicCongestionControl, create_congestion_control
from hypothesis import given
from hypothesis import strategies as st

from bbquic.transport.arrival import monotonic_time
from bbquic.transport.pacer import CATCH_UP, QUANTUM, Pacer
from bbquic.transport.trains import MOST_BYTES, MOST_SEGMENTS, arrival_of, couple, couple_whole
from bbquic.transport.varint import encode_varint, read_varint

DATAGRAM = 1200
RATE = 2_500_000.0  # bytes/s
HERE, THERE = ("192.0.2.1", 1), ("192.0.2.2", 2)


@given(
    st.lists(st.sampled_from([0, 1, 30, 1199, 1200, 16_000]).map(bytes), max_size=200),
    st.integers(1, MOST_BYTES),
)
def test_trains_are_the_datagrams_cut_as_a_kernel_can(datagrams: list[bytes], limit: int) -> None:
    trains = couple([part for data in datagrams for part in (data[:3], data[3:])], HERE, limit)
    assert [data for train in trains for data in train.datagrams()] == datagrams
    for train in trains:
        count = len(train.datagrams())
        assert count <= MOST_SEGMENTS
        assert count == 1 or len(train.data) <= limit


@given(st.lists(st.lists(st.integers(1, 2000).map(bytes), min_size=1, max_size=5), min_size=1, max_size=8))
def test_a_datagram_came_with_its_train(trains: list[list[bytes]]) -> None:
    datagrams = [data for train in trains for data in train]
    stamps = [(number, sum(map(len, train))) for number, train in enumerate(trains)]
    found = [arrival_of(place, datagrams, stamps) for place in range(len(datagrams))]
    assert found == [number for number, train in enumerate(trains) for _ in train]


def test_a_stamp_of_the_recent_past_is_that_long_ago_and_any_other_is_now() -> None:
    for ago, is_believed in ((0.5, True), (29.0, True), (-5.0, False), (3600.0, False)):
        before = time.monotonic()
        moment = monotonic_time(time.time_ns() - int(ago * 1e9))
        after = time.monotonic()
        # two readings of two clocks: they agree to less than what lies between the cases
        assert before - 0.2 <= moment + (ago if is_believed else 0.0) <= after + 0.2
        assert moment <= after
    assert before <= monotonic_time(None)


def test_equal_datagrams_with_a_shorter_one_at_the_end_are_one_train() -> None:
    for sizes, count in (((1200, 1200, 7), 1), ((1200, 7, 1200), 2), ((1199, 1200), 2)):
        assert len(couple_whole([(bytes(size), HERE) for size in sizes])) == count


def test_a_train_has_one_address() -> None:
    datagrams = [(b"a", HERE), (b"b", HERE), (b"c", THERE), (b"d", HERE)]
    trains = couple_whole(datagrams)
    assert [(data, train.address) for train in trains for data in train.datagrams()] == datagrams
    assert len(trains) == 3


@given(st.integers(0, 2**62 - 1))
def test_integers_are_encoded_as_aioquic_does_and_read_back(value: int) -> None:
    buffer = Buffer(capacity=8)
    buffer.push_uint_var(value)
    assert encode_varint(value) == buffer.data
    assert read_varint(b"x" + buffer.data + b"y", 1) == (value, 1 + len(buffer.data))


@given(st.integers(64, 2**62 - 1), st.data())
def test_an_integer_cut_short_ends_beyond_the_data(value: int, data: st.DataObject) -> None:
    whole = encode_varint(value)
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    with suppress(IndexError):
        assert read_varint(cut, 0)[1] > len(cut)
    with pytest.raises(IndexError):
        read_varint(cut, len(cut))


def test_integers_over_62_bits_do_not_exist() -> None:
    with pytest.raises(OverflowError):
        encode_varint(2**62)


def pacer(**attributes: object) -> tuple[Pacer, QuicCongestionControl]:
    controller = create_congestion_control("reno", max_datagram_size=DATAGRAM)
    controller.bytes_in_flight = 1
    for name, value in attributes.items():
        setattr(controller, name, value)
    made = Pacer(controller, DATAGRAM)
    made.update_rate(controller.congestion_window, 0.1)
    return made, controller


def test_nothing_is_held_back_before_a_round_trip_is_known() -> None:
    fresh = Pacer(create_congestion_control("reno", max_datagram_size=DATAGRAM), DATAGRAM)
    assert fresh.next_send_time(0.0) is None
    assert fresh.allowance(0.0) > 100 * MOST_BYTES


@given(st.lists(st.floats(0.0, 0.05), min_size=1, max_size=200))
def test_what_leaves_never_exceeds_rate_and_catch_up(pauses: list[float]) -> None:
    paced, _ = pacer(pacing_rate=RATE)
    now, sent = 1.0, 0
    for pause in pauses:
        now += pause
        allowed = paced.allowance(now)
        paced.consume(allowed)
        sent += allowed
    assert sent <= RATE * (now - 1.0) + RATE * CATCH_UP + 1


def test_a_timer_at_the_time_given_finds_a_quantum() -> None:
    paced, _ = pacer(pacing_rate=RATE)
    paced.consume(paced.allowance(1.0))
    assert paced.allowance(1.0) < DATAGRAM
    at = paced.next_time(1.0)
    assert at >= 1.0 + QUANTUM * 0.95
    assert paced.allowance(at) >= paced.quantum - 1


def test_a_controller_may_let_the_start_of_a_burst_go_unpaced() -> None:
    paced, controller = pacer(pacing_rate=RATE, restart_burst=32 * DATAGRAM)
    paced.consume(paced.allowance(1.0))
    controller.bytes_in_flight = 0
    assert paced.allowance(1.0) == 32 * DATAGRAM


def test_a_controllers_rate_counts_from_when_it_names_it() -> None:
    controller = create_congestion_control("reno", max_datagram_size=DATAGRAM)
    controller.bytes_in_flight = 1
    fresh = Pacer(controller, DATAGRAM)
    controller.pacing_rate = RATE  # type: ignore[attr-defined]  # remembered, say: no round trip is known
    assert fresh.allowance(1.0) <= RATE * CATCH_UP
    controller.pacing_rate = 2 * RATE  # type: ignore[attr-defined]
    assert RATE * CATCH_UP < fresh.allowance(2.0) <= 2 * RATE * CATCH_UP


def test_a_controller_without_a_rate_is_paced_by_its_window() -> None:
    paced, controller = pacer()
    window = controller.congestion_window
    assert paced.rate == 2.0 * window / 0.1  # slow start
    controller.ssthresh = window
    paced.update_rate(window, 0.1)
    assert paced.rate == 1.25 * window / 0.1


def test_what_aioquic_writes_is_paced_in_bytes_too_unless_it_must_not_wait() -> None:
    paced, _ = pacer(pacing_rate=RATE)
    now, count = 1.0, 0
    while paced.next_send_time(now) is None:
        paced.update_after_send(now)
        count += 1
    assert count == int(RATE * CATCH_UP) // DATAGRAM
    paced.is_open = True
    assert paced.next_send_time(now) is None
