"""What is known of a link, what a peer may say about it, and what is kept of it for the next run."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.errors import RemoteProtocolError
from bbquic.transport.burst import BurstRate
from bbquic.transport.delivery import DeliveryMeter, MaxFilter, RecentMin
from bbquic.transport.identity import Fingerprint
from bbquic.transport.link import LinkEstimate, LinkMeter, weighted_median
from bbquic.transport.link_memory import MOST_FILE, MOST_LINKS, LinkMemory, default_path
from bbquic.transport.loss import LEAST_PACKETS, LossWatch
from bbquic.transport.message import Kind, Message
from bbquic.transport.report import (
    LEAST_RATE,
    MOST_PACKETS,
    MOST_RATE,
    MOST_SPREAD,
    RateReport,
    decode_report_untrusted,
    report_message,
)
from bbquic.units import BytesPerSecond, Seconds

KEY, OTHER_KEY = Fingerprint("sha256:one"), Fingerprint("sha256:two")
NOW = 1_800_000_000.0
DAY = 86400.0


def report(burst: int, rate: float, spread: int = 80) -> RateReport:
    return RateReport(burst=burst, rate=int(rate), packets=28, spread=spread)


# Reports.


@given(
    number=st.integers(1, (1 << 32) - 1),
    rate=st.floats(1e-3, 1e15),
    packets=st.integers(1, 1 << 20),
    spread=st.floats(0, 100),
)
def test_whatever_is_measured_can_be_reported(number: int, rate: float, packets: int, spread: float) -> None:
    message = report_message(BurstRate(number, BytesPerSecond(rate), packets, spread))
    read = decode_report_untrusted(message)
    assert read.burst == number
    assert read.rate == int(min(max(rate, LEAST_RATE), MOST_RATE))


@pytest.mark.parametrize(
    "fields",
    [
        [0, 10_000, 28, 0],
        [1 << 32, 10_000, 28, 0],
        [1, LEAST_RATE - 1, 28, 0],
        [1, MOST_RATE + 1, 28, 0],
        [1, 10_000, 0, 0],
        [1, 10_000, MOST_PACKETS + 1, 0],
        [1, 10_000, 28, -1],
        [1, 10_000, 28, MOST_SPREAD + 1],
        [1, 1e4, 28, 0],
        [1, "10000", 28, 0],
        [1, None, 28, 0],
        [1, 10_000, 28],
        [1, 10_000, 28, 0, 0],
        {"burst": 1},
        7,
    ],
)
def test_a_report_out_of_range_is_refused(fields: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_report_untrusted(Message(Kind.RATE, msgspec.msgpack.encode(fields)))


@given(place=st.integers(0, 100), byte=st.integers(0, 255), cut=st.integers(0, 20))
def test_a_damaged_report_is_read_or_refused_and_nothing_else(place: int, byte: int, cut: int) -> None:
    header = bytearray(report_message(BurstRate(7, BytesPerSecond(2_500_000), 28, 0.1)).header)
    header[place % len(header)] = byte
    try:
        read = decode_report_untrusted(Message(Kind.RATE, bytes(header[: len(header) - cut])))
    except RemoteProtocolError:
        return
    assert LEAST_RATE <= read.rate <= MOST_RATE


# The meter.


def test_one_odd_report_changes_nothing_and_two_do() -> None:
    meter = LinkMeter()
    for number in range(1, 6):
        meter.on_report(report(number, 15e6), NOW)
    meter.on_report(report(6, 2.5e6), NOW)
    assert meter.rate == 15e6
    meter.on_report(report(7, 2.5e6), NOW)
    assert meter.rate == 2.5e6


def test_reports_torn_by_jitter_weigh_less_than_clear_ones() -> None:
    meter = LinkMeter()
    for number, rate in enumerate((9e6, 8e6, 30e6, 20e6), 1):
        meter.on_report(report(number, rate, spread=900), NOW)
    meter.on_report(report(5, 15e6), NOW)
    assert meter.rate == 15e6
    assert meter.clarity < 0.5


@pytest.mark.parametrize(
    ("rates", "clarity"),
    [
        ((31e6,), 0.25),
        ((31e6, 31.7e6), 0.5),
        ((31e6, 31.7e6, 30.5e6), 1.0),
        ((31e6, 20e6, 30.5e6), 0.5),
        ((31e6, 20e6, 45e6), 0.25),
    ],
)
def test_unclear_reports_that_agree_are_clear_together(rates: tuple[float, ...], clarity: float) -> None:
    meter = LinkMeter()
    meter.on_report(report(1, 90e6, spread=400), NOW)
    for number, rate in enumerate(rates, 2):
        meter.on_report(report(number, rate, spread=400), NOW)
    assert meter.clarity == pytest.approx(clarity, abs=0.01)


def test_a_remembered_rate_holds_until_the_first_report() -> None:
    meter = LinkMeter()
    meter.remember(BytesPerSecond(5e6), Seconds(0.03), NOW)
    assert (meter.rate, meter.min_rtt) == (5e6, 0.03)
    meter.on_report(report(1, 15e6), NOW)
    assert meter.rate == 15e6


def test_statistics_tell_what_was_learnt_and_when() -> None:
    meter = LinkMeter()
    assert meter.statistics(NOW) == LinkEstimate(None, False, None, None, None, 0, 0, 0, None)
    meter.on_report(report(1, 15e6), NOW)
    for rtt in (0.05, 0.07, 0.05, 0.07):
        meter.on_rtt(Seconds(rtt), NOW)
    meter.on_packets(95, 5)
    estimate = meter.statistics(NOW + 3)
    assert (estimate.rate, estimate.min_rtt, estimate.age) == (15e6, 0.05, 3.0)
    assert (estimate.reports, estimate.rtt_samples, estimate.packets) == (1, 4, 100)
    assert estimate.loss == pytest.approx(0.05)
    assert estimate.rtt_variation is not None
    assert 0.01 < estimate.rtt_variation < 0.03


def test_a_transfer_without_reports_gives_a_lower_bound() -> None:
    meter = LinkMeter()
    meter.on_delivery(BytesPerSecond(4e6), NOW)
    estimate = meter.statistics(NOW)
    assert (estimate.rate, estimate.is_lower_bound) == (4e6, True)


def test_old_losses_fade() -> None:
    meter = LinkMeter()
    meter.on_packets(50, 50)
    meter.on_packets(40_000, 0)
    loss = meter.statistics(NOW).loss
    assert loss is not None
    assert loss < 0.001


@given(values=st.lists(st.tuples(st.floats(0, 1e9), st.floats(0.01, 1)), min_size=1))
def test_a_weighted_median_has_half_the_weight_on_either_side(values: list[tuple[float, float]]) -> None:
    middle = weighted_median(values)
    total = sum(weight for _, weight in values)
    assert sum(weight for value, weight in values if value < middle) <= total / 2 + 1e-9
    assert sum(weight for value, weight in values if value > middle) <= total / 2 + 1e-9


@given(values=st.lists(st.floats(0, 1e9), min_size=1), length=st.integers(1, 12))
def test_the_filter_holds_the_largest_of_the_last_rounds(values: list[float], length: int) -> None:
    filled = MaxFilter(length)
    for number, value in enumerate(values):
        filled.add(number, value)
        assert filled.value == max(values[max(0, number - length + 1) : number + 1])


def test_a_least_round_trip_is_forgotten_after_two_windows() -> None:
    recent = RecentMin(Seconds(10.0))
    recent.add(0.0, 0.05)
    for second in range(1, 30):
        recent.add(float(second), 0.08)
        assert recent.value == (0.05 if second <= 21 else 0.08)


def test_delivery_rate_is_bytes_over_the_longer_of_sending_and_arriving() -> None:
    meter = DeliveryMeter()
    in_flight = 0
    for i in range(10):
        meter.sent(i * 0.01, in_flight)
        in_flight += 1000
    samples = [meter.acked(0.1 + i * 0.02, i * 0.01, 1000) for i in range(10)]
    assert samples[-1] is not None
    assert samples[-1].rate == pytest.approx(10_000 / 0.28)  # all since the first was sent


def test_acknowledgements_that_queued_up_do_not_raise_the_delivery_rate() -> None:
    meter = DeliveryMeter()
    for i in range(11):
        meter.sent(i * 0.03, 1000 * i)
    meter.acked(0.301, 0.0, 1000)
    for i in range(11, 21):
        meter.sent(i * 0.03, 10_000)
    for i in range(1, 20):
        meter.acked(0.601, i * 0.03, 1000)
    last = meter.acked(0.602, 0.6, 1000)
    assert last is not None
    assert last.rate <= 1000 / 0.03 * 1.1


@pytest.mark.parametrize(
    ("lost", "has_queue", "verdict"),
    [
        (0, False, 1.0),
        (15, False, 1.0),
        (40, False, None),
        (40, True, 0.9),
        (60, False, 0.9),
        (200, False, 0.8),
    ],
)
def test_losses_are_congestion_from_a_twentieth_on(lost: int, has_queue: bool, verdict: float | None) -> None:
    watch = LossWatch()
    watch.judge(
        NOW, LEAST_PACKETS, 0, 0.05, has_queue
    )  # closes the window that began at the beginning of time
    watch.judge(NOW + 0.02, 1000 - lost, 0, 0.05, has_queue)
    assert watch.judge(NOW + 0.06, 0, lost, 0.05, has_queue) == verdict


# The memory.


def estimate(rate: float = 15e6, min_rtt: float = 0.05, reports: int = 4) -> LinkEstimate:
    return LinkEstimate(
        BytesPerSecond(rate), False, Seconds(min_rtt), Seconds(0.001), 0.0, reports, 9, 99, Seconds(1.0)
    )


def test_a_later_run_starts_from_what_was_known(tmp_path: Path) -> None:
    path = tmp_path / "state" / "links.json"
    memory = LinkMemory(path)
    memory.remember("attic", KEY, estimate(), NOW)
    memory.save()
    found = LinkMemory(path).recall("attic", KEY, NOW + 60)
    assert found is not None
    assert (found.rate, found.min_rtt, found.age) == (15e6, 0.05, 60.0)
    assert LinkMemory(path).recall("attic", OTHER_KEY, NOW) is None
    assert LinkMemory(path).recall("cellar", KEY, NOW) is None


def test_an_old_rate_is_taken_with_care_and_a_stale_one_not_at_all(tmp_path: Path) -> None:
    memory = LinkMemory(tmp_path / "links.json")
    memory.remember("attic", KEY, estimate(), NOW)
    old = memory.recall("attic", KEY, NOW + DAY)
    assert old is not None
    assert old.rate < 15e6
    assert memory.recall("attic", KEY, NOW + 31 * DAY) is None


def test_what_was_not_measured_is_not_kept(tmp_path: Path) -> None:
    memory = LinkMemory(tmp_path / "links.json")
    memory.remember("attic", KEY, estimate(reports=0), NOW)
    assert memory.recall("attic", KEY, NOW) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"version": 2, "links": []}',
        b'{"version": 1, "links": [{"peer": "a", "key": "k", "rate": 1, "min_rtt": 0.1, "seen": 1}]}',
        b'{"version": 1, "links": [{"peer": "a", "key": "k", "rate": 1e6, "min_rtt": -1, "seen": 1}]}',
        b"[" * 100_000,
        b" " * (MOST_FILE + 1),
    ],
)
def test_a_damaged_file_is_empty_and_says_so(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "links.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="bbquic.transport"):
        memory = LinkMemory(path)
    assert "links.json is not used" in caplog.text
    memory.remember("attic", KEY, estimate(), NOW)
    memory.save()
    assert LinkMemory(path).recall("attic", KEY, NOW) is not None


def test_two_processes_keep_each_others_links(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    ours, theirs = LinkMemory(path), LinkMemory(path)
    ours.remember("attic", KEY, estimate(), NOW)
    theirs.remember("cellar", KEY, estimate(), NOW)
    theirs.remember("attic", KEY, estimate(rate=9e6), NOW + 1)
    theirs.save()
    ours.save()
    read = LinkMemory(path)
    assert read.recall("cellar", KEY, NOW) is not None
    newest = read.recall("attic", KEY, NOW + 1)
    assert newest is not None
    assert newest.rate == 9e6


def test_the_file_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    memory = LinkMemory(tmp_path / "links.json")
    for number in range(MOST_LINKS + 5):
        memory.remember(f"peer-{number}", KEY, estimate(), NOW + number)
    memory.save()
    read = LinkMemory(tmp_path / "links.json")
    assert read.recall("peer-4", KEY, NOW) is None
    assert read.recall("peer-5", KEY, NOW) is not None


def test_a_file_that_cannot_be_written_is_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    memory = LinkMemory(tmp_path / "file" / "links.json")
    memory.remember("attic", KEY, estimate(), NOW)
    with caplog.at_level(logging.WARNING, logger="bbquic.transport"):
        memory.save()
    assert "cannot be written" in caplog.text


def test_the_default_place_follows_the_xdg_directories() -> None:
    home = Path("/home/someone")
    assert default_path({"XDG_STATE_HOME": "/state"}, home) == Path("/state/bbquic/links.json")
    assert default_path({}, home) == home / ".local/state/bbquic/links.json"
    assert default_path({"XDG_STATE_HOME": "relative"}, home) == home / ".local/state/bbquic/links.json"
