"""What a channel learns of its link, and where that goes: arrivals to reports, reports to the controller,
estimates to the memory that outlives the connection.
"""

from __future__ import annotations

import asyncio
import time

from bbquic.transport.burst import Arrival, BurstWatch
from bbquic.transport.congestion import RateController
from bbquic.transport.identity import Fingerprint, Peer
from bbquic.transport.link import LinkEstimate
from bbquic.transport.link_memory import LinkMemory
from bbquic.transport.message import Kind, Message
from bbquic.transport.probe import Probe
from bbquic.transport.quic import PinnedConnection
from bbquic.transport.report import decode_report_untrusted, report_message
from bbquic.units import Bytes, Seconds

NO_FIELDS = b"\x90"  # msgpack's empty array: a probe says nothing


class LinkSense:
    """One channel's. Both directions of it: the peer's bursts are timed here, ours by the peer."""

    def __init__(self, quic: PinnedConnection, memory: LinkMemory | None) -> None:
        self._quic = quic
        self._memory = memory
        self._control = quic.controller if isinstance(quic.controller, RateController) else None
        self._watch = BurstWatch(Bytes(quic.datagram_size))
        self._arrivals: list[Arrival] = []
        self._probe: Probe | None = None
        self._reported = asyncio.Event()

    def observe(self, arrived: int, size: int) -> None:
        """Datagrams came that the kernel handed over as one: its time in ns, and their bytes."""
        self._arrivals.append((arrived, size))

    def reports(self) -> list[Message]:
        """What the peer is to be told of the bursts that came; nearly always nothing."""
        if not self._arrivals:
            return []
        arrivals, self._arrivals = self._arrivals, []
        round_trip = self._quic.round_trip()
        measured = self._watch.observe(arrivals, round_trip[0] if round_trip else None)
        return [report_message(one) for one in measured]

    def take_report_untrusted(self, message: Message, now: float) -> None:
        """The peer timed a burst of ours. Raises: RemoteProtocolError."""
        report = decode_report_untrusted(message)
        if self._control is not None:
            self._control.on_report(report, now)
            self._quic.pace_anew()
        if self._probe is not None:
            self._probe.on_report(report, now)
            self._reported.set()

    def recall(self, peer: Peer, key: Fingerprint, now: float) -> None:
        """Start from what an earlier connection to this peer knew."""
        known = self._memory.recall(peer.name, key, time.time()) if self._memory is not None else None
        if known is not None and self._control is not None:
            self._control.remember(known.rate, known.min_rtt, now)
            self._quic.pace_anew()

    def remember(self, peer: Peer, key: Fingerprint, now: float) -> None:
        """The connection ends: keep what it learnt."""
        estimate = self.estimate(now)
        if self._memory is not None and estimate is not None and estimate.reports:
            self._memory.remember(peer.name, key, estimate, time.time())
            self._memory.save()

    def estimate(self, now: float) -> LinkEstimate | None:
        """The link to the peer; None where another congestion controller is in charge."""
        return None if self._control is None else self._control.link.statistics(now)

    def begin_probe(self, now: float) -> Probe:
        """From now on the peer's reports go to this probe as well."""
        self._probe = Probe(now, datagram_size=self._quic.datagram_size)
        return self._probe

    async def wait_report(self, patience: Seconds) -> None:
        """Until the peer reported, or for so long."""
        self._reported.clear()
        try:
            async with asyncio.timeout(patience):
                await self._reported.wait()
        except TimeoutError:
            return


def probe_message(size: int) -> Message:
    """A burst that says nothing: the receiver times it like any other and drops it."""
    return Message(Kind.PROBE, NO_FIELDS, bytes(size))
