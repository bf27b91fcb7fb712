"""A stage at work: what it tells of itself, what it refuses, and that a failure passes nothing on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_helpers import Cluster, answer, cluster_of, options, run, run_model, until, write_prompts
from safetensors.torch import load_file, save_file

from bbquic.errors import BBQuicError
from bbquic.runtime.cluster import StageLink, deploy, describe_all, new_job_id
from bbquic.runtime.layout import for_stage, make_plan
from bbquic.runtime.protocol import (
    FailedHeader,
    PackHeader,
    PingHeader,
    PlanHeader,
    PongHeader,
    Row,
    TokensHeader,
)
from bbquic.runtime.timing import Mark, StageReport
from bbquic.transport.channel import Channel
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from tiny_model import make_tiny_llama

HIDDEN = 64  # of the tiny model


@asynccontextmanager
async def deployed(
    cluster: Cluster, model: Path, **changes: Any
) -> AsyncIterator[tuple[PlanHeader, list[Channel]]]:
    """The cluster's nodes with a plan, changed, and channels to them."""
    channels = [await cluster.command.connect(peer) for peer in cluster.places()]
    held, how = run_model(model), options()
    nodes = await describe_all(channels, how.deadlines)
    plan = make_plan(new_job_id(), held.directory, held.manifest, nodes, how.layout)
    plan = msgspec.structs.replace(plan, **changes)
    plans = [for_stage(plan, stage, held.directory) for stage in plan.stages]
    links = [StageLink(stage, channel) for stage, channel in zip(plan.stages, channels, strict=True)]
    await deploy(links, plans, how.deadlines, lambda _: None)
    yield plan, channels


def rows_of(plan: PlanHeader, step: int, count: int = 1, *, micro_batch: int = 0, first: int = 0) -> Message:
    header = PackHeader(
        plan.job,
        plan.epoch,
        micro_batch,
        step,
        (0, 1, 64),
        (Row(0, 1, first, count, True, None),),
        b"\5\0\0\0" * count,
    )
    return Message(Kind.ROWS, encode_header(header))


async def reply(channel: Channel, *kinds: Kind) -> Message:
    while True:
        message = await channel.receive()
        if message.kind in kinds:
            return message


async def report_of(channel: Channel) -> StageReport | None:
    await channel.send(Message(Kind.PING, encode_header(PingHeader(1))))
    return decode_header_untrusted(PongHeader, (await reply(channel, Kind.PONG)).header).stage


def test_every_stage_notes_where_the_time_went(model: Path) -> None:
    async def main() -> None:
        async with (
            cluster_of([model] * 3, quic=True) as cluster,
            deployed(cluster, model) as (plan, channels),
        ):
            for step, count in ((1, 20), (2, 1), (3, 1)):
                before = time.monotonic()
                await channels[0].send(rows_of(plan, step, count, first=0 if step == 1 else 18 + step))
                message = await reply(channels[2], Kind.TOKENS, Kind.FAILED)
                assert message.kind is Kind.TOKENS
                timings = decode_header_untrusted(TokensHeader, message.header).timings
                assert [timing.node for timing in timings] == ["node-1", "node-2", "node-3"]
                assert message.arrived is not None
                clock = before
                for (
                    timing
                ) in timings:  # all on one machine's clock, the kernel's stamps good to a millisecond
                    assert clock - 0.001 <= timing.arrived
                    clock = timing.at(Mark.HANDED)
                    assert timing.parts.total == pytest.approx(clock - timing.arrived, abs=1e-5)
                    assert timing.parts.compute > 0
                    assert (timing.to_wire > 0) is (step > 1)
                    tensor = 0 if timing.node == "node-3" else count * HIDDEN * 4
                    assert (timing.raw, timing.sent) == (tensor, tensor)
                assert clock <= message.arrived + 0.001

    run(main)


def test_a_pong_sums_what_a_stage_has_done(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2, quic=True) as cluster:
            idle = await cluster.command.connect(cluster.places()[0])
            assert await report_of(idle) is None
            async with deployed(cluster, model) as (plan, channels):
                sums = [await report_of(channel) for channel in channels]
                assert [one.steps for one in sums if one is not None] == [0, 0]
                parts = []
                for step in (1, 2, 3):
                    await channels[0].send(rows_of(plan, step, first=step - 1))
                    message = await reply(channels[1], Kind.TOKENS)
                    timings = decode_header_untrusted(TokensHeader, message.header).timings
                    parts.append([timing.parts for timing in timings])
                for place, channel in enumerate(channels):
                    report = await report_of(channel)
                    assert report is not None
                    stage = plan.stages[place]
                    assert (report.job, report.first, report.stop) == (plan.job, stage.first, stage.stop)
                    assert (report.steps, report.queued) == (3, (0, 0, 0, 0))
                    expected = [sum(column) for column in zip(*(one[place] for one in parts), strict=True)]
                    assert list(report.parts) == pytest.approx(expected)
                    assert report.to_wire > 0
                    assert report.raw == report.sent == (0 if place else 3 * HIDDEN * 4)
                    assert report.following == (None if place else "node-2")
                    assert (report.link is None) is bool(place)
                    assert place or (report.link is not None and report.link.rtt is not None)

    run(main)


def test_more_packs_than_the_plan_allows_cost_the_sender_its_connection(model: Path) -> None:
    gate = threading.Event()

    async def main() -> None:
        async with (
            cluster_of([model]) as cluster,
            deployed(cluster, model, depth=2, micro_batches=2) as (plan, (channel,)),
        ):
            cluster.nodes["node-1"]._device.submit(gate.wait)  # the device is busy for now
            await channel.send(rows_of(plan, 1, micro_batch=1))  # another one counts for itself
            for step in (1, 2):
                await channel.send(rows_of(plan, step, first=step - 1))
            assert await report_of(channel) is not None  # so they were taken
            await channel.send(rows_of(plan, 3, first=2))
            with pytest.raises(BBQuicError, match="without waiting: of micro-batch 0 2 may be on their way"):
                await channel.receive()

    try:
        run(main)
    finally:
        gate.set()


def test_a_failed_stage_passes_nothing_on_any_more(model: Path, tmp_path: Path) -> None:
    broken = make_tiny_llama(tmp_path / "tiny")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("inf")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})

    async def main() -> None:
        async with (
            cluster_of([broken] * 2) as cluster,
            deployed(cluster, broken, depth=4) as (plan, channels),
        ):
            first = msgspec.msgpack.decode(rows_of(plan, 1).header, type=PackHeader)
            bad = msgspec.structs.replace(first, tokens=b"\7\0\0\0")
            await channels[0].send(Message(Kind.ROWS, encode_header(bad)))
            failed = decode_header_untrusted(FailedHeader, (await reply(channels[0], Kind.FAILED)).header)
            assert (failed.node, failed.blocks, failed.step, failed.code) == (
                "node-1",
                "0-1",
                1,
                "non_finite",
            )
            assert "it computed hidden states that are not finite" in failed.message
            await channels[0].send(rows_of(plan, 2, first=1))
            await channels[0].send(rows_of(plan, 1, micro_batch=1))
            for _ in range(5):  # whatever was taken up has been through the devices by then
                reports = [await report_of(channel) for channel in channels]
                for node in cluster.nodes.values():
                    await asyncio.wrap_future(node._device.submit(int))
            assert [one.steps for one in reports if one is not None] == [0, 0]

    run(main)


def test_the_steps_of_a_run_are_all_in_the_report(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(
        tmp_path / "p.jsonl", [{"prompt": f"the {n}", "max_tokens": 30} for n in range(8)]
    )

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            seen: list[StageReport] = []

            @asynccontextmanager
            async def look(source: Callable[[], Any]) -> Any:
                async def ask() -> None:
                    await until(lambda: source().generated_tokens > 20)
                    for peer in cluster.places():
                        report = await report_of(await cluster.command.connect(peer))
                        assert report is not None
                        seen.append(report)

                asking = asyncio.create_task(ask())
                yield
                await asking

            await answer(cluster, model, prompts, tmp_path / "out.jsonl", options(), watch=look)
            first, last = seen
            assert first.steps >= last.steps > 0
            assert first.summed.total > 0

    run(main)
