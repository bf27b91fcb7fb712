"""One stage of one job at work: packs in, computed on the device's thread, and on to the next stage."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass

from bbquic.errors import RemoteProtocolError, StageFailed, TransportError
from bbquic.kv.ranges import SlotCopy
from bbquic.runtime.ledger import Ledger
from bbquic.runtime.protocol import FailedHeader, PackHeader, PlanHeader, Stage, TokensHeader
from bbquic.runtime.stage import StageOutput, StageWorker
from bbquic.runtime.tasks import owned_tasks
from bbquic.transport.channel import Channel, Role
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Seconds


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A pack that may be computed now, and when it came to be so."""

    pack: PackHeader
    body: memoryview
    copies: tuple[SlotCopy, ...]
    due: float  # time.monotonic


class StageService:
    """Receives, computes and sends a stage's packs; the three overlap, each with a bounded queue."""

    def __init__(
        self, plan: PlanHeader, stage: Stage, worker: StageWorker, owner: Channel, following: Channel | None
    ) -> None:
        """`owner` is the channel the plan came by; `following` leads to the next stage, None at the last."""
        self.plan = plan
        self.stage = stage
        self.owner = owner
        self._worker = worker
        self._following = following
        place = plan.stages.index(stage)
        self._predecessor = plan.stages[place - 1].node if place else None
        self._ledger: Ledger[memoryview] = Ledger(
            cells=plan.cells, micro_batches=plan.micro_batches, depth=plan.depth
        )
        # a micro-batch has `depth` packs on their way at most, so honest ones never fill these
        self._due: asyncio.Queue[_Arrival] = asyncio.Queue(plan.micro_batches * plan.depth)
        self._done: asyncio.Queue[StageOutput] = asyncio.Queue(plan.micro_batches)
        self._activity = "waiting for rows"
        self._since = time.monotonic()

    def status(self) -> tuple[str, Seconds, int]:
        """What this stage does just now in words, for how long, and the packs that wait behind it."""
        queued = self._due.qsize() + self._ledger.held
        return self._activity, Seconds(time.monotonic() - self._since), queued

    def receive(self, channel: Channel, message: Message) -> None:
        """Take a ROWS or HIDDEN message. One of another job or epoch is discarded: it is only late.

        Raises: RemoteProtocolError when the sender is not the plan's predecessor, or the pack is wrong.
        """
        pack = decode_header_untrusted(PackHeader, message.header)
        if (pack.job, pack.epoch) != (self.plan.job, self.plan.epoch):
            return
        self._check_sender(channel, message)
        body = memoryview(message.body)
        if len(body) != self._worker.body_length(pack):
            raise RemoteProtocolError(
                f"{channel.peer.name} sent {len(body)} bytes of hidden states for {pack.token_count} tokens"
            )
        for due in self._ledger.admit(pack, body):
            try:
                self._due.put_nowait(_Arrival(due.pack, due.load, due.copies, time.monotonic()))
            except asyncio.QueueFull:
                raise RemoteProtocolError(f"{channel.peer.name} sends packs without waiting") from None

    def _check_sender(self, channel: Channel, message: Message) -> None:
        if self._predecessor is None:
            right = message.kind == Kind.ROWS and channel is self.owner
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

    async def run(self, device: Executor) -> None:
        """Compute and send until cancelled. `device` is the one thread that may touch the model."""
        async with owned_tasks() as tasks:
            tasks.create_task(self._compute(device))
            tasks.create_task(self._send())

    async def _compute(self, device: Executor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrival = await self._due.get()
            pack = arrival.pack
            self._now(f"computing micro-batch {pack.micro_batch}, step {pack.step}")
            queued = Seconds(time.monotonic() - arrival.due)
            try:
                done = await loop.run_in_executor(
                    device, self._worker.compute, pack, arrival.body, queued, arrival.copies
                )
            except StageFailed as error:
                await self.owner.send(self._failed_message(error, pack))
            else:
                await self._done.put(done)
            self._now("waiting for rows")

    async def _send(self) -> None:
        while True:
            done = await self._done.get()
            header = done.header
            if isinstance(header, TokensHeader):
                await self.owner.send(Message(Kind.TOKENS, encode_header(header)))
                continue
            assert self._following is not None, "only the last stage has tokens"
            try:
                await self._following.send(Message(Kind.HIDDEN, encode_header(header), done.body))
            except TransportError as error:
                lost = StageFailed(
                    f"{self.stage} cannot reach the next stage: {error.message}",
                    node=self._following.peer.name,
                    code="connection_lost",
                )
                await self.owner.send(self._failed_message(lost, header))

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
        if self._following is not None:
            self._following.close("the job ended")

    def _now(self, activity: str) -> None:
        self._activity, self._since = activity, time.monotonic()
