"""Watching a cluster that somebody else drives: every node asked again and again what it is at.

PING and DESCRIBE need no right, so any pinned peer may watch; nothing here changes what a node does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bbquic.errors import BBQuicError, PeerUnreachable, RemoteProtocolError, Stalled
from bbquic.runtime.heartbeat import INTERVAL, Pulse
from bbquic.runtime.limits import Load, believed_rate, busiest, limit_of, link_load, stage_loads
from bbquic.runtime.protocol import DescribeHeader, DescriptionHeader, PongHeader
from bbquic.runtime.tasks import owned_tasks
from bbquic.runtime.telemetry import ClusterStatistics, HopStatistics, NodeStatistics, StageStatistics
from bbquic.runtime.timing import StageReport
from bbquic.transport.channel import Channel, Endpoint
from bbquic.transport.identity import Peer
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How often nodes are asked, and how long they may take."""

    interval: Seconds = INTERVAL
    dial: Seconds = Seconds(10.0)
    answer: Seconds = Seconds(10.0)  # a node that owes an answer for longer is dialled anew
    retry: Seconds = Seconds(1.0)  # after a failure; twice as long after each more of them
    most_retry: Seconds = Seconds(30.0)


class ClusterWatch:
    """The nodes at the addresses of `peers`, each asked by a task of its own."""

    def __init__(
        self, endpoint: Endpoint, peers: Sequence[Peer], options: WatchOptions | None = None
    ) -> None:
        options = options or WatchOptions()
        self._nodes = [_Node(endpoint, peer, options) for peer in peers if peer.address is not None]

    async def run(self) -> None:
        """Ask until cancelled."""
        async with owned_tasks() as tasks:
            for node in self._nodes:
                tasks.create_task(node.run())

    async def wait_answers(self, count: int) -> None:
        """Until each node gave `count` answers, or was found not to answer within its deadlines."""
        await asyncio.gather(*(node.wait_answers(count) for node in self._nodes))

    def snapshot(self) -> ClusterStatistics:
        nodes = tuple(node.snapshot() for node in self._nodes)
        loads: dict[str, list[Load]] = {}
        for node in self._nodes:
            report = None if node.trouble is not None else node.pulse.report
            if report is not None:
                loads.setdefault(report.job, []).extend(node.loads(report))
        return ClusterStatistics(nodes, tuple((job, _sentence(found)) for job, found in loads.items()))


@asynccontextmanager
async def watching(watch: ClusterWatch) -> AsyncIterator[ClusterWatch]:
    """The watch, running beside the body."""
    async with owned_tasks() as tasks:
        task = tasks.create_task(watch.run())
        try:
            yield watch
        finally:
            task.cancel()


def _sentence(loads: Sequence[Load]) -> str:
    """What limits a job by how busy its stages and links are; the loop is known to its coordinator alone."""
    limit = limit_of(loads, None, ())
    if limit is not None:
        return limit.sentence
    most = busiest(loads)
    if most is None:
        return "not known yet"
    return f"nothing is full; {most.owner} is the busiest, {most.cause} {most.busy:.0%}".replace("%", " %")


class _Node:
    """One node: its connection, while there is one, and why there is none."""

    def __init__(self, endpoint: Endpoint, peer: Peer, options: WatchOptions) -> None:
        self.peer = peer
        self.pulse = Pulse()
        self.trouble: str | None = "not reached yet"
        self._endpoint = endpoint
        self._options = options
        self._description: DescriptionHeader | None = None
        self._answers = 0
        self._tried = False
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Dial, ask until the connection ends, and begin anew, each time a little later."""
        retry = self._options.retry
        while True:
            answers = self._answers
            try:
                await self._ask()
            except BBQuicError as error:
                self.trouble = error.message
            self._tried = True
            self._news.set()
            # a node that was there until now is tried at once again, in the rhythm of the first time
            retry = self._options.retry if self._answers > answers else retry
            await asyncio.sleep(retry)
            retry = min(Seconds(2 * retry), self._options.most_retry)

    async def wait_answers(self, count: int) -> None:
        while self._answers < count and not self._tried:
            self._news.clear()
            await self._news.wait()

    async def _ask(self) -> None:
        """Raises: TransportError or Stalled, when the connection could not be made or ended."""
        channel = await self._dial()
        self.pulse, self._description = Pulse(), None
        try:
            async with owned_tasks() as tasks:
                tasks.create_task(self._send(channel))
                tasks.create_task(self._listen(channel))
        finally:
            channel.close("the watch ended")

    async def _dial(self) -> Channel:
        try:
            async with asyncio.timeout(self._options.dial):
                return await self._endpoint.connect(self.peer)
        except TimeoutError:
            raise PeerUnreachable(f"no answer for {self._options.dial:.0f} s") from None

    async def _send(self, channel: Channel) -> None:
        await channel.send(Message(Kind.DESCRIBE, encode_header(DescribeHeader())))
        while True:
            ping = self.pulse.ping(_now())
            await channel.send(Message(Kind.PING, encode_header(ping)))
            await asyncio.sleep(self._options.interval)

    async def _listen(self, channel: Channel) -> None:
        """Raises: Stalled when no answer comes for too long; ConnectionLost; RemoteProtocolError."""
        while True:
            try:
                async with asyncio.timeout(self._options.answer):
                    message = await channel.receive()
            except TimeoutError:
                raise Stalled(f"connected, but silent for {self._options.answer:.0f} s") from None
            if message.kind is Kind.PONG:
                self.pulse.take(decode_header_untrusted(PongHeader, message.header), _now())
                self.trouble = None
                self._answers += 1
                self._news.set()
            elif message.kind is Kind.DESCRIPTION:
                self._description = decode_header_untrusted(DescriptionHeader, message.header)
            else:
                raise RemoteProtocolError(f"{message.kind.name} is not what a node answers to a PING")

    def snapshot(self) -> NodeStatistics:
        assert self.peer.address is not None
        address = _shown(*self.peer.address)
        last = self.pulse.last
        if self.trouble is not None or last is None:
            return NodeStatistics(self.peer.name, address, trouble=self.trouble or "no answer yet")
        report, work, clock = last.stage, self.pulse.work, self.pulse.estimate(_now())
        return NodeStatistics(
            name=self.peer.name,
            address=address,
            device=None if self._description is None else self._description.device,
            activity=last.activity,
            since=Seconds(last.since),
            job=None if report is None else report.job,
            rtt=self.pulse.rtt,
            offset=None if clock is None else clock.offset,
            uncertainty=None if clock is None else clock.uncertainty,
            drift=None if clock is None else clock.drift,
            steps_per_second=None if work is None else work.steps / work.elapsed,
            stage=None if report is None else self._stage(report),
            hop=None if report is None or report.following is None else self._hop(report, report.following),
        )

    def loads(self, report: StageReport) -> list[Load]:
        """How busy its lanes and its link were lately."""
        work = self.pulse.work
        if work is None:
            return []
        loads = stage_loads(self.peer.name, work.parts, work.steps, work.elapsed)
        if report.following is not None:
            way = f"{self.peer.name} -> {report.following}"
            link = link_load(way, work.sent, work.elapsed, believed_rate(report.link))
            loads += [link] if link is not None else []
        return loads

    def _stage(self, report: StageReport) -> StageStatistics:
        work = self.pulse.work
        split = None if work is None else work.split
        return StageStatistics(
            node=self.peer.name,
            first_block=report.first,
            last_block=max(report.first, report.stop - 1),
            compute=None if split is None else split.compute,
            queue=None if split is None else split.queue,
            busy=None if work is None else work.busy,
            split=split,
            queued=report.queued,
        )

    def _hop(self, report: StageReport, following: str) -> HopStatistics:
        work, link = self.pulse.work, report.link
        speed = None if work is None else BytesPerSecond(work.sent / work.elapsed)
        rate = believed_rate(link)
        return HopStatistics(
            source=self.peer.name,
            target=following,
            blocks=None,
            rtt=None if link is None or link.rtt is None else Seconds(link.rtt),
            bytes_sent=Bytes(report.sent),
            messages=report.steps,
            bytes_per_second=speed,
            link_rate=None if link is None or link.rate is None else BytesPerSecond(link.rate),
            rate_is_lower_bound=link is not None and link.is_lower_bound,
            loss=None if link is None else link.loss,
            raw=Bytes(report.raw),
            to_wire=None if work is None or not work.steps else Seconds(work.to_wire / work.steps),
            busy=None if speed is None or not rate else speed / rate,
            codec=report.codec or None,
            why=report.why or None,
        )


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _now() -> Seconds:
    return Seconds(time.monotonic())
