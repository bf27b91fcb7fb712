"""The rate controller on simulated paths: how long messages take, what transfers get, whom it starves."""

from __future__ import annotations

from statistics import median

import pytest
from simulated_flow import Flow, make_flow
from simulated_path import MBIT, PACKET, Path, Simulation

from bbquic.transport.congestion import Phase, RateController
from bbquic.transport.report import MOST_RATE, RateReport
from bbquic.transport.transfer import Transfer
from bbquic.units import BytesPerSecond, Seconds

SMALL, LARGE, BULK = 40_000, 400_000, 20_000_000


def control_of(flow: Flow) -> RateController:
    assert isinstance(flow.control, RateController)
    return flow.control


def ideal(flow: Flow, size: int) -> float:
    return size / flow.forth.rate + flow.forth.delay + flow.forth.jitter / 2


def times(flow: Flow, size: int, count: int = 20, silence: float = 0.1) -> list[float]:
    """One-way times of messages with silences between, over the ideal, of a connection that has sent one."""
    flow.wait(flow.write(size))
    found = []
    for _ in range(count):
        flow.rest(silence)
        found.append(flow.wait(flow.write(size)).seconds / ideal(flow, size))
    return found


def share(flow: Flow, size: int = BULK) -> float:
    """Of the rate, payload only, over a whole transfer on a new connection."""
    return size / flow.wait(flow.write(size)).seconds / flow.forth.rate


# Messages.


@pytest.mark.parametrize(
    ("rate", "rtt", "size", "limit"),
    [
        (20, 0.1, LARGE, 1.10),
        (125, 0.05, LARGE, 1.15),
        (250, 0.05, LARGE, 1.25),
        (20, 0.1, SMALL, 1.15),
        (125, 0.05, SMALL, 1.15),
        (40, 0.08, LARGE, 1.10),  # from here on, cells that nothing was tuned on
        (500, 0.02, LARGE, 1.25),
        (5, 0.03, LARGE, 1.10),
    ],
)
def test_a_message_after_silence_takes_little_over_the_ideal(
    rate: float, rtt: float, size: int, limit: float
) -> None:
    found = times(make_flow(rate, rtt), size)
    assert median(found) <= limit
    assert max(found) <= 1.5 * limit


def test_a_longer_silence_changes_nothing() -> None:
    assert max(times(make_flow(125, 0.05), LARGE, silence=1.5)) <= 1.15


def test_the_first_message_of_a_new_connection_waits_for_one_report() -> None:
    flow = make_flow(20, 0.1)
    assert flow.wait(flow.write(LARGE)).seconds <= 1.7 * ideal(flow, LARGE)


@pytest.mark.parametrize(("rate", "rtt"), [(20, 0.1), (125, 0.05), (250, 0.05)])
def test_the_first_message_to_a_remembered_peer_does_not(rate: float, rtt: float) -> None:
    flow = make_flow(rate, rtt)
    control_of(flow).remember(BytesPerSecond(rate * MBIT), Seconds(rtt), flow.simulation.now)
    assert flow.wait(flow.write(LARGE)).seconds <= 1.15 * ideal(flow, LARGE)


def test_a_remembered_rate_that_is_six_times_too_high_costs_one_burst() -> None:
    flow = make_flow(20, 0.1)
    control_of(flow).remember(BytesPerSecond(125 * MBIT), Seconds(0.1), flow.simulation.now)
    flow.wait(flow.write(LARGE))
    assert control_of(flow).statistics().share == 1.0  # what was lost says nothing about the new rate
    assert median(times(flow, LARGE, 5)) <= 1.1


@pytest.mark.parametrize(("rate", "rtt", "loss", "limit"), [(20, 0.1, 0.01, 1.5), (125, 0.05, 0.005, 2.0)])
def test_random_loss_costs_a_retransmission_and_no_rate(
    rate: float, rtt: float, loss: float, limit: float
) -> None:
    flow = make_flow(rate, rtt, loss=loss)
    assert median(times(flow, LARGE, 40)) <= limit  # one round trip for what was lost, and no more
    assert control_of(flow).statistics().share == 1.0


def test_losses_in_runs_of_five_cost_little_rate() -> None:
    flow = make_flow(20, 0.1, loss=0.01, loss_run=5)
    assert median(times(flow, LARGE, 40)) <= 1.5
    assert control_of(flow).statistics().share >= 0.8


def test_reordering_is_survived() -> None:
    assert median(times(make_flow(125, 0.05, swap=0.01), LARGE)) <= 1.15


def test_the_rate_is_learnt_from_ordinary_messages() -> None:
    for rate in (20, 60, 125, 250):
        for size in (SMALL, LARGE):
            flow = make_flow(rate, 0.05)
            times(flow, size, 3)
            learnt = control_of(flow).link.statistics(flow.simulation.now).rate
            assert learnt == pytest.approx(rate * MBIT, rel=0.05)


def test_a_step_of_the_rate_down_is_followed_and_no_message_is_lost() -> None:
    flow = make_flow(125, 0.05)
    times(flow, LARGE, 8)
    flow.forth.set_rate(20 * MBIT)
    found = times(flow, LARGE, 10)
    assert control_of(flow).link.rate == pytest.approx(20 * MBIT, rel=0.1)
    assert median(found) <= 1.1


def test_a_step_of_the_rate_up_is_followed() -> None:
    flow = make_flow(20, 0.05)
    times(flow, LARGE, 8)
    flow.forth.set_rate(125 * MBIT)
    times(flow, LARGE, 4)
    assert control_of(flow).link.rate == pytest.approx(125 * MBIT, rel=0.1)


def test_jitter_that_hides_the_rate_still_leaves_messages_usable() -> None:
    assert median(times(make_flow(20, 0.05, jitter=0.01), LARGE, 30)) <= 1.2
    assert median(times(make_flow(200, 0.04, jitter=0.0075), LARGE, 30)) <= 1.2


@pytest.mark.parametrize(("rate", "rtt"), [(250, 0.11), (125, 0.16)])
def test_messages_within_a_round_trip_are_bursts_too(rate: float, rtt: float) -> None:
    """Never is all acknowledged that went before, and what was believed of the link is far too low."""
    flow = make_flow(rate, rtt)
    control = control_of(flow)
    control.remember(BytesPerSecond(14 * MBIT), Seconds(rtt), flow.simulation.now)
    flow.write(10_000)  # too short to be timed
    messages = []
    for _ in range(12):
        flow.rest(0.6 * rtt)
        assert control.bytes_in_flight > 0
        messages.append(flow.write(60_000))
    flow.wait(messages[-1])
    late = [message.seconds / ideal(flow, message.size) for message in messages[3:]]
    assert max(late) <= 1.15


# Long transfers.


@pytest.mark.parametrize(("rate", "least"), [(20, 0.9), (125, 0.85), (250, 0.7)])
def test_a_long_transfer_fills_the_link_from_a_cold_connection(rate: float, least: float) -> None:
    flow = make_flow(rate, 0.05)
    assert share(flow) >= least
    assert flow.forth.dropped == 0
    assert control_of(flow).phase is Phase.LONG


def test_a_long_transfer_stands_jitter_and_random_loss() -> None:
    assert share(make_flow(20, 0.05, jitter=0.02, loss=0.005), BULK // 2) >= 0.8


def test_a_long_transfer_finds_a_rate_that_jitter_hid() -> None:
    assert share(make_flow(125, 0.05, jitter=0.01, loss=0.005)) >= 0.75


def test_a_long_transfer_works_without_reports() -> None:
    """The peer's system has no arrival times."""
    flow = make_flow(125, 0.05)
    flow.timestamps = False
    assert share(flow) >= 0.75


def test_a_long_transfer_keeps_the_queue_short() -> None:
    flow = make_flow(125, 0.05, limit=1.0)
    flow.write(3 * BULK)
    flow.rest(1.0)
    queues = []
    for _ in range(200):
        flow.rest(0.01)
        queues.append(flow.forth.backlog / flow.forth.rate)
    assert median(queues) < 0.015
    assert max(queues) < 0.06


def test_a_long_transfer_follows_a_step_down_within_a_few_round_trips() -> None:
    flow = make_flow(125, 0.05)
    flow.write(5 * BULK)
    flow.rest(2.0)
    flow.forth.set_rate(20 * MBIT)
    flow.rest(0.75)  # five round trips of 50 ms and a full queue of 100
    delivered, dropped = flow.delivered, flow.forth.dropped
    flow.rest(2.0)
    assert flow.forth.dropped == dropped
    assert flow.delivered - delivered >= 0.8 * 2.0 * 20 * MBIT


def test_a_step_down_that_loses_nothing_is_followed_too() -> None:
    flow = make_flow(125, 0.05, limit=10.0)
    flow.write(5 * BULK)
    flow.rest(2.0)
    flow.forth.set_rate(20 * MBIT)
    flow.rest(2.0)  # a round trip through the queue is 0.7 s
    assert flow.forth.backlog / flow.forth.rate < 0.1
    assert flow.forth.dropped == 0


def test_a_long_transfer_follows_a_step_up() -> None:
    flow = make_flow(20, 0.05)
    flow.write(3 * BULK)
    flow.rest(2.0)
    flow.forth.set_rate(125 * MBIT)
    flow.rest(1.5)
    delivered = flow.delivered
    flow.rest(1.0)
    assert flow.delivered - delivered >= 0.8 * 125 * MBIT


def test_persistent_loss_backs_off() -> None:
    flow = make_flow(20, 0.05, loss=0.1)
    flow.write(2 * BULK)
    flow.rest(10.0)
    sent = flow.sent
    flow.rest(2.0)
    assert (flow.sent - sent) * PACKET / 2.0 <= 0.5 * 20 * MBIT
    flow.forth.loss = 0.0
    flow.rest(10.0)
    delivered = flow.delivered
    flow.rest(2.0)
    assert flow.delivered - delivered >= 0.7 * 2.0 * 20 * MBIT  # and comes back


def test_messages_back_off_under_persistent_loss_too() -> None:
    flow = make_flow(20, 0.05, loss=0.12)
    times(flow, LARGE, 20)
    assert control_of(flow).statistics().share < 0.7


def test_after_a_cut_nobody_looks_for_more_for_two_cycles() -> None:
    transfer = Transfer()
    transfer.begin(0.0, 2_500_000.0, is_rough=False)
    transfer.cut(0.9, 0.0)
    gains = []
    for step in range(1, 24):
        transfer.advance(step / 16, 0, 1 / 16)
        gains.append(transfer.gain)
    assert gains.index(max(gains)) == 6 + 2 * 6
    assert max(gains) == 1.25


# Others on the same bottleneck.


def split(rate: float, limit: float, algorithms: list[str], seconds: float) -> list[float]:
    """What flows that start a second apart get of a bottleneck in the end."""
    simulation = Simulation()
    path = Path(simulation, rate * MBIT, 0.025, limit=limit)
    flows = []
    for algorithm in algorithms:
        control = RateController(max_datagram_size=PACKET) if algorithm == "rate" else algorithm
        flows.append(Flow(simulation, path, 0.025, control))
        flows[-1].write(int(2 * (seconds + 5) * rate * MBIT))
        simulation.run(simulation.now + 1.0)
    simulation.run(simulation.now + 4.0)
    before = [flow.delivered for flow in flows]
    simulation.run(simulation.now + seconds)
    return [
        (flow.delivered - start) / seconds / (rate * MBIT) for flow, start in zip(flows, before, strict=True)
    ]


@pytest.mark.parametrize("algorithms", [["rate", "reno"], ["reno", "rate"], ["rate", "cubic"]])
def test_a_competing_flow_gets_a_quarter_and_so_do_we(algorithms: list[str]) -> None:
    assert min(split(20, 0.1, algorithms, 40.0)) >= 0.25


@pytest.mark.parametrize("limit", [0.03, 0.2])
def test_nobody_starves_on_short_and_long_queues(limit: float) -> None:
    assert min(split(20, limit, ["rate", "reno"], 40.0)) >= 0.15


def test_two_of_ours_share() -> None:
    assert min(split(20, 0.1, ["rate", "rate"], 20.0)) >= 0.3


# Hostile reports, and where there is no bottleneck.


@pytest.mark.parametrize("lie", [MOST_RATE, MOST_RATE // 11])  # no bottleneck, and just below that
def test_a_false_report_lasts_a_few_round_trips(lie: int) -> None:
    flow = make_flow(20, 0.05)
    flow.wait(flow.write(SMALL))
    for number in range(100, 110):
        control_of(flow).on_report(
            RateReport(burst=number, rate=lie, packets=28, spread=0), flow.simulation.now
        )
    flow.timestamps = False  # nothing true ever comes
    flow.write(BULK)
    flow.rest(2.0)
    dropped, sent = flow.forth.dropped, flow.sent
    flow.rest(4.0)
    assert flow.forth.dropped - dropped <= 0.05 * (flow.sent - sent)
    assert (flow.sent - sent) * PACKET <= 1.3 * 4.0 * 20 * MBIT


def test_bursts_at_a_false_rate_are_cut_to_what_arrives() -> None:
    flow = make_flow(20, 0.05)
    control_of(flow).on_report(
        RateReport(burst=1, rate=MOST_RATE // 11, packets=28, spread=0), flow.simulation.now
    )
    flow.timestamps = False
    times(flow, LARGE, 10)
    dropped, sent = flow.forth.dropped, flow.sent
    times(flow, LARGE, 10)
    assert flow.forth.dropped - dropped <= 0.1 * (flow.sent - sent)


def test_a_report_of_nothing_at_all_does_not_stop_a_transfer() -> None:
    flow = make_flow(20, 0.05)
    flow.timestamps = False
    control_of(flow).on_report(RateReport(burst=1, rate=1000, packets=28, spread=0), flow.simulation.now)
    flow.wait(flow.write(LARGE))


def test_an_old_report_is_ignored() -> None:
    control = RateController(max_datagram_size=PACKET)
    control.on_report(RateReport(burst=7, rate=1_000_000, packets=28, spread=0), 1.0)
    for _ in range(3):
        control.on_report(RateReport(burst=6, rate=9_000_000, packets=28, spread=0), 1.1)
    assert control.link.rate == 1_000_000


def test_a_transfer_under_way_is_not_thrown_back_by_an_unclear_report() -> None:
    flow = make_flow(250, 0.05)
    control = control_of(flow)
    flow.wait(flow.write(LARGE))
    flow.write(LARGE)
    assert control.phase is Phase.BURST
    for burst in range(1000, 1012):
        odd = RateReport(burst=burst, rate=1_000_000 * (burst - 990), packets=28, spread=1000)
        control.on_report(odd, flow.simulation.now)
    assert control.link.clarity < 0.5
    assert control.phase is Phase.BURST


def test_a_lan_is_not_paced() -> None:
    flow = make_flow(2000, 0.0003)
    assert share(flow) >= 0.8
    assert flow.control.pacing_rate is None  # type: ignore[attr-defined]


def test_the_same_seed_gives_the_same_run() -> None:
    first = times(make_flow(20, 0.05, jitter=0.01, loss=0.01, seed=5), LARGE, 5)
    assert times(make_flow(20, 0.05, jitter=0.01, loss=0.01, seed=5), LARGE, 5) == first
