"""The loop of a job: packs to the first stage, tokens back from the last, requests in, outcomes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass

from bbquic.errors import (
    ConnectionLost,
    PlanRefused,
    RecordError,
    RemoteProtocolError,
    StageFailed,
    Stalled,
)
from bbquic.runtime.cluster import StageLink
from bbquic.runtime.protocol import (
    FailedHeader,
    PackHeader,
    PingHeader,
    PlanHeader,
    PongHeader,
    RefusedHeader,
    TokensHeader,
)
from bbquic.runtime.request import Completion, Request
from bbquic.runtime.scheduler import Pack, Scheduler
from bbquic.runtime.sequence import Sequence, TextStreamFactory
from bbquic.runtime.tasks import owned_tasks
from bbquic.runtime.timing import StageTiming
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """A request that turned out to be impossible: an error record, with its code."""

    line: int
    code: str
    message: str


Outcome = Completion | Unanswerable
Sink = Callable[[Items[Outcome]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    heartbeat: Seconds = Seconds(2.0)  # each stage is asked that often what it is at
    slow: Seconds = Seconds(10.0)  # a step on its way for longer is named on the screen
    stall: Seconds = Seconds(300.0)  # a step on its way for longer ends the job


@dataclass(slots=True)
class StageActivity:
    """What is known of a stage lately; written by the coordinator, read by the statistics."""

    link: StageLink
    busy: Seconds = Seconds(0.0)  # compute so far
    steps: int = 0
    compute: Seconds | None = None  # of a step, exponentially averaged
    queue: Seconds | None = None
    sent: int = 0  # bytes of tensors to the next stage
    doing: str = "idle"
    since: Seconds = Seconds(0.0)

    def record(self, timing: StageTiming) -> None:
        parts = timing.parts
        self.steps += 1
        self.busy = Seconds(self.busy + parts.compute)
        self.sent += timing.sent
        self.compute = _average(self.compute, parts.compute)
        self.queue = _average(self.queue, parts.queue)


def _average(before: Seconds | None, new: float) -> Seconds:
    return Seconds(new if before is None else 0.9 * before + 0.1 * new)


@dataclass(slots=True)
class Counters:
    """Tokens so far: of prompts whose rows were sent, and of answers."""

    prompt_tokens: int = 0
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
    ) -> None:
        """`ends` are the model's end tokens; `text` makes a decoder for one answer."""
        self.stages = tuple(StageActivity(link) for link in links)
        self.counters = Counters()
        self._links = tuple(links)
        self._plan = plan
        self._scheduler = scheduler
        self._ends = ends
        self._text = text
        self._options = options or CoordinatorOptions()
        self._news = asyncio.Event()  # something may be launched
        self._launched: dict[tuple[int, int], tuple[float, Pack]] = {}  # (micro-batch, step): when it left
        self._room = asyncio.Event()
        self._primed = asyncio.Event()  # the look-ahead is full, or there is no more to read
        # bounded: a disk that cannot keep up slows the job down instead of filling memory
        self._outcomes: asyncio.Queue[Items[Outcome] | None] = asyncio.Queue(256)

    async def run(self, requests: AsyncIterator[Request], sink: Sink) -> None:
        """Answer every request; `sink` gets each outcome exactly once, and is awaited.

        Raises: StageFailed, ConnectionLost, Stalled, PlanRefused; what `requests` or `sink` raise.
        """
        async with owned_tasks() as tasks:
            watchers = [
                tasks.create_task(self._listen(place, link)) for place, link in enumerate(self._links)
            ]
            watchers.append(tasks.create_task(self._heartbeat()))
            tasks.create_task(self._feed(requests))
            tasks.create_task(self._deliver(sink))
            await self._primed.wait()
            while not self._scheduler.is_done:
                await self._launch_all()
                if self._scheduler.room:
                    self._room.set()
                await self._wait_news()
            await self._outcomes.put(None)
            for watcher in watchers:
                watcher.cancel()

    @property
    def in_flight_sequences(self) -> int:
        return self._scheduler.live

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
        return "; ".join(f"{one.link.stage.node}: {one.doing} for {one.since:.0f} s" for one in self.stages)

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
        while (pack := self._scheduler.any_pack()) is not None:
            await self._launch(pack)

    async def _launch(self, pack: Pack) -> None:
        header = PackHeader(
            job=self._plan.job,
            epoch=self._plan.epoch,
            micro_batch=pack.micro_batch,
            step=pack.step,
            range=(pack.range.offset, pack.range.slots, pack.range.capacity),
            rows=pack.rows,
            tokens=b"".join(token.to_bytes(4, "little") for token in pack.tokens),
            moves=pack.moves,
        )
        self._launched[pack.micro_batch, pack.step] = (asyncio.get_running_loop().time(), pack)
        self.counters.prompt_tokens += pack.prompt_tokens
        await self._links[0].channel.send(Message(Kind.ROWS, encode_header(header)))

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
            await self._take_tokens(decode_header_untrusted(TokensHeader, message.header))
        elif message.kind is Kind.PONG:
            pong = decode_header_untrusted(PongHeader, message.header)
            self.stages[place].doing, self.stages[place].since = pong.activity, Seconds(pong.since)
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

    async def _take_tokens(self, header: TokensHeader) -> None:
        if (header.job, header.epoch) != (self._plan.job, self._plan.epoch):
            return
        try:
            done = self._scheduler.take_tokens(header.micro_batch, header.step, header.tokens)
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from error
        if done is None:
            return
        left, pack = self._launched.pop((header.micro_batch, header.step))
        if len(header.timings) == len(self.stages):
            elapsed = Seconds(asyncio.get_running_loop().time() - left)
            self._scheduler.pace.record(len(pack.tokens), elapsed, header.timings)
        for activity, timing in zip(self.stages, header.timings, strict=False):
            activity.record(timing)
        self.counters.generated_tokens = self._scheduler.generated
        if done:
            await self._outcomes.put(done)
        self._news.set()

    async def _heartbeat(self) -> None:
        """Ask every stage what it is at, whether or not work is on its way."""
        number = 0
        while True:
            number += 1
            message = Message(Kind.PING, encode_header(PingHeader(number)))
            for link in self._links:
                try:
                    await link.channel.send(message)
                except ConnectionLost:
                    return  # its listener raises, with the reason
            await asyncio.sleep(self._options.heartbeat)
