"""Measuring links that carry nothing yet: who probes whom when, and how one probe goes.

A probe is a few short bursts, each timed by its receiver like any other. Nothing here knows a clock
or a socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import NamedTuple

from bbquic.transport.burst import HEAD_PACKETS
from bbquic.transport.link import LinkEstimate
from bbquic.transport.report import RateReport
from bbquic.units import Bytes, BytesPerSecond, Seconds

ALL_PAIRS = Seconds(15.0)  # for five peers, whatever the links are
PAIR_BYTES = Bytes(2_000_000)  # both directions together
PROBE_BYTES = Bytes(PAIR_BYTES // 2)
PROBE_TIME = Seconds(3.5)  # four rounds of five peers, with a second in hand
BURST_PACKETS = HEAD_PACKETS + 4  # what is timed, and as many as may be lost on the way
LEAST_REPORTS = 4  # quartiles of fewer mean nothing
SETTLED = 0.03  # interquartile range over median: the 5 % wanted, with room
PAUSE = Seconds(0.06)  # after a report: longer than any silence by which a receiver tells bursts apart
PATIENCE = Seconds(0.6)  # without a report: the burst or its report was lost


class Link(NamedTuple):
    """A directed link between two peers, by name."""

    sender: str
    receiver: str


def plan_probes(links: Iterable[Link], hosts: Mapping[str, str]) -> list[list[Link]]:
    """Rounds of probes that may run at once: in each, a host sends at most one and receives at most one.

    `hosts` says on which host a peer is (its address); peers of one host share its uplink, and links within
    a host are left out, as they leave it by no line. All pairs of n hosts take n - 1 rounds.
    """
    names = sorted(hosts)
    place = {name: index for index, name in enumerate(names)}

    def turn(link: Link) -> tuple[int, int]:
        """In the order of a round robin, which fills every round when each host has one peer."""
        return (place[link.receiver] - place[link.sender]) % len(names), place[link.sender]

    rounds: list[list[Link]] = []
    senders: list[set[str]] = []
    receivers: list[set[str]] = []
    for link in sorted(set(links), key=turn):
        source, target = hosts[link.sender], hosts[link.receiver]
        if source == target:
            continue
        number = 0
        while number < len(rounds) and (source in senders[number] or target in receivers[number]):
            number += 1
        if number == len(rounds):
            rounds.append([])
            senders.append(set())
            receivers.append(set())
        rounds[number].append(link)
        senders[number].add(source)
        receivers[number].add(target)
    return rounds


def needs_probe(estimate: LinkEstimate | None, oldest: Seconds) -> bool:
    """Whether a link's traffic has not shown its rate within the last `oldest` seconds."""
    if estimate is None or estimate.rate is None or estimate.is_lower_bound:
        return True
    return estimate.age is None or estimate.age > oldest


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found. `rate` is None where no burst could be timed: no bottleneck, or all were lost."""

    rate: BytesPerSecond | None
    spread: float | None
    reports: int
    bytes_sent: Bytes
    is_settled: bool


class Probe:
    """One link's: ask `next_burst` whenever `get_timer` says or a report came, until `result` is there."""

    def __init__(self, now: float, *, datagram_size: int = 1200) -> None:
        self._burst = BURST_PACKETS * datagram_size
        self._deadline = now + PROBE_TIME
        self._next_at = now
        self._sent = 0
        self._rates: list[int] = []

    def next_burst(self, now: float) -> Bytes:
        """How many bytes to send at once, 0 for none yet."""
        if self.result(now) is not None or now < self._next_at:
            return Bytes(0)
        self._sent += self._burst
        self._next_at = now + PATIENCE
        return Bytes(self._burst)

    def on_report(self, report: RateReport, now: float) -> None:
        """The receiver timed a burst."""
        self._rates.append(report.rate)
        self._next_at = now + PAUSE

    def get_timer(self) -> float:
        """When to ask again."""
        return min(self._next_at, self._deadline)

    def result(self, now: float) -> ProbeResult | None:
        """What was found, once estimates agree or time or bytes are spent; None before."""
        spread = self._spread()
        is_settled = spread is not None and spread <= SETTLED
        is_spent = self._sent + self._burst > PROBE_BYTES and now >= self._next_at
        if not (is_settled or is_spent or now >= self._deadline):
            return None
        rates = sorted(self._rates)
        rate = BytesPerSecond(rates[len(rates) // 2]) if rates else None
        return ProbeResult(rate, spread, len(rates), Bytes(self._sent), is_settled)

    def _spread(self) -> float | None:
        if len(self._rates) < LEAST_REPORTS:
            return None
        low, middle, high = quantiles(self._rates, n=4)
        return (high - low) / middle
