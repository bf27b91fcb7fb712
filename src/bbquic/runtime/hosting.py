"""A coordinator on the first stage's node: it works for a command that is too far away to sit in the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Items
from contextlib import suppress

import msgspec

from bbquic.errors import BBQuicError, ConnectionLost, PlanRefused, RemoteProtocolError, Stalled
from bbquic.runtime.cluster import StageLink
from bbquic.runtime.coordination import (
    AttachedHeader,
    AttachHeader,
    CoordinateHeader,
    EndedHeader,
    OutcomesHeader,
    ProgressHeader,
    RequestsHeader,
    WireCompletion,
    WireError,
    WireUnanswerable,
    grouped,
)
from bbquic.runtime.coordinator import Coordinator
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.protocol import PlanHeader, RefusedHeader
from bbquic.runtime.reach import DIAL_DEADLINE
from bbquic.runtime.request import Completion, Outcome, Request
from bbquic.runtime.sequence import TextStreamFactory
from bbquic.runtime.tasks import owned_tasks
from bbquic.transport.channel import Channel
from bbquic.transport.identity import Peer
from bbquic.transport.local import local_pair
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header

MOST_WORDS = 4000  # of a sentence that others are told

Reach = Callable[[str], Awaitable[Channel]]  # a channel to the node of that name
Handle = Callable[[Channel, Message], Awaitable[None]]  # what the node does with a message to its stage


class Hosting:
    """One job's coordinator on its first stage's node, from the plan's arrival until the job is released.

    Its own stage is reached by a channel within the process, of which `stage_end` is the stage's.
    """

    def __init__(
        self, plan: PlanHeader, me: Peer, owner: Channel, text: TextStreamFactory, reach: Reach
    ) -> None:
        """`owner` is the channel the plan came by; `text` makes decoders of the plan's model."""
        self._plan = plan
        self._owner = owner
        self._text = text
        self._reach = reach
        self._mine, self.stage_end = local_pair(me)
        self._asked = asyncio.Event()
        self._how: CoordinateHeader | None = None
        self._inbox = Inbox()

    def coordinate_untrusted(self, how: CoordinateHeader) -> None:
        """The command says how the job is to be run. Raises: RemoteProtocolError the second time."""
        if self._how is not None:
            raise RemoteProtocolError(f"job {self._plan.job} is coordinated already")
        self._how = how
        self._asked.set()

    def take_requests_untrusted(self, group: RequestsHeader) -> None:
        """Raises: RemoteProtocolError before they were asked for, for a repeat, and beyond the window."""
        if not self._inbox.is_open:
            raise RemoteProtocolError(f"requests of job {self._plan.job} came before they were asked for")
        self._inbox.put_untrusted(group)

    async def run(self, handle: Handle) -> None:
        """Wait to be asked, run the loop, and tell the command how it ended.

        `handle` gets what the coordinator sends to its own node, as if it had come from outside.
        """
        await self._asked.wait()
        assert self._how is not None
        job, epoch = self._plan.job, self._plan.epoch
        try:
            statistics = _shortened(await self._coordinate(self._how, handle))
            ended = EndedHeader(job, epoch, statistics)
        except BBQuicError as error:
            ended = EndedHeader(job, epoch, error=WireError.of(error))
        with suppress(ConnectionLost):  # nobody is left to be told
            await self._owner.send(Message(Kind.ENDED, encode_header(ended)))

    async def _coordinate(self, how: CoordinateHeader, handle: Handle) -> LoopStatistics:
        """The whole loop; gives its last figures."""
        links: list[StageLink] = []
        try:
            async with owned_tasks() as tasks:
                beside = [tasks.create_task(self._serve_stage(handle))]
                links += await self._attach_all()
                coordinator = Coordinator(
                    links,
                    self._plan,
                    how.scheduler(self._plan),
                    ends=frozenset(how.ends),
                    text=self._text,
                    options=how.options,
                )
                self._inbox.open(how.window)
                beside.append(tasks.create_task(self._report(coordinator, how)))
                await coordinator.run(self._inbox.requests(), self._send_outcomes)
                for task in beside:
                    task.cancel()
            return coordinator.statistics()
        finally:
            for link in links[1:]:  # the own stage may go on talking to nobody until it is released
                link.channel.close("the loop ended")

    async def _serve_stage(self, handle: Handle) -> None:
        """Hand what the coordinator sends to its own stage to the node."""
        with suppress(ConnectionLost):
            while True:
                await handle(self.stage_end, await self.stage_end.receive())

    async def _attach_all(self) -> list[StageLink]:
        """The way to every stage; each then knows where its coordinator is. Raises: PlanRefused, Stalled."""
        first, *others = self._plan.stages
        links = [StageLink(first, self._mine)]
        channels: list[Channel] = []
        try:
            async with owned_tasks() as tasks:
                attaching = [tasks.create_task(self._attach(stage.node, channels)) for stage in others]
        except BaseException:
            for channel in channels:
                channel.close("the loop did not begin")
            raise
        return links + [
            StageLink(stage, task.result()) for stage, task in zip(others, attaching, strict=True)
        ]

    async def _attach(self, node: str, channels: list[Channel]) -> Channel:
        channel = await self._reach(node)
        channels.append(channel)
        await channel.send(
            Message(Kind.ATTACH, encode_header(AttachHeader(self._plan.job, self._plan.epoch)))
        )
        try:
            async with asyncio.timeout(DIAL_DEADLINE):
                message = await channel.receive()
        except TimeoutError:
            raise Stalled(f"waited {DIAL_DEADLINE:.0f} s for {node} to know its coordinator") from None
        if message.kind is Kind.REFUSED:
            refused = decode_header_untrusted(RefusedHeader, message.header)
            raise PlanRefused(refused.reason, hint=refused.hint)
        if message.kind is not Kind.ATTACHED:
            raise RemoteProtocolError(f"{node}: {message.kind.name} does not answer an ATTACH")
        decode_header_untrusted(AttachedHeader, message.header)
        return channel

    async def _send_outcomes(self, outcomes: Items[Outcome]) -> None:
        """The coordinator's sink. Once they are with the transport, the command may send as many anew."""
        job, epoch = self._plan.job, self._plan.epoch
        completions = [WireCompletion.of(one) for one in outcomes if isinstance(one, Completion)]
        refused = [
            WireUnanswerable(one.line, one.code, one.message[:MOST_WORDS])
            for one in outcomes
            if not isinstance(one, Completion)
        ]
        self._inbox.answered(len(outcomes))
        headers = [
            OutcomesHeader(job, epoch, completions=tuple(group))
            for group in grouped(completions, lambda one: one.weight)
        ] + [
            OutcomesHeader(job, epoch, unanswerable=tuple(group))
            for group in grouped(refused, lambda one: len(one.message))
        ]
        for header in headers:
            await self._owner.send(Message(Kind.OUTCOMES, encode_header(header)))

    async def _report(self, coordinator: Coordinator, how: CoordinateHeader) -> None:
        """Tell the command how the loop is, until cancelled."""
        number = 0
        while True:
            number += 1
            header = ProgressHeader(
                self._plan.job, self._plan.epoch, number, _shortened(coordinator.statistics())
            )
            await self._owner.send(Message(Kind.PROGRESS, encode_header(header)))
            await asyncio.sleep(how.heartbeat)


class Inbox:
    """Requests that came: put in their order, bounded by what the command may have open."""

    def __init__(self) -> None:
        self._window = 0
        self._open = 0  # that have no outcome yet
        self._next = 0  # number of the group whose turn it is
        self._groups: dict[int, RequestsHeader] = {}  # from that one on
        self._news = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._window > 0

    def open(self, window: int) -> None:
        """From now on `window` requests may be here without an outcome."""
        self._window = window

    def answered(self, count: int) -> None:
        """So many have their outcome."""
        self._open -= count

    def put_untrusted(self, group: RequestsHeader) -> None:
        """Raises: RemoteProtocolError for a repeat, and for more than the window allows."""
        # every group but the last has a request, so that numbers too are bounded by the window
        if not self._next <= group.number <= self._next + self._window or group.number in self._groups:
            raise RemoteProtocolError(f"group {group.number} of requests came twice, or far too early")
        self._open += len(group.requests)
        if self._open > self._window:
            raise RemoteProtocolError(f"{self._open} requests are open, and {self._window} may be")
        self._groups[group.number] = group
        self._news.set()

    async def requests(self) -> AsyncIterator[Request]:
        """All of them, in order, until the last."""
        is_last = False
        while not is_last:
            while (group := self._groups.pop(self._next, None)) is None:
                self._news.clear()
                await self._news.wait()
            self._next += 1
            is_last = group.last
            for request in group.requests:
                yield request.plain()


def _shortened(statistics: LoopStatistics) -> LoopStatistics:
    """With a `waiting_for` that a message holds: with many stages it is long."""
    words = statistics.waiting_for
    if words is None or len(words) <= MOST_WORDS:
        return statistics
    return msgspec.structs.replace(statistics, waiting_for=words[:MOST_WORDS])
