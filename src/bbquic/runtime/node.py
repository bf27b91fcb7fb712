"""A node: answers peers, takes a plan from those who may, and serves its stage of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bbquic.errors import BBQuicError, ConnectionLost, PlanRefused, RemoteProtocolError
from bbquic.runtime.appraisal import Appraiser
from bbquic.runtime.coordination import AttachedHeader, AttachHeader, CoordinateHeader, RequestsHeader
from bbquic.runtime.hosting import Hosting
from bbquic.runtime.machine import Machine
from bbquic.runtime.measure import Profiler
from bbquic.runtime.profile_cache import ProfileCache
from bbquic.runtime.protocol import (
    DescribeHeader,
    DescriptionHeader,
    MeasureHeader,
    PingHeader,
    PlanHeader,
    PongHeader,
    ReadyHeader,
    RefusedHeader,
    ReleaseHeader,
    Stage,
    SurveyHeader,
)
from bbquic.runtime.reach import reach
from bbquic.runtime.sequence import TextStreamFactory
from bbquic.runtime.service import StageService
from bbquic.runtime.stage import StageWorker
from bbquic.runtime.tasks import owned_tasks
from bbquic.transport.channel import Channel, Endpoint
from bbquic.transport.identity import Peer
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.transport.turns import take_usual_turns
from bbquic.units import Bytes, Seconds

logger = logging.getLogger("bbquic.node")

NO_JOB = "0" * 16  # what a refusal names where no job was meant


class StageLoader(Protocol):
    """Turns a plan into a stage on this machine's device. Called on the device's thread."""

    @property
    def held_bytes(self) -> Bytes:
        """Weights of the last stage, kept for the next plan and given up for any other."""

    def load(self, plan: PlanHeader, stage: Stage, report: Callable[[str], None]) -> StageWorker:
        """Weights checked against the plan's manifest, and the arena. `report` gets progress in words.

        Raises: BBQuicError saying why this node cannot hold the stage.
        """

    def text(self, plan: PlanHeader, report: Callable[[str], None]) -> TextStreamFactory:
        """What turns answers into text, for a plan whose coordinator is to run here. Raises: BBQuicError."""


@dataclass(slots=True)
class _Job:
    """The one job a node serves: from its plan's arrival until it is released."""

    plan: PlanHeader
    owner: Channel
    service: StageService | None = None
    hosting: Hosting | None = None  # where the plan wants the coordinator here
    task: asyncio.Task[None] | None = None
    progress: str = "loading"


class Node:
    """Serves one stage of one job at a time; other coordinators are told who has it."""

    def __init__(
        self,
        endpoint: Endpoint,
        me: Peer,
        peers: dict[str, Peer],
        loader: StageLoader,
        machine: Machine,
        profiler: Profiler | None = None,
    ) -> None:
        """`profiler` measures the machine for planners; without one, nothing it measures is kept."""
        self._endpoint = endpoint
        self._me = me
        self._peers = peers
        self._loader = loader
        self._machine = machine
        self._job: _Job | None = None
        self._lock = asyncio.Lock()  # plans and releases, one after the other
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=take_usual_turns)
        profiler = profiler or Profiler(machine, ProfileCache(None))
        self._appraiser = Appraiser(endpoint, me, peers, profiler, self._device)

    async def serve(self) -> None:
        """Accept peers until cancelled."""
        try:
            async with owned_tasks() as tasks:
                while True:
                    channel = await self._endpoint.accept()
                    tasks.create_task(self._read(channel, tasks))
        finally:
            self._device.shutdown(wait=False, cancel_futures=True)

    async def _read(self, channel: Channel, tasks: asyncio.TaskGroup) -> None:
        """Handle a channel's messages until it ends; its end releases a job that came by it."""
        logger.info("%s (%s) connected", channel.peer.name, channel.role)
        try:
            while True:
                await self._handle(channel, await channel.receive(), tasks)
        except RemoteProtocolError as error:
            logger.warning("%s: %s; its connection is closed", channel.peer.name, error.message)
            channel.close(error.message)
        except ConnectionLost as error:
            logger.info("%s (%s) left: %s", channel.peer.name, channel.role, error.message)
        finally:
            if self._job is not None and self._job.owner is channel:
                await self._release(f"the connection to its coordinator {channel.peer.name} ended")

    async def _handle(self, channel: Channel, message: Message, tasks: asyncio.TaskGroup) -> None:
        header = message.header
        match message.kind:
            case Kind.ROWS | Kind.HIDDEN:
                if self._job is not None and self._job.service is not None:
                    self._job.service.receive(channel, message)
            case Kind.TABLE:
                if self._job is not None and self._job.service is not None:
                    await self._job.service.take_table(channel, message)
            case Kind.PING:
                received = Seconds(message.arrived or time.monotonic())
                ping = decode_header_untrusted(PingHeader, header)
                await channel.send(Message(Kind.PONG, encode_header(self._pong(ping.number, received))))
            case Kind.DESCRIBE:
                decode_header_untrusted(DescribeHeader, header)
                await channel.send(Message(Kind.DESCRIPTION, encode_header(self._describe())))
            case Kind.ATTACH:
                await self._attach(channel, decode_header_untrusted(AttachHeader, header))
            case Kind.COORDINATE:
                how = decode_header_untrusted(CoordinateHeader, header)
                may = await self._may_coordinate(channel, how.job, "a job to coordinate")
                if may and await self._holds(channel, how.job, how.epoch):
                    self._hosting(channel).coordinate_untrusted(how)
            case Kind.REQUESTS:
                group = decode_header_untrusted(RequestsHeader, header)
                if self._serves(group.job, group.epoch):
                    self._hosting(channel).take_requests_untrusted(group)
            case Kind.MEASURE:
                measure = decode_header_untrusted(MeasureHeader, header)
                if await self._may_coordinate(channel, NO_JOB, "a request to measure"):
                    held = self._loader.held_bytes
                    tasks.create_task(self._appraiser.measure(channel, measure, held=held, busy=self._busy))
            case Kind.SURVEY:
                survey = decode_header_untrusted(SurveyHeader, header)
                if await self._may_coordinate(channel, NO_JOB, "a request for a survey"):
                    tasks.create_task(self._appraiser.survey(channel, survey))
            case Kind.PLAN:
                plan = decode_header_untrusted(PlanHeader, header)
                if await self._may_coordinate(channel, plan.job, "a plan"):
                    tasks.create_task(self._accept_plan(channel, plan, tasks))
            case Kind.RELEASE | Kind.CANCEL:
                job = decode_header_untrusted(ReleaseHeader, header).job
                verb = "release" if message.kind is Kind.RELEASE else "cancel"
                if await self._may_coordinate(channel, job, f"a {verb}") and self._has(job):
                    await self._release(f"{channel.peer.name} sent a {verb}")
            case _:
                raise RemoteProtocolError(f"{message.kind.name} is not a message for a node")

    @property
    def _busy(self) -> str | None:
        """What keeps the node from anything else."""
        job = self._job
        return None if job is None else f"busy with job {job.plan.job} of {job.owner.peer.name}"

    def _has(self, job: str) -> bool:
        return self._job is not None and self._job.plan.job == job

    async def _may_coordinate(self, channel: Channel, job: str, what: str) -> bool:
        """Whether the peer's entry in peers.toml gives it the right; if not, it is told and it is logged."""
        if "coordinate" in channel.peer.may:
            return True
        name, me = channel.peer.name, self._me.name
        logger.warning("%s sent %s, and may not coordinate: refused", name, what)
        reason = f"{me} does not take {what} from {name}, which may not coordinate"
        hint = f'add may = ["coordinate"] to {name} in peers.toml on {me}'
        await channel.send(Message(Kind.REFUSED, encode_header(RefusedHeader(job, reason, hint))))
        return False

    def _hosting(self, channel: Channel) -> Hosting:
        """The coordinator that runs here for a channel. Raises: RemoteProtocolError where none does."""
        job = self._job
        if job is None or job.hosting is None or job.owner is not channel:
            raise RemoteProtocolError(f"{self._me.name} does not coordinate for {channel.peer.name} there")
        return job.hosting

    def _serves(self, job: str, epoch: int) -> bool:
        """Whether a stage of the job is ready here."""
        mine = self._job
        return (
            mine is not None and mine.service is not None and (mine.plan.job, mine.plan.epoch) == (job, epoch)
        )

    async def _holds(self, channel: Channel, job: str, epoch: int) -> bool:
        """The same; if not, the peer is told."""
        if self._serves(job, epoch):
            return True
        reason = f"{self._me.name} has no stage of job {job}"
        await channel.send(Message(Kind.REFUSED, encode_header(RefusedHeader(job, reason))))
        return False

    async def _attach(self, channel: Channel, header: AttachHeader) -> None:
        """Take a channel as the one to the coordinator, and say so."""
        if await self._holds(channel, header.job, header.epoch):
            assert self._job is not None
            assert self._job.service is not None
            self._job.service.attach(channel)
            attached = AttachedHeader(header.job, header.epoch)
            await channel.send(Message(Kind.ATTACHED, encode_header(attached)))

    async def _accept_plan(self, channel: Channel, plan: PlanHeader, tasks: asyncio.TaskGroup) -> None:
        """Load and answer READY, or REFUSED with the reason; a coordinator's new plan replaces its last."""
        try:
            async with self._lock:
                await self._make_room(channel, plan)
                stage = next((one for one in plan.stages if one.node == self._me.name), None)
                if stage is None:
                    raise PlanRefused(f"the plan has no stage for {self._me.name}")
                ready = await self._start(channel, plan, stage, tasks)
            await channel.send(Message(Kind.READY, encode_header(ready)))
        except ConnectionLost as error:
            logger.info("job %s: its coordinator left while the stage was loading: %s", plan.job, error)
        except BBQuicError as error:
            logger.warning("job %s of %s refused: %s", plan.job, channel.peer.name, error.message)
            refused = RefusedHeader(plan.job, error.message[:4000], error.hint)
            if not channel.is_closed:
                await channel.send(Message(Kind.REFUSED, encode_header(refused)))

    async def _make_room(self, channel: Channel, plan: PlanHeader) -> None:
        if self._job is None:
            return
        owner = self._job.owner.peer.name
        if owner != channel.peer.name:
            raise PlanRefused(
                f"{self._me.name} is busy with job {self._job.plan.job} of {owner}",
                hint=f"wait for it, or stop it on {owner}",
            )
        await self._stop_job(f"{owner} sent a new plan, {plan.job}")

    async def _start(
        self, channel: Channel, plan: PlanHeader, stage: Stage, tasks: asyncio.TaskGroup
    ) -> ReadyHeader:
        """Load the stage, reach the next, and begin to serve."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        job = self._job = _Job(plan, channel)
        try:

            def report(progress: str) -> None:
                job.progress = progress
                logger.info("job %s: %s", plan.job, progress)

            worker = await loop.run_in_executor(self._device, self._loader.load, plan, stage, report)
            job.hosting = await self._prepare_hosting(plan, channel, report)
            forecast = await self._appraiser.forecast(plan, stage)
            place = plan.stages.index(stage) + 1
            following = None
            if place < len(plan.stages):
                following = await self._reach(plan.stages[place].node, "the next stage's node")
            if channel.is_closed:
                raise ConnectionLost(f"{channel.peer.name} is gone")
        except BaseException:
            self._job = None
            raise
        coordinator = channel if plan.coordinator is None else None
        if job.hosting is not None:
            coordinator = job.hosting.stage_end
        job.service = StageService(plan, stage, worker, coordinator, following, forecast)
        job.task = tasks.create_task(self._serve_job(job, job.service))
        seconds = loop.time() - began
        logger.info("job %s: blocks %d-%d ready after %.1f s", plan.job, stage.first, stage.stop - 1, seconds)
        return ReadyHeader(plan.job, plan.epoch, worker.weights_bytes, worker.arena_bytes, seconds)

    async def _prepare_hosting(
        self, plan: PlanHeader, owner: Channel, report: Callable[[str], None]
    ) -> Hosting | None:
        """What runs the coordinator, where the plan wants it here."""
        if plan.coordinator != self._me.name:
            return None
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._device, self._loader.text, plan, report)
        return Hosting(plan, self._me, owner, text, lambda name: self._reach(name, "the stage's node"))

    async def _reach(self, name: str, what: str) -> Channel:
        return await reach(self._endpoint, self._me, self._peers, name, what)

    async def _serve_job(self, job: _Job, service: StageService) -> None:
        """Run the stage; whatever ends it, the node lives on and the job's memory is free."""
        try:
            async with owned_tasks() as tasks:
                tasks.create_task(service.run(self._device))
                if job.hosting is not None:
                    tasks.create_task(job.hosting.run(partial(self._handle, tasks=tasks)))
        except BBQuicError as error:
            logger.warning("job %s ended: %s", job.plan.job, error.message)
        finally:
            self._appraiser.job_ended(service)
            service.close()
            if self._job is job:
                self._job = None

    async def _release(self, why: str) -> None:
        async with self._lock:
            await self._stop_job(why)

    async def _stop_job(self, why: str) -> None:
        job = self._job
        if job is None:
            return
        logger.info("job %s released: %s", job.plan.job, why)
        self._job = None
        if job.task is not None:
            job.task.cancel()
            await asyncio.wait([job.task])

    def _describe(self) -> DescriptionHeader:
        held = self._loader.held_bytes
        return DescriptionHeader(
            node=self._me.name,
            device=self._machine.device_name,
            memory_free=self._machine.memory_free(held),
            host_memory_free=self._machine.host_memory_free(held),
            threads=self._machine.threads,
            dtypes=self._machine.dtypes,
            job=self._job.plan.job if self._job else None,
        )

    def _pong(self, number: int, received: Seconds) -> PongHeader:
        job = self._job
        activity, since, queued, report = self._appraiser.activity or "idle", Seconds(0.0), 0, None
        if job is not None and job.service is not None:
            activity, since, queued = job.service.status()
            report = job.service.report()
        elif job is not None:
            activity = job.progress
        return PongHeader(number, activity, since, queued, received, time.monotonic(), report)
