"""The lanes: packs stay in order, a failure stops them, a lane that stands holds up those before it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.errors import ModelError, StageFailed
from bbquic.runtime.device import HostMoment, now
from bbquic.runtime.hop import CodecMode, HopIn, HopOut
from bbquic.runtime.lanes import WAITING, Job, Lanes
from bbquic.runtime.placement import PLAIN, Placement
from bbquic.runtime.protocol import Lost, PackHeader, Row, Stage
from bbquic.runtime.stage import Computed, Output, Staged
from bbquic.runtime.timing import Mark, StageTiming
from bbquic.units import Bytes, Seconds

DEADLINE = 60.0  # seconds; a test that waits for what never comes fails, in place of hanging
PARTS = ("stage_in", "compute", "stage_out")


def a_pack(micro_batch: int, step: int) -> PackHeader:
    return PackHeader("0" * 16, 0, micro_batch, step, (0, 1, 16), (Row(0, 1, 0, 1, True, None),))


def a_job(micro_batch: int, step: int) -> Job:
    moment = Seconds(time.monotonic())
    return Job(a_pack(micro_batch, step), step.to_bytes(2, "little"), moment, moment)


@dataclass
class Worker:
    """Computes nothing. `work` is called in each part's thread, and may fail or wait."""

    work: Callable[[str, PackHeader], None] = lambda part, pack: None
    light: random.Random | None = None  # draws which packs are light; None: none is
    stage: Stage = field(default_factory=lambda: Stage("node-1", 0, 4))
    weights_bytes: Bytes = Bytes(0)
    arena_bytes: Bytes = Bytes(0)
    seen: list[tuple[str, int, int]] = field(default_factory=list)
    threads: dict[str, set[str]] = field(default_factory=dict)
    drawn: dict[tuple[str, int, int], bool] = field(default_factory=dict)

    def body_length(self, pack: PackHeader) -> int:
        return 2 * pack.token_count

    def is_light_in(self, pack: PackHeader) -> bool:
        return self._is_light("in", pack)

    def is_light_out(self, pack: PackHeader) -> bool:
        return self._is_light("out", pack)

    def _is_light(self, way: str, pack: PackHeader) -> bool:
        light = self.light
        key = (way, pack.micro_batch, pack.step)
        return light is not None and self.drawn.setdefault(key, light.random() < 0.5)

    def stage_in(self, pack: PackHeader, body: bytes | memoryview, placement: Placement = PLAIN) -> Staged:
        self._do("stage_in", pack)
        return Staged(bytes(body), now())

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[Any, ...] = ()) -> Computed:
        began = now()
        self._do("compute", pack)
        return Computed(staged.value, began, now())

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output:
        self._do("stage_out", pack)
        return Output(None, computed.value, Seconds(time.monotonic()))

    def relieve(self) -> str:
        return "0.25 GB are free there"

    def _do(self, part: str, pack: PackHeader) -> None:
        self.seen.append((part, pack.micro_batch, pack.step))
        self.threads.setdefault(part, set()).add(threading.current_thread().name.rpartition("_")[0])
        self.work(part, pack)

    def of(self, part: str) -> list[tuple[int, int]]:
        return [(micro_batch, step) for name, micro_batch, step in self.seen if name == part]


class Bench:
    """Lanes at work, and what came out of them."""

    def __init__(self, worker: Worker, size: int = 100) -> None:
        self.sent: list[Job] = []
        self.failed: list[tuple[Job, StageFailed]] = []
        self.changed = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.lanes = Lanes(
            worker,
            HopIn("float16"),
            HopOut("float16", CodecMode.RAW, lambda: None),
            size,
            self._send,
            self._fail,
        )

    async def _send(self, job: Job) -> None:
        await self.may_send.wait()
        self.sent.append(job)
        self.changed.set()

    async def _fail(self, job: Job, error: StageFailed) -> None:
        self.failed.append((job, error))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


def at_work(worker: Worker, body: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench(worker)
        with ThreadPoolExecutor(1, thread_name_prefix="device") as device:
            running = asyncio.create_task(bench.lanes.run(device))
            async with asyncio.timeout(DEADLINE):
                await body(bench)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_packs_leave_as_they_came_whichever_threads_they_go_through(seed: int, order: list[int]) -> None:
    worker = Worker(light=random.Random(seed))
    steps = [(micro_batch, order[: place + 1].count(micro_batch)) for place, micro_batch in enumerate(order)]

    async def body(bench: Bench) -> None:
        draw = random.Random(seed)
        for micro_batch, step in steps:
            bench.lanes.put_nowait(a_job(micro_batch, step))
            if draw.random() < 0.3:
                await asyncio.sleep(0)
        await bench.until(lambda: len(bench.sent) == len(steps))
        assert [(job.pack.micro_batch, job.pack.step) for job in bench.sent] == steps
        outputs = [job.output.body for job in bench.sent if job.output is not None]
        assert outputs == [step.to_bytes(2, "little") for _, step in steps]

    at_work(worker, body)
    assert worker.of("compute") == steps
    assert sorted(worker.of("stage_in")) == sorted(worker.of("stage_out")) == sorted(steps)


def test_each_lane_has_its_thread_and_the_loop_has_none_of_the_work() -> None:
    worker = Worker()

    async def body(bench: Bench) -> None:
        for step in range(1, 9):
            bench.lanes.put_nowait(a_job(0, step))
        await bench.until(lambda: len(bench.sent) == 8)

    at_work(worker, body)
    assert worker.threads == {"stage_in": {"inbound"}, "compute": {"device"}, "stage_out": {"outbound"}}


def test_light_packs_go_through_the_devices_thread_alone() -> None:
    class Light(Worker):
        def _is_light(self, way: str, pack: PackHeader) -> bool:
            return True

    worker = Light()

    async def body(bench: Bench) -> None:
        for step in range(1, 9):
            bench.lanes.put_nowait(a_job(0, step))
        await bench.until(lambda: len(bench.sent) == 8)

    at_work(worker, body)
    assert worker.threads == {part: {"device"} for part in PARTS}


def test_the_lanes_work_at_once_on_different_packs() -> None:
    together = threading.Barrier(3, timeout=DEADLINE)  # passes only when all three lanes are in it

    def work(part: str, pack: PackHeader) -> None:
        if {"stage_in": 3, "compute": 2, "stage_out": 1}[part] == pack.step:
            together.wait()

    async def body(bench: Bench) -> None:
        for step in range(1, 4):
            bench.lanes.put_nowait(a_job(0, step))
        await bench.until(lambda: len(bench.sent) == 3)

    at_work(Worker(work), body)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("a token is outside"), "bad_input"),
        (ZeroDivisionError("a bug"), "internal"),
        (StageFailed("not finite", node="node-1", code="non_finite"), "non_finite"),
    ],
)
@pytest.mark.parametrize("light", [None, random.Random(1)])
def test_a_failure_in_any_lane_is_told_once_and_nothing_is_passed_on(
    part: str, error: Exception, code: str, light: random.Random | None
) -> None:
    def work(at: str, pack: PackHeader) -> None:
        if at == part and pack.step >= 3:
            raise error

    async def body(bench: Bench) -> None:
        for step in range(1, 7):
            bench.lanes.put_nowait(a_job(1, step))
            await asyncio.sleep(0)
        await bench.until(lambda: bool(bench.failed))
        ((job, failure),) = bench.failed
        assert (
            job.pack.step == 3 if light is None else job.pack.step >= 3
        )  # light ones are staged out of turn
        assert (failure.node, failure.code) == ("node-1", code)
        if code != "non_finite":
            assert f"node-1 (blocks 0-3) failed at micro-batch 1, step {job.pack.step}: " in failure.message
        assert all(one.pack.step < 3 for one in bench.sent)

    at_work(Worker(work, light), body)


def torch_says(size: int) -> RuntimeError:
    """What a CPU's allocator raises: no class of its own."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(size, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no more"), torch_says(2**60)])
@pytest.mark.parametrize("light", [None, random.Random(2)])
def test_a_pack_for_which_memory_is_missing_goes_on_as_lost_in_its_turn_and_the_others_as_ever(
    part: str, error: Exception, light: random.Random | None
) -> None:
    def work(at: str, pack: PackHeader) -> None:
        if at == part and pack.step in (3, 4):
            raise error

    worker = Worker(work, light)

    async def body(bench: Bench) -> None:
        for step in range(1, 7):
            bench.lanes.put_nowait(a_job(1, step))
            await asyncio.sleep(0)
        await bench.until(lambda: len(bench.sent) == 6)
        assert not bench.failed
        assert [job.pack.step for job in bench.sent] == [1, 2, 3, 4, 5, 6]
        for job in bench.sent:
            assert (job.lost is None) == (job.output is not None) == (job.pack.step not in (3, 4))
        lost = bench.sent[2].lost
        assert lost is not None
        assert (lost.node, lost.blocks, lost.code) == ("node-1", "0-3", "out_of_memory")
        start, stop = "node-1 (blocks 0-3) failed at micro-batch 1, step 3: ", "; 0.25 GB are free there"
        assert lost.message.startswith(start)
        assert lost.message.endswith(stop)
        assert " ".join(str(error).split()) in lost.message
        assert len(lost.message) > len(start) + len(stop)

    at_work(worker, body)


def test_what_a_stage_before_lost_is_passed_on_in_its_turn_and_touched_by_no_lane() -> None:
    worker = Worker(light=random.Random(5))
    lost = Lost("node-0", "0-1", "out_of_memory", "none left")

    async def body(bench: Bench) -> None:
        for step in range(1, 21):
            job = a_job(0, step)
            if step % 3 == 0:
                job.lost = lost
            bench.lanes.put_nowait(job)
        await bench.until(lambda: len(bench.sent) == 20)
        assert [job.pack.step for job in bench.sent] == list(range(1, 21))
        assert [job.pack.step for job in bench.sent if job.lost == lost] == [3, 6, 9, 12, 15, 18]

    at_work(worker, body)
    assert not {step for _, _, step in worker.seen if step % 3 == 0}


def test_a_link_that_takes_nothing_holds_up_every_lane_before_it() -> None:
    worker = Worker()

    async def body(bench: Bench) -> None:
        bench.may_send.clear()
        for step in range(1, 51):
            bench.lanes.put_nowait(a_job(0, step))
        # one in each lane that hands on, and one being sent
        most = {"stage_out": WAITING + 2, "compute": 2 * WAITING + 3, "stage_in": 3 * WAITING + 4}
        at_rest = (50 - most["stage_in"], WAITING, WAITING, WAITING)
        while bench.lanes.queued != at_rest or len(worker.of("stage_in")) < most["stage_in"]:
            await asyncio.sleep(0.001)
        assert {part: len(worker.of(part)) for part in most} == most
        bench.may_send.set()
        await bench.until(lambda: len(bench.sent) == 50)

    at_work(worker, body)


def test_a_pack_too_many_is_refused() -> None:
    async def main() -> None:
        bench = Bench(Worker(), size=3)
        for step in range(1, 4):
            bench.lanes.put_nowait(a_job(0, step))
        with pytest.raises(asyncio.QueueFull):
            bench.lanes.put_nowait(a_job(0, 4))

    asyncio.run(main())


def test_marks_come_in_order_and_their_parts_are_all_the_time_in_the_stage() -> None:
    jobs: list[Job] = []

    async def body(bench: Bench) -> None:
        for step in range(1, 21):
            bench.lanes.put_nowait(a_job(0, step))
        await bench.until(lambda: len(bench.sent) == 20)
        jobs.extend(bench.sent)

    at_work(Worker(light=random.Random(3)), body)
    for job in jobs:
        handed = time.monotonic()
        timing = StageTiming("node-1", job.arrived, job.marks(handed), 1, 1, 0.0)
        assert timing.parts.total == pytest.approx(timing.marks[Mark.HANDED] / 1e6)
        assert timing.marks[Mark.HANDED] == round((handed - job.arrived) * 1e6)
        assert timing.parts.from_wire >= 0


moments = st.floats(-1.0, 1.0)


@given(st.lists(moments, min_size=9, max_size=9), moments)
def test_clocks_that_disagree_make_no_time_run_backwards(times: list[float], handed: float) -> None:
    job = a_job(0, 1)
    job.times = tuple(job.arrived + moment for moment in times)
    timing = StageTiming("node-1", job.arrived, job.marks(job.arrived + handed), 1, 1, 0.0)
    assert all(part >= 0 for part in timing.parts)
    assert timing.parts.total == pytest.approx(max(0.0, *times, handed), abs=2e-6)


def test_a_moment_of_the_host_is_when_it_was_taken() -> None:
    assert HostMoment(Seconds(2.5)).seconds() == 2.5
