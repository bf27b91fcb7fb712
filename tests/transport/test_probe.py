"""Probes of silent links: enough to know the rate, never two on one uplink, bounded in time and bytes."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_flow import Flow, make_flow
from simulated_path import MBIT

from bbquic.transport.link import LinkEstimate
from bbquic.transport.probe import (
    ALL_PAIRS,
    PAIR_BYTES,
    PATIENCE,
    PROBE_BYTES,
    PROBE_TIME,
    Link,
    Probe,
    ProbeResult,
    needs_probe,
    plan_probes,
)
from bbquic.transport.report import RateReport
from bbquic.units import BytesPerSecond, Seconds


def all_pairs(count: int) -> list[Link]:
    return [Link(*pair) for pair in permutations([f"peer-{i}" for i in range(count)], 2)]


@given(count=st.integers(2, 8))
def test_all_pairs_of_n_hosts_take_n_minus_one_rounds(count: int) -> None:
    links = all_pairs(count)
    rounds = plan_probes(links, {f"peer-{i}": f"host-{i}" for i in range(count)})
    assert len(rounds) == count - 1
    assert sorted(link for turn in rounds for link in turn) == sorted(links)


@given(
    homes=st.lists(st.integers(0, 4), min_size=2, max_size=7),
    chosen=st.sets(st.integers(0, 41), max_size=42),
)
def test_no_host_sends_or_receives_two_probes_at_once(homes: list[int], chosen: set[int]) -> None:
    hosts = {f"peer-{i}": f"host-{home}" for i, home in enumerate(homes)}
    every = all_pairs(len(homes))
    links = [every[i] for i in chosen if i < len(every)]
    rounds = plan_probes(links, hosts)
    for turn in rounds:
        used: dict[str, list[str]] = defaultdict(list)
        for link in turn:
            used["sends"].append(hosts[link.sender])
            used["receives"].append(hosts[link.receiver])
        for names in used.values():
            assert len(names) == len(set(names))
    probed = {link for turn in rounds for link in turn}
    assert probed == {link for link in links if hosts[link.sender] != hosts[link.receiver]}


def test_five_peers_fit_the_time_and_a_pair_fits_the_bytes() -> None:
    rounds = plan_probes(all_pairs(5), {f"peer-{i}": f"host-{i}" for i in range(5)})
    assert len(rounds) * PROBE_TIME <= ALL_PAIRS
    assert 2 * PROBE_BYTES <= PAIR_BYTES


def run(probe: Probe, flow: Flow) -> ProbeResult:
    """Send a probe's bursts over a simulated path until it has a result."""
    simulation = flow.simulation
    taken = 0
    while True:
        result = probe.result(simulation.now)
        if result is not None:
            return result
        size = probe.next_burst(simulation.now)
        if size:
            flow.write(size - 40 * (size // 1200))  # its headers included
        simulation.run(min(simulation.now + 0.01, max(probe.get_timer(), simulation.now)))
        for number, rate in enumerate(flow.reported[taken:], taken + 1):
            report = RateReport(burst=number, rate=int(rate), packets=28, spread=80)
            probe.on_report(report, simulation.now + flow.back.delay)
        taken = len(flow.reported)


@pytest.mark.parametrize(("rate", "rtt"), [(20, 0.1), (125, 0.05), (250, 0.02), (5, 0.1)])
def test_a_probe_of_a_plain_link_takes_a_few_bursts(rate: float, rtt: float) -> None:
    flow = make_flow(rate, rtt)
    begin = flow.simulation.now
    result = run(Probe(begin), flow)
    assert result.is_settled
    assert result.rate == pytest.approx(rate * MBIT, rel=0.05)
    assert result.bytes_sent <= 200_000
    assert flow.simulation.now - begin <= PROBE_TIME


def test_a_probe_of_a_jittery_link_goes_on_and_stays_within_its_means() -> None:
    flow = make_flow(20, 0.05, jitter=0.01)
    begin = flow.simulation.now
    result = run(Probe(begin), flow)
    assert result.rate == pytest.approx(20 * MBIT, rel=0.25)
    assert result.bytes_sent <= PROBE_BYTES
    assert flow.simulation.now - begin <= PROBE_TIME + 0.02


def test_a_probe_whose_bursts_are_lost_ends_without_a_rate() -> None:
    probe = Probe(0.0)
    now = 0.0
    while probe.result(now) is None:
        probe.next_burst(now)
        now = max(probe.get_timer(), now + 0.001)
    result = probe.result(now)
    assert result is not None
    assert (result.rate, result.is_settled) == (None, False)
    assert result.bytes_sent <= PROBE_BYTES
    assert now <= PROBE_TIME + PATIENCE


def test_a_probe_whose_bursts_never_agree_stays_within_its_bytes() -> None:
    probe = Probe(0.0)
    now, number = 0.0, 0
    while (result := probe.result(now)) is None:
        now = max(probe.get_timer(), now + 0.001)
        if probe.next_burst(now):
            number += 1
            rate = 1_000_000 * (1 + number % 5)
            probe.on_report(RateReport(burst=number, rate=rate, packets=28, spread=80), now)
    assert not result.is_settled
    assert result.bytes_sent <= PROBE_BYTES
    assert now < PROBE_TIME


def test_a_burst_is_not_sent_into_the_one_before() -> None:
    probe = Probe(0.0)
    assert probe.next_burst(0.0) > 0
    assert probe.next_burst(0.1) == 0
    probe.on_report(RateReport(burst=1, rate=10_000_000, packets=28, spread=80), 0.1)
    assert probe.next_burst(0.11) == 0
    assert probe.next_burst(probe.get_timer()) > 0


def test_a_link_that_carries_traffic_needs_no_probe() -> None:
    rate = BytesPerSecond(1e6)
    fresh = LinkEstimate(rate, False, Seconds(0.05), None, None, 3, 3, 100, Seconds(5.0))
    bound = LinkEstimate(rate, True, Seconds(0.05), None, None, 0, 3, 100, Seconds(5.0))
    assert not needs_probe(fresh, Seconds(60.0))
    assert needs_probe(fresh, Seconds(1.0))
    assert needs_probe(bound, Seconds(60.0))
    assert needs_probe(None, Seconds(60.0))
