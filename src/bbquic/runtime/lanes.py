"""Three lanes: what came is brought to the device, computed, and taken from it again, each while the other
two work on other packs; a fourth sends.

    inbound (decode, copy)  ->  compute  ->  outbound (copy, encode)  ->  send

A lane's blocking work has a thread of its own; the loop only hands packs on, through bounded queues, so
that a lane that cannot keep up holds up those before it. Where copying costs less than changing threads,
the device's thread does it in one go. A pack that is lost, here or on a stage before, goes through in its
turn and no lane works on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from bbquic.codec.frame import Frame
from bbquic.errors import StageFailed
from bbquic.kv.regions import Moving
from bbquic.runtime.hop import HopIn, HopOut
from bbquic.runtime.placement import PLAIN, Placement
from bbquic.runtime.protocol import Lost, PackHeader
from bbquic.runtime.stage import LOSABLE, Computed, Output, Staged, StageWorker, stage_errors
from bbquic.runtime.tasks import owned_tasks
from bbquic.runtime.timing import Mark
from bbquic.runtime.trees import onward
from bbquic.units import Seconds

WAITING = 2  # packs before a lane: more would only wait longer, and a waiting one keeps memory on the device
MOST_WORDS = 3900  # of a failure, for a Text of 4096

Marks = tuple[int, int, int, int, int, int, int, int, int, int]


@dataclass(slots=True, eq=False)
class Job:
    """A pack on its way through the lanes, and its moments in seconds of `time.monotonic()`."""

    pack: PackHeader
    body: bytes | memoryview
    arrived: Seconds  # off the wire
    delivered: Seconds
    copies: tuple[Moving, ...] = ()  # of KV, before the pack is computed
    placement: Placement = PLAIN  # how its rows lie
    decode_began: float = 0.0
    decoded: float = 0.0
    copy_began: float = 0.0
    encoded: float = 0.0
    staged: Staged | None = None
    computed: Computed | None = None
    output: Output | None = None
    onward: PackHeader | None = None  # of an output that is a tensor: what goes on with it
    frame: Frame | None = None
    lost: Lost | None = None  # why there is no output, and none is to come
    times: tuple[float, ...] = ()  # DELIVERED to ENCODED, once there is an output

    def lose(self, lost: Lost) -> None:
        """Have no output, and keep nothing of what was computed."""
        self.lost, self.body = lost, b""
        self.staged = self.computed = self.output = self.onward = self.frame = None

    def marks(self, handed: float) -> Marks:
        """Microseconds after its arrival, as `StageTiming` has them.

        Rising, whatever the clocks say: those of kernel, host and device agree to some microseconds only.
        """
        after = (round((moment - self.arrived) * 1e6) for moment in (*self.times, handed))
        rising = tuple(accumulate(after, max, initial=0))[1:]
        assert len(rising) == len(Mark), "a job is marked at its end"
        return rising  # type: ignore[return-value]  # ten of them


class _Queue:
    """What waits before a lane, and whether the lane is at work."""

    def __init__(self, size: int) -> None:
        self.jobs: asyncio.Queue[Job] = asyncio.Queue(size)
        self.is_busy = False

    @property
    def is_idle(self) -> bool:
        return not self.is_busy and self.jobs.empty()

    async def get(self) -> Job:
        self.is_busy = False
        job = await self.jobs.get()
        self.is_busy = True
        return job


class Lanes:
    """One stage's. Packs leave in the order they entered, whichever threads they went through."""

    def __init__(
        self,
        worker: StageWorker,
        incoming: HopIn,
        outgoing: HopOut | None,
        size: int,
        send: Callable[[Job], Awaitable[None]],
        fail: Callable[[Job, StageFailed], Awaitable[None]],
    ) -> None:
        """`incoming` and `outgoing` code what comes and goes; the last stage has nothing to code.

        `size` packs may wait before the first lane. `send` gets each job that has an output or is lost, in
        order; `fail` the first that failed otherwise: what follows cannot be trusted, so it is dropped."""
        self._worker = worker
        self._incoming = incoming
        self._outgoing = outgoing
        self._inside = 0
        self._send = send
        self._fail = fail
        self._in, self._due, self._out, self._done = (
            _Queue(most) for most in (size, WAITING, WAITING, WAITING)
        )
        self._has_failed = False
        self.computing: PackHeader | None = None
        self.since = Seconds(time.monotonic())  # when that changed last

    @property
    def queued(self) -> tuple[int, int, int, int]:
        """Packs that wait: to be decoded and copied, computed, copied out, sent."""
        return (
            self._in.jobs.qsize(),
            self._due.jobs.qsize(),
            self._out.jobs.qsize(),
            self._done.jobs.qsize(),
        )

    def put_nowait(self, job: Job) -> None:
        """Raises: asyncio.QueueFull."""
        self._inside += 1
        if self._is_light_in(job) and self._in.is_idle and not self._due.jobs.full():
            self._due.jobs.put_nowait(job)
        else:
            self._in.jobs.put_nowait(job)

    async def run(self, device: Executor) -> None:
        """Work until cancelled. `device` is the one thread that may compute."""
        inbound, outbound = (
            ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("inbound", "outbound")
        )
        try:
            async with owned_tasks() as tasks:
                tasks.create_task(self._bring(inbound))
                tasks.create_task(self._compute(device))
                tasks.create_task(self._take_out(outbound))
                tasks.create_task(self._pass_on())
        finally:
            for lane in (inbound, outbound):
                lane.shutdown(wait=False, cancel_futures=True)

    # The lanes, in the loop.

    async def _bring(self, thread: Executor) -> None:
        while True:
            job = await self._in.get()
            if self._is_light_in(job) or await self._works(thread, self._bring_one, job):
                await self._due.jobs.put(job)

    async def _compute(self, device: Executor) -> None:
        while True:
            job = await self._due.get()
            self._now(job.pack)
            is_good = await self._works(device, self._compute_one, job)
            self._now(None)
            if not is_good:
                continue
            is_through = job.output is not None or job.lost is not None
            if is_through and self._out.is_idle and not self._done.jobs.full():
                self._done.jobs.put_nowait(job)
            else:
                await self._out.jobs.put(job)

    async def _take_out(self, thread: Executor) -> None:
        while True:
            job = await self._out.get()
            if job.output is not None or await self._works(thread, self._take_out_one, job):
                await self._done.jobs.put(job)

    async def _pass_on(self) -> None:
        while True:
            job = await self._done.get()
            self._inside -= 1
            if not self._has_failed:
                await self._send(job)

    async def _works(self, thread: Executor, work: Callable[[Job], None], job: Job) -> bool:
        """Have a thread do its part of a job; whether the job goes on."""
        if self._has_failed:
            return False
        if job.lost is not None:
            return True
        loop = asyncio.get_running_loop()
        try:
            lost = await loop.run_in_executor(thread, self._tried, work, job)
            if lost is not None:
                await loop.run_in_executor(thread, self._lose, job, lost)
        except StageFailed as error:
            await self.drop_all(job, error)
            return False
        return not self._has_failed

    async def drop_all(self, job: Job, error: StageFailed) -> None:
        """A job failed, here or on its way to the next stage: nothing is passed on any more."""
        if not self._has_failed:
            self._has_failed = True
            await self._fail(job, error)

    def _now(self, pack: PackHeader | None) -> None:
        self.computing, self.since = pack, Seconds(time.monotonic())

    def _is_light_in(self, job: Job) -> bool:
        if job.lost is not None:
            return True
        return self._worker.is_light_in(job.pack) and not self._incoming.is_coded(job.pack)

    def _is_light_out(self, job: Job) -> bool:
        coding = self._outgoing is not None and self._outgoing.is_coding
        return self._worker.is_light_out(job.pack) and not coding

    # Their work, in threads.

    def _tried(self, work: Callable[[Job], None], job: Job) -> Lost | None:
        """A lane's part of a job; or why the job is lost, where that leaves the stage as it was."""
        stage = self._worker.stage
        try:
            work(job)
        except StageFailed as error:
            if error.code not in LOSABLE:
                raise
            return Lost(error.node, f"{stage.first}-{stage.stop - 1}", error.code, error.message[:MOST_WORDS])
        return None

    def _lose(self, job: Job, lost: Lost) -> None:
        """Now that the error is gone, and with it what it kept of the pack, make room and see how much."""
        job.lose(lost)
        with stage_errors(self._worker.stage, job.pack):
            free = self._worker.relieve()
        job.lose(Lost(lost.node, lost.blocks, lost.code, f"{lost.message}; {free}"))

    def _bring_one(self, job: Job) -> None:
        worker, pack = self._worker, job.pack
        job.decode_began = time.monotonic()
        with stage_errors(worker.stage, pack):
            body = self._incoming.decode_untrusted(pack, job.body, worker.body_length(pack))
            job.decoded = time.monotonic()
            job.staged = worker.stage_in(pack, body, job.placement)
        job.body = b""

    def _compute_one(self, job: Job) -> None:
        if job.staged is None:
            self._bring_one(job)
            assert job.staged is not None
        with stage_errors(self._worker.stage, job.pack):
            job.computed = self._worker.compute(job.pack, job.staged, job.copies)
        if self._is_light_out(job):
            self._take_out_one(job)

    def _take_out_one(self, job: Job) -> None:
        staged, computed = job.staged, job.computed
        assert staged is not None
        assert computed is not None
        job.copy_began = time.monotonic()
        with stage_errors(self._worker.stage, job.pack):
            job.output = output = self._worker.stage_out(job.pack, computed)
            if output.tokens is None:
                assert self._outgoing is not None, "only the last stage has tokens"
                job.onward = onward(output.pruned or job.pack)
                job.frame = self._outgoing.encode(job.onward, output.body, is_alone=self._inside == 1)
            job.encoded = time.monotonic()
            job.times = (
                job.delivered,
                job.decode_began,
                job.decoded,
                staged.on_device.seconds(),
                computed.began.seconds(),
                computed.computed.seconds(),
                job.copy_began,
                job.output.on_host,
                job.encoded,
            )
        job.staged = job.computed = None  # their memory is the device's
