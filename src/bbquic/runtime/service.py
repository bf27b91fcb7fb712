"""One stage of one job at work: packs in, through the lanes, and on to the next stage."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import Executor

import msgspec

from bbquic.errors import ConnectionLost, RemoteProtocolError, StageFailed, TransportError
from bbquic.runtime.forecast import Forecast
from bbquic.runtime.hop import CodecMode, HopIn, HopOut
from bbquic.runtime.lanes import Job, Lanes
from bbquic.runtime.ledger import Due, Ledger
from bbquic.runtime.protocol import (
    FailedHeader,
    Lost,
    PackHeader,
    PlanHeader,
    Stage,
    TableHeader,
    TableKnownHeader,
    TokensHeader,
)
from bbquic.runtime.stage import StageWorker
from bbquic.runtime.tally import NOTHING, Tally, wire_link
from bbquic.runtime.tasks import owned_tasks
from bbquic.runtime.timing import StageReport, StageTiming
from bbquic.runtime.trees import onward
from bbquic.transport.channel import Channel, Role, Sent
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Bytes, BytesPerSecond, Seconds

SPARE = 16  # packs over what a plan allows on their way, so that it is a count that refuses, not a queue


class StageService:
    """Receives a stage's packs, has the lanes compute them, and sends what they become."""

    def __init__(
        self,
        plan: PlanHeader,
        stage: Stage,
        worker: StageWorker,
        coordinator: Channel | None,
        following: Channel | None,
        forecast: Forecast | None = None,
    ) -> None:
        """`coordinator` is where tokens and failures go, and where the first stage's rows come from; None: it
        is on another node, which attaches itself. `following` leads to the next stage, None at the last.
        `forecast` says what packs should take; it is summed beside what they do."""
        self.plan = plan
        self.stage = stage
        self._coordinator = coordinator
        self._worker = worker
        self.following = following
        self._forecast = forecast
        place = plan.stages.index(stage)
        self._predecessor = plan.stages[place - 1].node if place else None
        self._ledger: Ledger[tuple[Message, Seconds]] = Ledger(
            tiers=plan.tiers, micro_batches=plan.micro_batches, depth=plan.depth
        )
        self._incoming = HopIn(plan.dtype)
        self._outgoing = None if following is None else _hop_out(plan, following)
        size = plan.micro_batches * plan.depth + SPARE
        self._lanes = Lanes(worker, self._incoming, self._outgoing, size, self._send, self._fail)
        self._inside: Counter[int] = Counter()  # packs in the lanes, by micro-batch
        self.tally = Tally()

    def status(self) -> tuple[str, Seconds, int]:
        """What this stage does just now in words, for how long, and the packs that wait behind it."""
        pack = self._lanes.computing
        doing = "waiting for rows" if pack is None else f"computing {_name(pack)}"
        queued = sum(self._lanes.queued[:2]) + self._ledger.held
        return doing, Seconds(time.monotonic() - self._lanes.since), queued

    def report(self) -> StageReport:
        """The sums so far; a reader takes differences."""
        tally, following = self.tally, self.following
        waiting, due, copying, sending = self._lanes.queued
        return StageReport(
            job=self.plan.job,
            first=self.stage.first,
            stop=self.stage.stop,
            micro_batches=self.plan.micro_batches,
            steps=tally.steps,
            parts=tally.parts,
            to_wire=tally.to_wire,
            raw=tally.raw,
            sent=tally.sent,
            queued=(waiting + self._ledger.held, due, copying, sending),
            following=None if following is None else following.peer.name,
            link=None if following is None else wire_link(following.statistics()),
            codec="" if self._outgoing is None else self._outgoing.choice.way.value,
            why="" if self._outgoing is None else self._outgoing.choice.reason,
        )

    def attach(self, channel: Channel) -> None:
        """From now on the coordinator is at the other end of `channel`.

        Raises: RemoteProtocolError unless that is the node that the plan names, for the first time.
        """
        peer = channel.peer.name
        if channel.role is not Role.NODE or peer != self.plan.coordinator:
            raise RemoteProtocolError(f"{peer} ({channel.role}) does not coordinate job {self.plan.job}")
        if self._coordinator is not None:
            raise RemoteProtocolError(f"the coordinator of job {self.plan.job} is known already")
        self._coordinator = channel

    def receive(self, channel: Channel, message: Message) -> None:
        """Take a ROWS or HIDDEN message. One of another job or epoch is discarded: it is only late.

        Raises: RemoteProtocolError when the sender is not the plan's predecessor, or the pack is wrong.
        """
        pack = decode_header_untrusted(PackHeader, message.header)
        if (pack.job, pack.epoch) != (self.plan.job, self.plan.epoch):
            return
        self._check_sender(channel, message, pack)
        size = 0 if pack.lost is not None else self._worker.body_length(pack)
        if message.body_size > size or (message.body_size < size and not pack.frame):
            raise RemoteProtocolError(
                f"{channel.peer.name} sent {message.body_size} bytes of hidden states "
                f"for {pack.token_count} tokens"
            )
        for due in self._ledger.admit(pack, (message, Seconds(time.monotonic()))):
            self._begin(due, channel.peer.name)

    def _begin(self, due: Due[tuple[Message, Seconds]], sender: str) -> None:
        """Give a pack to the lanes, now that its turn has come."""
        pack, (message, delivered) = due.pack, due.load
        self._inside[pack.micro_batch] += 1
        try:
            if self._inside[pack.micro_batch] > self.plan.depth:
                raise asyncio.QueueFull
            arrived = Seconds(min(message.arrived or delivered, delivered))
            job = Job(pack, message.body, arrived, delivered, due.copies, due.placement, lost=pack.lost)
            self._lanes.put_nowait(job)
        except asyncio.QueueFull:
            raise RemoteProtocolError(
                f"{sender} sends packs without waiting: of micro-batch {pack.micro_batch} "
                f"{self.plan.depth} may be on their way"
            ) from None

    async def take_table(self, channel: Channel, message: Message) -> None:
        """Hold a table of shifts that the stage before tells, and say so. One of another job is only late.

        Raises: RemoteProtocolError when the sender is not the plan's predecessor, or the table is wrong.
        """
        table = decode_header_untrusted(TableHeader, message.header)
        if (table.job, table.epoch) != (self.plan.job, self.plan.epoch):
            return
        if channel.role is not Role.NODE or channel.peer.name != self._predecessor:
            raise RemoteProtocolError(f"{channel.peer.name} ({channel.role}) sent a table of shifts")
        self._incoming.take_untrusted(table.width, table.columns, table.shifts, table.digest)
        known = TableKnownHeader(table.job, table.epoch, table.digest)
        await channel.send(Message(Kind.TABLE_KNOWN, encode_header(known)))

    def _check_sender(self, channel: Channel, message: Message, pack: PackHeader) -> None:
        if self._predecessor is None:
            right = message.kind == Kind.ROWS and channel is self._coordinator
            if pack.lost is not None:
                raise RemoteProtocolError(f"{channel.peer.name} sent rows that are lost before any stage")
        else:
            right = (
                message.kind == Kind.HIDDEN
                and channel.role is Role.NODE
                and channel.peer.name == self._predecessor
            )
        if not right:
            raise RemoteProtocolError(
                f"{channel.peer.name} ({channel.role}) sent rows of job {self.plan.job}, "
                f"which come from {self._predecessor or 'its coordinator'}"
            )
        if self._coordinator is None:
            raise RemoteProtocolError(f"rows of job {self.plan.job} came before its coordinator")

    async def run(self, device: Executor) -> None:
        """Compute and send until cancelled. `device` is the one thread that may touch the model."""
        async with owned_tasks() as tasks:
            tasks.create_task(self._lanes.run(device))
            if self.following is not None:
                tasks.create_task(self._hear(self.following))

    async def _hear(self, following: Channel) -> None:
        """What the next stage says: that it holds a table. Its end shows where packs are sent to it."""
        assert self._outgoing is not None
        while True:
            try:
                message = await following.receive()
            except ConnectionLost:
                return
            try:
                self._take_answer(message)
            except RemoteProtocolError as error:
                following.close(error.message)

    def _take_answer(self, message: Message) -> None:
        assert self._outgoing is not None
        if message.kind is not Kind.TABLE_KNOWN:
            raise RemoteProtocolError(f"{message.kind.name} is not what a stage says to the one before")
        known = decode_header_untrusted(TableKnownHeader, message.header)
        if (known.job, known.epoch) == (self.plan.job, self.plan.epoch):
            self._outgoing.known(known.digest)

    async def _send(self, job: Job) -> None:
        """Send what a pack became, with this stage's timing; of one that is lost, why, and no timing."""
        pack, output, frame = job.pack, job.output, job.frame
        self._inside[pack.micro_batch] -= 1  # first: whoever gets its tokens may send the next one at once
        handed = time.monotonic()
        if job.lost is not None:
            await self._send_lost(job, job.lost)
            return
        assert output is not None
        timing = StageTiming(
            node=self.stage.node,
            arrived=job.arrived,
            marks=job.marks(handed),
            raw=Bytes(len(output.body)),
            sent=Bytes(0 if frame is None else len(frame.body)),
            to_wire=self.tally.last_to_wire,
        )
        self.tally.add(timing, self._forecast(pack) if self._forecast is not None else NOTHING)
        timings = (*pack.timings, timing)
        if output.tokens is not None:
            answer = TokensHeader(
                pack.job,
                pack.epoch,
                pack.micro_batch,
                pack.step,
                output.tokens,
                timings,
                paths=output.paths,
                reached=tuple(row.count for row in pack.rows if row.tree is not None),
            )
            sent = await self._back.send(Message(Kind.TOKENS, encode_header(answer)))
            self.tally.leave(handed, sent)
            return
        assert frame is not None
        assert job.onward is not None
        header = msgspec.structs.replace(job.onward, frame=frame.header, timings=timings)
        message = Message(Kind.HIDDEN, encode_header(header), frame.body, background=pack.can_wait)
        went = await self._send_on(job, message)
        if went is not None:
            self.tally.leave(handed, went)

    async def _send_lost(self, job: Job, lost: Lost) -> None:
        """In the pack's place: the stages behind apply its rows and moves, so that their steps stay in order,
        and the coordinator hears of it by TOKENS."""
        pack = job.pack
        if self.following is None:
            answer = TokensHeader(
                pack.job, pack.epoch, pack.micro_batch, pack.step, (), pack.timings, lost=lost
            )
            await self._back.send(Message(Kind.TOKENS, encode_header(answer)))
            return
        header = msgspec.structs.replace(onward(pack), tokens=b"", frame=b"", lost=lost)
        await self._send_on(job, Message(Kind.HIDDEN, encode_header(header), background=pack.can_wait))

    async def _send_on(self, job: Job, message: Message) -> Sent | None:
        """Send the next stage a pack, and a table where there is one; None where it cannot be reached."""
        following = self.following
        assert following is not None, "only the last stage has tokens"
        try:
            sent = await following.send(message)
            await self._tell_table(following)
        except TransportError as error:
            failure = StageFailed(
                f"{self.stage} cannot reach the next stage: {error.message}",
                node=following.peer.name,
                code="connection_lost",
            )
            await self._lanes.drop_all(job, failure)
            return None
        return sent

    async def _tell_table(self, following: Channel) -> None:
        """Send the next stage a table that was learnt, if there is one."""
        assert self._outgoing is not None
        table = self._outgoing.table_to_tell()
        if table is not None:
            header = TableHeader(
                self.plan.job, self.plan.epoch, table.width, table.columns, table.encode(), table.digest
            )
            await following.send(Message(Kind.TABLE, encode_header(header)))

    async def _fail(self, job: Job, error: StageFailed) -> None:
        await self._back.send(self._failed_message(error, job.pack))

    @property
    def _back(self) -> Channel:
        """To the coordinator."""
        assert self._coordinator is not None, "no row is taken without one"
        return self._coordinator

    def _failed_message(self, error: StageFailed, pack: PackHeader) -> Message:
        header = FailedHeader(
            job=pack.job,
            epoch=pack.epoch,
            node=error.node,
            blocks=f"{self.stage.first}-{self.stage.stop - 1}",
            micro_batch=pack.micro_batch,
            step=pack.step,
            code=error.code,
            message=error.message[:4000],
        )
        return Message(Kind.FAILED, encode_header(header))

    def close(self) -> None:
        """End the connection to the next stage: it was made for this job."""
        if self.following is not None:
            self.following.close("the job ended")


def _hop_out(plan: PlanHeader, following: Channel) -> HopOut:
    def rate() -> BytesPerSecond | None:
        link = following.statistics().link
        # a link that was never seen full may be far faster: nothing is spent on it
        return None if link is None or link.is_lower_bound else link.rate

    return HopOut(plan.dtype, CodecMode(plan.codec), rate)


def _name(pack: PackHeader) -> str:
    return f"micro-batch {pack.micro_batch}, step {pack.step}"
