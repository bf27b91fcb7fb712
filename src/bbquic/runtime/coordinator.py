"""The loop of a job: packs to the first stage, tokens back from the last, requests in, outcomes out."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from bbquic.errors import (
    ConnectionLost,
    PlanRefused,
    RecordError,
    RemoteProtocolError,
    StageFailed,
    Stalled,
)
from bbquic.runtime.cluster import StageLink
from bbquic.runtime.draft_cycle import DraftCycle
from bbquic.runtime.heartbeat import INTERVAL, Pulse
from bbquic.runtime.observer import LoopObserver, Recorder
from bbquic.runtime.progress import MOST_DECISIONS, LoopEnd, LoopStatistics, StageProgress
from bbquic.runtime.protocol import (
    FailedHeader,
    PackHeader,
    PlanHeader,
    PongHeader,
    RefusedHeader,
    TokensHeader,
)
from bbquic.runtime.request import Outcome, Request, Unanswerable
from bbquic.runtime.scheduler import Pack, Scheduler
from bbquic.runtime.sequence import Sequence, TextStreamFactory
from bbquic.runtime.tasks import owned_tasks
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Bytes, BytesPerSecond, Seconds

Sink = Callable[[Items[Outcome]], Awaitable[None]]


class JobLoop(Protocol):
    """The coordinator's role, wherever it runs: here (`Coordinator`), or on the first stage's node
    (`remote.RemoteCoordinator`)."""

    async def run(self, requests: AsyncIterator[Request], sink: Sink) -> None:
        """Answer every request; `sink` gets each outcome exactly once, and is awaited.

        Raises: StageFailed, ConnectionLost, Stalled, PlanRefused; what `requests` or `sink` raise.
        """

    def statistics(self) -> LoopStatistics:
        """The loop so far; it may be asked before and after the run, too."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    heartbeat: Seconds = INTERVAL  # each stage is asked that often what it is at, and what its clock says
    slow: Seconds = Seconds(10.0)  # a step on its way for longer is named on the screen
    stall: Seconds = Seconds(300.0)  # a step on its way for longer ends the job
    draft: Seconds = Seconds(60.0)  # a drafter that takes longer drafts no more


@dataclass(slots=True)
class StageActivity:
    """A stage, and what it says of itself; written by the coordinator, read by the statistics."""

    link: StageLink
    pulse: Pulse

    def __str__(self) -> str:
        last = self.pulse.last
        doing, since = ("not heard of", 0.0) if last is None else (last.activity, last.since)
        return f"{self.link.stage.node}: {doing} for {since:.0f} s"


@dataclass(slots=True)
class Counters:
    """Tokens so far: of prompts that were read, those shared of them that no row had to carry, and of
    answers."""

    prompt_tokens: int = 0
    shared_tokens: int = 0
    generated_tokens: int = 0


class Coordinator:
    """Runs one job over stages that are ready. It lives in whichever process is told to run it."""

    def __init__(
        self,
        links: Items[StageLink],
        plan: PlanHeader,
        scheduler: Scheduler,
        *,
        ends: frozenset[int],
        text: TextStreamFactory,
        options: CoordinatorOptions | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`ends` are the model's end tokens; `text` makes a decoder for one answer; `recorder` gets every
        pack's times."""
        self.observer = LoopObserver([link.stage.node for link in links], recorder)
        self.stages = tuple(map(StageActivity, links, self.observer.pulses))
        self.counters = Counters()
        self._links = tuple(links)
        self._plan = plan
        self._scheduler = scheduler
        self._ends = ends
        self._text = text
        self._options = options or CoordinatorOptions()
        self._news = asyncio.Event()  # something may be launched
        self._cycle = DraftCycle(scheduler, self._news.set, self._options.draft)
        self._launched: dict[tuple[int, int], tuple[float, Pack]] = {}  # (micro-batch, step): when it left
        self._room = asyncio.Event()
        self._primed = asyncio.Event()  # the look-ahead is full, or there is no more to read
        # bounded: a disk that cannot keep up slows the job down instead of filling memory
        self._outcomes: asyncio.Queue[Items[Outcome] | None] = asyncio.Queue(256)

    async def run(self, requests: AsyncIterator[Request], sink: Sink) -> None:
        """See `JobLoop.run`."""
        async with owned_tasks() as tasks:
            watchers = [
                tasks.create_task(self._listen(place, link)) for place, link in enumerate(self._links)
            ]
            watchers.append(tasks.create_task(self._heartbeat()))
            watchers.append(tasks.create_task(self._cycle.run()))
            tasks.create_task(self._feed(requests))
            tasks.create_task(self._deliver(sink))
            await self._primed.wait()
            while not self._scheduler.is_done:
                await self._launch_all()
                self._cycle.wake()
                if self._scheduler.room:
                    self._room.set()
                await self._wait_news()
            await self._outcomes.put(None)
            for watcher in watchers:
                watcher.cancel()

    def statistics(self) -> LoopStatistics:
        """See `JobLoop.statistics`."""
        observer = self.observer
        return LoopStatistics(
            stages=tuple(StageProgress(one.link.stage, one.pulse.report) for one in self.stages),
            sums=observer.sums,
            prompt_tokens=self.counters.prompt_tokens,
            shared_tokens=self.counters.shared_tokens,
            generated_tokens=self.counters.generated_tokens,
            in_flight_sequences=self._scheduler.live,
            spent=observer.spent,
            first_tokens=observer.first_tokens.first_tokens(),
            waiting_for=self.waiting_for(),
            decisions=self._scheduler.decisions()[-MOST_DECISIONS:],
            drafts=self._scheduler.drafts,
            to_first=LoopEnd.sent(self._links[0].channel.statistics()),
            from_last=LoopEnd.received(self._links[-1].channel.statistics()),
        )

    def preempt(self, line: int) -> bool:
        """Drop the KV of a job's line; it is rebuilt from its tokens. False when the line holds no slot."""
        dropped = self._scheduler.preempt_line(line)
        self._news.set()
        return dropped

    def waiting_for(self) -> str | None:
        """Who keeps a step waiting that is on its way for longer than `slow`, and with what; None if none."""
        pack, waited = self._oldest_step()
        if pack is None or waited < self._options.slow:
            return None
        return f"micro-batch {pack.micro_batch} step {pack.step} for {waited:.0f} s; {self._whereabouts()}"

    def _whereabouts(self) -> str:
        return "; ".join(map(str, self.stages))

    def _oldest_step(self) -> tuple[Pack | None, Seconds]:
        if not self._launched:
            return None, Seconds(0.0)
        left, pack = min(self._launched.values(), key=lambda pair: pair[0])
        return pack, Seconds(asyncio.get_running_loop().time() - left)

    async def _wait_news(self) -> None:
        """Until tokens or requests are there. Raises: Stalled when a step is on its way for too long."""
        while not self._news.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.slow):
                    await self._news.wait()
            pack, waited = self._oldest_step()
            if pack is not None and waited > self._options.stall:
                raise Stalled(
                    f"waited {waited:.0f} s for micro-batch {pack.micro_batch}, step {pack.step}; "
                    f"{self._whereabouts()}"
                )
        self._news.clear()

    async def _launch_all(self) -> None:
        """Send every pack that may leave now; what a scheduler has on its way is bounded."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (pack := self._scheduler.any_pack()) is not None:
            await self._launch(pack, began)
            began = loop.time()

    async def _launch(self, pack: Pack, began: float) -> None:
        header = PackHeader(
            job=self._plan.job,
            epoch=self._plan.epoch,
            micro_batch=pack.micro_batch,
            step=pack.step,
            range=pack.range.numbers,
            rows=pack.rows,
            tokens=struct.pack(f"<{len(pack.tokens)}i", *pack.tokens),
            moves=pack.moves,
        )
        message = Message(Kind.ROWS, encode_header(header), background=header.can_wait)
        now = Seconds(asyncio.get_running_loop().time())
        self._launched[pack.micro_batch, pack.step] = (now, pack)
        self.counters.prompt_tokens += pack.prompt_tokens + pack.shared_tokens
        self.counters.shared_tokens += pack.shared_tokens
        self.observer.launched(header, Bytes(message.size), now)
        self.observer.spend(Seconds(now - began))
        self.observer.leaving(header, await self._links[0].channel.send(message))

    async def _feed(self, requests: AsyncIterator[Request]) -> None:
        """Keep the look-ahead full."""
        async for request in requests:
            sequence = Sequence(request, ends=self._ends, text=self._text())
            try:
                self._scheduler.offer(sequence)
            except RecordError as error:
                await self._outcomes.put([Unanswerable(request.line, error.code, error.message)])
                continue
            self._news.set()
            while not self._scheduler.room:
                self._primed.set()
                self._room.clear()
                await self._room.wait()
        self._scheduler.close()
        self._primed.set()
        self._news.set()

    async def _deliver(self, sink: Sink) -> None:
        """Hand outcomes on, as many at once as have come together."""
        group: Items[Outcome] | None = ()
        while group is not None:
            group = await self._outcomes.get()
            together = list(group or ())
            while group is not None and not self._outcomes.empty():
                group = self._outcomes.get_nowait()
                together.extend(group or ())
            if together:
                await sink(together)

    async def _listen(self, place: int, link: StageLink) -> None:
        """Handle what a stage's node sends. Raises: what the node reports; RemoteProtocolError."""
        while True:
            message = await link.channel.receive()
            try:
                await self._handle(place, message)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"{link.stage.node}: {error.message}") from error

    async def _handle(self, place: int, message: Message) -> None:
        if message.kind is Kind.TOKENS and place == len(self._links) - 1:
            came = _came(message)
            header = decode_header_untrusted(TokensHeader, message.header)
            await self._take_tokens(header, Bytes(message.size), came)
        elif message.kind is Kind.PONG:
            came = _came(message)
            pong = decode_header_untrusted(PongHeader, message.header)
            self.observer.heard(place, pong, came)
            link = pong.stage.link if pong.stage else None
            if link is not None and link.rate and not link.is_lower_bound:
                self._scheduler.pace.link_rate(place, BytesPerSecond(link.rate))
        elif message.kind is Kind.FAILED:
            failed = decode_header_untrusted(FailedHeader, message.header)
            if (failed.job, failed.epoch) == (self._plan.job, self._plan.epoch):
                raise StageFailed(failed.message, node=failed.node, code=failed.code)
        elif message.kind is Kind.REFUSED:
            refused = decode_header_untrusted(RefusedHeader, message.header)
            raise PlanRefused(refused.reason, hint=refused.hint)
        else:
            raise RemoteProtocolError(f"{message.kind.name} is not what this stage sends")

    async def _take_tokens(self, header: TokensHeader, size: Bytes, came: Seconds) -> None:
        if (header.job, header.epoch) != (self._plan.job, self._plan.epoch):
            return
        scheduler, place = self._scheduler, (header.micro_batch, header.step)
        done: Items[Outcome] | None
        try:
            if header.lost is None:
                done = scheduler.take_tokens(*place, header.tokens, header.paths, header.reached)
            else:
                done = scheduler.lose(*place, header.lost)
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from error
        if done is None:
            return
        left, pack = self._launched.pop(place)
        if header.lost is None and len(header.timings) == len(self.stages):
            took = Seconds(came - left)
            onward = pack.onward_tokens(header.reached)
            scheduler.pace.record(len(pack.tokens), took, header.timings, onward)
        self.observer.answered(header, size, came)
        self.observer.spend(Seconds(asyncio.get_running_loop().time() - came))
        self.counters.generated_tokens = scheduler.generated
        if done:
            await self._outcomes.put(done)
        self._news.set()

    async def _heartbeat(self) -> None:
        """Ask every stage what it is at, whether or not work is on its way."""
        loop = asyncio.get_running_loop()
        while True:
            for place, link in enumerate(self._links):
                ping = self.observer.ping(place, Seconds(loop.time()))
                try:
                    await link.channel.send(Message(Kind.PING, encode_header(ping)))
                except ConnectionLost:
                    return  # its listener raises, with the reason
            await asyncio.sleep(self._options.heartbeat)


def _came(message: Message) -> Seconds:
    """When a message was off the wire, on the loop's clock."""
    now = asyncio.get_running_loop().time()
    return Seconds(now if message.arrived is None else min(now, message.arrived))
