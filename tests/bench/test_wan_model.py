"""The emulator's arithmetic: queue, rate, delay, loss and order, without a clock or a socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf
from typing import Any

import pytest
from bench.wan.fabric import Departure, Fabric
from bench.wan.link import Link, Network, Uplink, mesh
from bench.wan.pipe import Bottleneck, Pipe
from hypothesis import given
from hypothesis import strategies as st

MBPS_FOR_1000_BYTES_A_SECOND = 0.008
KBYTE = 1000


def link(**fields: Any) -> Link:
    """1000 bytes a second and a queue that has no end, where nothing else is said."""
    return Link(**{"rate_mbps": MBPS_FOR_1000_BYTES_A_SECOND, "queue_ms": 1e9, **fields})


def through(pipe: Pipe, count: int, *, size: int = KBYTE, gap: float = 0.0) -> list[tuple[float, bytes]]:
    """Numbered packets, and what comes out until the end of time."""
    for number in range(count):
        pipe.arrive(number.to_bytes(4, "big").ljust(size, b"."), number * gap)
    return pipe.depart(1e12)


def numbers(packets: list[tuple[float, bytes]]) -> list[int]:
    return [int.from_bytes(packet[:4], "big") for _, packet in packets]


def test_packets_leave_at_the_rate_and_arrive_after_the_delay() -> None:
    pipe = Pipe(link(delay_ms=250), 0.0, seed=1)
    assert [due for due, _ in through(pipe, 3)] == pytest.approx([1.25, 2.25, 3.25])


def test_an_unlimited_rate_adds_nothing() -> None:
    pipe = Pipe(Link(delay_ms=40), 0.0, seed=1)
    assert [due for due, _ in through(pipe, 3, gap=1.0)] == pytest.approx([0.04, 1.04, 2.04])


def test_a_packet_that_finds_the_queue_full_is_dropped() -> None:
    pipe = Pipe(link(queue_ms=3000), 0.0, seed=1)
    assert numbers(through(pipe, 5)) == [0, 1, 2]
    assert pipe.statistics().dropped == 2


def test_a_queue_limit_in_bytes_does_not_depend_on_the_rate() -> None:
    for rate in (0.008, 8.0):
        pipe = Pipe(link(rate_mbps=rate, queue_bytes=3 * KBYTE), 0.0, seed=1)
        assert numbers(through(pipe, 5)) == [0, 1, 2]


def test_a_packet_longer_than_any_queue_passes_an_empty_one() -> None:
    assert len(through(Pipe(link(queue_ms=0), 0.0, seed=1), 3, gap=1.0)) == 3


def test_packets_over_the_links_mtu_vanish() -> None:
    pipe = Pipe(link(mtu=1280), 0.0, seed=1)
    pipe.arrive(bytes(1281), 0.0)
    pipe.arrive(bytes(1280), 0.0)
    assert [len(packet) for _, packet in pipe.depart(inf)] == [1280]
    assert pipe.statistics().too_big == 1


@pytest.mark.parametrize(("loss", "burst"), [(0.01, 1.0), (0.2, 1.0), (0.02, 5.0), (0.3, 3.0)])
def test_losses_are_as_many_and_as_long_as_asked(loss: float, burst: float) -> None:
    count = 60_000
    pipe = Pipe(link(loss=loss, loss_burst=burst), 0.0, seed=7)
    arrived = set(numbers(through(pipe, count, size=4, gap=1.0)))
    runs = [len(list(run)) for lost, run in groupby(range(count), key=lambda one: one not in arrived) if lost]
    assert sum(runs) / count == pytest.approx(loss, rel=0.15)
    mean = burst if burst > 1 else 1 / (1 - loss)
    assert sum(runs) / len(runs) == pytest.approx(mean, rel=0.15)
    assert pipe.statistics().lost == sum(runs)


@given(st.integers(0, 2**32), st.floats(0.0, 0.05), st.sampled_from([0.0, 30.0]))
def test_jitter_bends_the_delay_and_keeps_the_order(seed: int, gap: float, hold: float) -> None:
    pipe = Pipe(Link(delay_ms=50, jitter_ms=10, jitter_hold_ms=hold), 0.0, seed=seed)
    arrived = through(pipe, 50, gap=gap)
    assert numbers(arrived) == list(range(50))
    times = [due for due, _ in arrived]
    assert all(before <= after for before, after in pairwise(times))
    assert all(0.04 - 1e-9 <= due - number * gap <= 0.06 + 1e-9 for number, due in enumerate(times))


def test_a_held_jitter_stays_for_its_time() -> None:
    pipe = Pipe(Link(delay_ms=50, jitter_ms=10, jitter_hold_ms=1000), 0.0, seed=3)
    delays = {round(due - number * 0.3, 9) for number, (due, _) in enumerate(through(pipe, 4, gap=0.3))}
    assert len(delays) == 1


def test_reordered_packets_come_later_by_what_was_asked_and_hold_up_no_other() -> None:
    pipe = Pipe(Link(delay_ms=50, reorder=0.3, reorder_ms=20), 0.0, seed=3)
    delays = [due - number * 0.01 for number, (due, _) in enumerate(through(pipe, 1000, gap=0.01))]
    late = [delay for delay in delays if delay > 0.06]
    assert late == pytest.approx([0.07] * len(late))
    assert len(late) == pytest.approx(300, rel=0.2)
    assert [delay for delay in delays if delay <= 0.06] == pytest.approx([0.05] * (1000 - len(late)))


def test_a_rate_step_counts_from_the_bit_in_service_on() -> None:
    pipe = Pipe(link(), 0.0, seed=1)
    for _ in range(3):
        pipe.arrive(bytes(KBYTE), 0.0)
    assert [due for due, _ in pipe.configure(link(rate_mbps=0.004), 1.5)] == [1.0]
    assert [due for due, _ in pipe.depart(inf)] == pytest.approx([2.5, 4.5])


def test_a_link_that_is_down_keeps_what_waits_and_delivers_what_was_on_the_wire() -> None:
    pipe = Pipe(link(delay_ms=5000), 0.0, seed=1)
    for _ in range(2):
        pipe.arrive(bytes(KBYTE), 0.0)
    assert [due for due, _ in pipe.configure(link(delay_ms=5000, up=False), 1.25)] == [6.0]
    pipe.arrive(bytes(KBYTE), 50.0)
    assert pipe.timer() == inf
    assert pipe.depart(99.0) == []
    assert pipe.configure(link(delay_ms=5000), 100.0) == []
    assert [due for due, _ in pipe.depart(inf)] == pytest.approx([105.75, 106.75])


def test_a_smaller_queue_drops_from_the_tail_only() -> None:
    pipe = Pipe(link(), 0.0, seed=1)
    for number in range(5):
        pipe.arrive(bytes([number]) * KBYTE, 0.0)
    assert pipe.configure(link(queue_ms=2500), 0.5) == []
    assert [packet[0] for _, packet in pipe.depart(inf)] == [0, 1, 2]
    assert pipe.statistics().dropped == 2


CHANGES = st.sampled_from(["1", "2", "4", "down", "up"])  # KB a second, or a link's end and return
STEPS = st.lists(st.one_of(st.integers(1, 6), CHANGES), max_size=40)  # one a second: KB to send, or a change


@given(STEPS, st.sampled_from([2.1, 7.1, 1e6]))
def test_a_bottleneck_serves_as_one_that_counts_bytes(steps: list[int | str], limit: float) -> None:
    """The oracle moves time in quarters of a second, and bytes as they go."""
    settings = Link(rate_mbps=MBPS_FOR_1000_BYTES_A_SECOND, queue_ms=limit * 1e3)
    queue: Bottleneck[int] = Bottleneck(settings, 0.0)
    served: list[tuple[float, int]] = []
    waiting: list[list[float]] = []  # item, KB left
    expected: list[tuple[float, int]] = []
    rate, up = 1, True
    for second in range(len(steps) + 600):
        step = steps[second] if second < len(steps) else "up" if second == len(steps) else None
        if isinstance(step, int):
            backlog = sum(left for _, left in waiting)
            fits = backlog == 0 or (backlog + step) / rate <= limit
            assert queue.arrive(step * KBYTE, second, second) == fits
            if fits:
                waiting.append([second, step])
        elif step is not None:
            rate, up = (rate, step == "up") if step in ("up", "down") else (int(step), up)
            settings = replace(settings, rate_mbps=MBPS_FOR_1000_BYTES_A_SECOND * rate, up=up)
            served += queue.serve(second)
            queue.configure(settings, second)
            kept: list[list[float]] = []
            for one in waiting:
                if not kept or (sum(left for _, left in kept) + one[1]) / rate <= limit:
                    kept.append(one)
            waiting = kept
        for quarter in range(1, 5):
            share = rate / 4 if up else 0.0
            while waiting and share > 0:
                done = min(share, waiting[0][1])
                waiting[0][1] -= done
                share -= done
                if waiting[0][1] == 0:
                    expected.append((second + quarter / 4, int(waiting.pop(0)[0])))
    served += queue.serve(inf)
    assert [item for _, item in served] == [item for _, item in expected]
    assert [at for at, _ in served] == pytest.approx([at for at, _ in expected])


LINKS = st.builds(
    lambda rate, delay, jitter, loss, reorder, mtu: Link(
        rate_mbps=rate,
        delay_ms=delay,
        jitter_ms=delay * jitter,
        loss=loss,
        reorder=reorder,
        reorder_ms=3.0,
        queue_ms=20.0,
        mtu=mtu,
    ),
    rate=st.sampled_from([None, 1.0, 10.0]),
    delay=st.sampled_from([0.0, 5.0]),
    jitter=st.sampled_from([0.0, 0.5]),
    loss=st.sampled_from([0.0, 0.2]),
    reorder=st.sampled_from([0.0, 0.2]),
    mtu=st.sampled_from([None, 700]),
)
UPLINKS = st.sampled_from([None, Uplink(rate_mbps=2.0), Uplink(rate_mbps=8.0, queue_bytes=3000)])
EVENTS = st.lists(
    st.tuples(st.floats(0.0, 0.01), st.sampled_from(["ab", "ac", "ba", "link", "uplink"]), LINKS, UPLINKS),
    max_size=60,
)


def play(events: list[Any], first: Link, look: Callable[[Fabric, float], list[Departure]]) -> list[Departure]:
    """All that comes out of a network of three hosts; `look` may ask it before each event."""
    fabric = Fabric(mesh("a", "b", "c", link=first), 0.0)
    seen: list[Departure] = []
    now = 0.0
    for number, (gap, kind, link, uplink) in enumerate(events):
        now += gap
        seen += look(fabric, now)
        if kind == "link":
            fabric.set_link(("a", "b"), link, now)
        elif kind == "uplink":
            fabric.set_uplink("a", uplink, now)
        else:
            source, to = ("abc".index(host) for host in kind)
            fabric.receive(source, to, number.to_bytes(4, "big") * (50 + 50 * (number % 5)), now)
    return seen + fabric.depart(1e9)


def ask_when_told(fabric: Fabric, now: float) -> list[Departure]:
    seen: list[Departure] = []
    while (timer := fabric.timer()) <= now:
        departures = fabric.depart(timer)
        assert all(due == timer for due, _, _ in departures), "the timer was late"
        seen += departures
    return seen


@given(EVENTS, LINKS)
def test_how_often_a_fabric_is_asked_changes_nothing(events: list[Any], first: Link) -> None:
    seldom = play(events, first, lambda fabric, now: [])
    promptly = play(events, first, ask_when_told)
    assert sorted(seldom) == sorted(promptly)


def test_pairs_share_an_uplink_first_come_first_served() -> None:
    fabric = Fabric(Network(("a", "b", "c"), uplinks={"a": Uplink(MBPS_FOR_1000_BYTES_A_SECOND, 1e9)}), 0.0)
    for to in (1, 2, 1):
        fabric.receive(0, to, bytes(KBYTE), 0.0)
    fabric.receive(1, 0, bytes(KBYTE), 0.0)
    seen = [(due, to) for due, to, _ in fabric.depart(10.0)]
    assert seen == [(0.0, 0), (pytest.approx(1.0), 1), (pytest.approx(2.0), 2), (pytest.approx(3.0), 1)]


def test_an_uplinks_drops_are_counted_for_the_pair() -> None:
    uplink = Uplink(MBPS_FOR_1000_BYTES_A_SECOND, queue_ms=1500)
    fabric = Fabric(Network(("a", "b", "c"), uplinks={"a": uplink}), 0.0)
    fabric.receive(0, 1, bytes(KBYTE), 0.0)
    fabric.receive(0, 2, bytes(KBYTE), 0.0)
    statistics = fabric.statistics()
    assert statistics["a", "b"].dropped == 0
    assert statistics["a", "c"].dropped == 1


def test_what_waits_in_an_uplink_goes_on_when_it_is_taken_away() -> None:
    fabric = Fabric(Network(("a", "b"), uplinks={"a": Uplink(MBPS_FOR_1000_BYTES_A_SECOND)}), 0.0)
    fabric.receive(0, 1, bytes(KBYTE), 0.0)
    fabric.set_uplink("a", None, 0.5)
    assert [due for due, _, _ in fabric.depart(0.5)] == [0.5]


def test_a_fabric_with_nothing_on_its_way_has_no_timer() -> None:
    fabric = Fabric(mesh("a", "b", link=Link(delay_ms=1)), 0.0)
    assert fabric.timer() == inf
    fabric.receive(0, 1, bytes(100), 0.0)
    assert fabric.timer() == pytest.approx(0.001)
    assert len(fabric.depart(0.001)) == 1
    assert fabric.timer() == inf


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rate_mbps": 0}, "rate_mbps"),
        ({"queue_ms": -1}, "queue_ms"),
        ({"queue_bytes": -1}, "queue_bytes"),
        ({"delay_ms": -1}, "delay_ms"),
        ({"delay_ms": 1, "jitter_ms": 2}, "jitter_ms"),
        ({"jitter_hold_ms": -1}, "jitter_hold_ms"),
        ({"loss": 1.5}, "loss"),
        ({"loss_burst": 0.5}, "loss_burst"),
        ({"loss": 0.9, "loss_burst": 2}, "loss"),
        ({"reorder": 2}, "reorder"),
        ({"reorder_ms": -1}, "reorder_ms"),
        ({"mtu": 10}, "mtu"),
    ],
)
def test_a_link_that_cannot_be_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Link(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hosts": ()}, "1 to 32"),
        ({"hosts": ("a", "a")}, "twice"),
        ({"hosts": ("A b",)}, "small letters"),
        ({"hosts": ("a",), "links": {("a", "b"): Link()}}, "'b'"),
        ({"hosts": ("a",), "links": {("a", "a"): Link()}}, "itself"),
        ({"hosts": ("a",), "uplinks": {"c": Uplink(1)}}, "'c'"),
        ({"hosts": ("a",), "mtus": {"a": 5}}, "mtu"),
    ],
)
def test_a_network_that_cannot_be_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Network(**fields)
