"""A job's loop as the command sees it when the coordinator runs on the first stage's node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items

import msgspec

from bbquic.errors import ConnectionLost, PlanRefused, RemoteProtocolError, Stalled
from bbquic.runtime.cluster import StageLink
from bbquic.runtime.coordination import (
    GROUP,
    CoordinateHeader,
    EndedHeader,
    OutcomesHeader,
    ProgressHeader,
    RequestsHeader,
    WireRequest,
    grouped,
)
from bbquic.runtime.coordinator import CoordinatorOptions, Sink
from bbquic.runtime.heartbeat import Pulse
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.protocol import PlanHeader, PongHeader, RefusedHeader
from bbquic.runtime.request import Outcome, Request
from bbquic.runtime.scheduler import SchedulerOptions
from bbquic.runtime.tasks import owned_tasks
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Seconds


class RemoteCoordinator:
    """A `JobLoop` whose loop turns elsewhere: requests go there, outcomes and figures come back.

    Every outcome is handed on once, and a request counts as open until its outcome was: the window of open
    ones bounds what is on its way, held there, and waiting here.
    """

    def __init__(
        self,
        links: Items[StageLink],
        plan: PlanHeader,
        work: SchedulerOptions,
        *,
        ends: frozenset[int],
        options: CoordinatorOptions | None = None,
        drafter: str = "",
    ) -> None:
        """`links` lead to the plan's stages, the first of which hosts the coordinator; `work`, `options` and
        the name of a `drafter` are for it. Raises: ConfigError where it has no such drafter."""
        self._links = tuple(links)
        self._plan = plan
        self._options = options or CoordinatorOptions()
        self._how = CoordinateHeader.of(plan, work, ends, self._options, drafter)
        self._host = self._links[0]
        self._pulse = Pulse()
        self._statistics = LoopStatistics.none(plan.stages)
        self._progress = 0  # number of the newest
        self._heard: float | None = None  # when the loop was heard of last; None before it was asked
        self._ready = asyncio.Event()  # it takes requests
        self._over = asyncio.Event()  # it ended, and every outcome was kept
        self._unsent: asyncio.Queue[Request | None] = asyncio.Queue(GROUP)
        self._awaited: set[int] = set()  # lines whose outcome is to come
        self._held = 0  # outcomes that came and are not kept yet
        self._room = asyncio.Event()  # in the window
        self._all_sent = False
        self._has_ended = False
        # never full: each group has an outcome that was awaited, and those are bounded by the window
        self._outcomes: asyncio.Queue[Items[Outcome]] = asyncio.Queue(self._how.window)

    async def run(self, requests: AsyncIterator[Request], sink: Sink) -> None:
        """See `JobLoop.run`."""
        async with owned_tasks() as tasks:
            beside = [tasks.create_task(self._listen(place)) for place in range(len(self._links))]
            self._heard = asyncio.get_running_loop().time()
            beside.append(tasks.create_task(self._heartbeat()))
            beside.append(tasks.create_task(self._deliver(sink)))
            tasks.create_task(self._read(requests))
            await self._send(Kind.COORDINATE, self._how)
            await self._ready.wait()
            await self._send_requests()
            await self._over.wait()
            for task in beside:
                task.cancel()

    def statistics(self) -> LoopStatistics:
        """See `JobLoop.statistics`: as the node told it last."""
        silent = self._silence()
        if silent < self._options.slow:
            return self._statistics
        waiting = f"{self._whose()} for {silent:.0f} s; {self._whereabouts()}"
        return msgspec.structs.replace(self._statistics, waiting_for=waiting)

    # To the node.

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        """Queue requests as the window allows."""
        async for request in requests:
            while len(self._awaited) + self._held >= self._how.window:
                self._room.clear()
                await self._room.wait()
            self._awaited.add(request.line)
            await self._unsent.put(request)
        await self._unsent.put(None)

    async def _send_requests(self) -> None:
        """Send requests until the last, as many at once as have come together."""
        number = 0
        while not self._all_sent:
            together = [await self._unsent.get()]
            while not self._unsent.empty():
                together.append(self._unsent.get_nowait())
            self._all_sent = together[-1] is None
            wire = [WireRequest.of(request) for request in together if request is not None]
            groups = list(grouped(wire, lambda one: one.weight)) or [[]]
            for place, group in enumerate(groups, 1):
                last = self._all_sent and place == len(groups)
                header = RequestsHeader(self._plan.job, self._plan.epoch, number, tuple(group), last)
                await self._send(Kind.REQUESTS, header)
                number += 1

    async def _heartbeat(self) -> None:
        """Ask the node what it is at. Raises: Stalled when the loop there was not heard of for too long."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._send(Kind.PING, self._pulse.ping(Seconds(loop.time())))
            except ConnectionLost:
                return  # its listener raises, with the reason
            await asyncio.sleep(self._options.heartbeat)
            if self._silence() > self._options.stall:
                raise Stalled(f"waited {self._silence():.0f} s for {self._whose()}; {self._whereabouts()}")

    async def _send(self, kind: Kind, header: msgspec.Struct) -> None:
        await self._host.channel.send(Message(kind, encode_header(header)))

    # From the nodes.

    async def _listen(self, place: int) -> None:
        """Handle what a node sends. Raises: what the coordinator reports; RemoteProtocolError."""
        link = self._links[place]
        while True:
            message = await link.channel.receive()
            try:
                self._handle_untrusted(place, message)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"{link.stage.node}: {error.message}") from error

    def _handle_untrusted(self, place: int, message: Message) -> None:
        now = Seconds(asyncio.get_running_loop().time())
        if message.kind is Kind.PONG:
            pong = decode_header_untrusted(PongHeader, message.header)
            if place == 0:
                self._pulse.take(pong, now)
        elif message.kind is Kind.REFUSED:
            refused = decode_header_untrusted(RefusedHeader, message.header)
            raise PlanRefused(refused.reason, hint=refused.hint)
        elif place == 0 and message.kind in (Kind.PROGRESS, Kind.OUTCOMES, Kind.ENDED):
            self._heard = now
            self._hear_untrusted(message)
        else:
            raise RemoteProtocolError(f"{message.kind.name} is not what this stage sends")

    def _hear_untrusted(self, message: Message) -> None:
        """What the coordinator says. Of another job it is only late."""
        match message.kind:
            case Kind.PROGRESS:
                progress = decode_header_untrusted(ProgressHeader, message.header)
                if self._is_mine(progress.job, progress.epoch) and progress.number > self._progress:
                    self._progress = progress.number
                    self._take_statistics_untrusted(progress.statistics)
                    self._ready.set()
            case Kind.OUTCOMES:
                outcomes = decode_header_untrusted(OutcomesHeader, message.header)
                if self._is_mine(outcomes.job, outcomes.epoch):
                    self._take_outcomes_untrusted(outcomes)
            case _:
                ended = decode_header_untrusted(EndedHeader, message.header)
                if self._is_mine(ended.job, ended.epoch):
                    self._take_end_untrusted(ended)

    def _is_mine(self, job: str, epoch: int) -> bool:
        return (job, epoch) == (self._plan.job, self._plan.epoch)

    def _take_statistics_untrusted(self, statistics: LoopStatistics) -> None:
        if tuple(one.stage for one in statistics.stages) != self._plan.stages:
            raise RemoteProtocolError("it tells of other stages than the plan's")
        self._statistics = statistics

    def _take_outcomes_untrusted(self, header: OutcomesHeader) -> None:
        group: list[Outcome] = [one.plain() for one in header.completions]
        group += [one.plain() for one in header.unanswerable]
        for outcome in group:
            if outcome.line not in self._awaited:
                raise RemoteProtocolError(f"it answers line {outcome.line}, which it was not asked for")
            self._awaited.remove(outcome.line)
        self._held += len(group)
        self._outcomes.put_nowait(group)

    def _take_end_untrusted(self, ended: EndedHeader) -> None:
        if ended.error is not None:
            raise ended.error.error()
        assert ended.statistics is not None
        if not self._all_sent:
            raise RemoteProtocolError("it ended the job before it had every request")
        self._progress = 2**62  # none is newer
        self._take_statistics_untrusted(ended.statistics)
        self._has_ended = True
        self._end_if_over()

    async def _deliver(self, sink: Sink) -> None:
        """Hand outcomes on, as many at once as have come together; then their requests are no longer open."""
        while True:
            together = list(await self._outcomes.get())
            while not self._outcomes.empty():
                together.extend(self._outcomes.get_nowait())
            await sink(together)
            self._held -= len(together)
            self._room.set()
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._has_ended and not self._awaited and not self._held:
            self._over.set()

    # Waiting.

    def _silence(self) -> Seconds:
        """How long the loop was not heard of."""
        if self._heard is None or (self._has_ended and not self._awaited):  # nothing more is to be heard
            return Seconds(0.0)
        return Seconds(asyncio.get_running_loop().time() - self._heard)

    def _whose(self) -> str:
        return f"{self._host.stage.node}, which coordinates job {self._plan.job}"

    def _whereabouts(self) -> str:
        last = self._pulse.last
        return "not heard of" if last is None else f"{last.activity} for {last.since:.0f} s"
