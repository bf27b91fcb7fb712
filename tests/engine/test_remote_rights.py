"""Who may have a job coordinated, who may attach itself to a stage, and what the others lose by trying."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_helpers import (
    COMMAND,
    PROMPTS,
    Cluster,
    answer,
    cluster_of,
    options,
    run,
    run_model,
    until,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_helpers import JOB, TO_NODES, a_request, at_stage, coordinate

from bbquic.errors import BBQuicError, ConnectionLost, RemoteProtocolError
from bbquic.runtime.cluster import StageLink, deploy, describe_all, new_job_id
from bbquic.runtime.coordination import AttachHeader, RequestsHeader
from bbquic.runtime.layout import for_stage, make_plan
from bbquic.runtime.protocol import (
    PackHeader,
    PingHeader,
    PlanHeader,
    PongHeader,
    RefusedHeader,
    Row,
    TokensHeader,
)
from bbquic.transport.channel import Channel
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header


def job_of(cluster: Cluster, name: str) -> str:
    job = cluster.nodes[name]._job
    assert job is not None
    return job.plan.job


async def reply(channel: Channel, kind: Kind) -> Message:
    while True:
        message = await channel.receive()
        if message.kind is kind:
            return message


async def deployed(cluster: Cluster, model: Path, **changes: Any) -> tuple[PlanHeader, list[Channel]]:
    """The cluster's nodes with a plan that wants the coordinator on the first, and channels to them."""
    channels = [await cluster.command.connect(peer) for peer in cluster.places()]
    held, how = run_model(model), at_stage(micro_batches=1)
    nodes = await describe_all(channels, how.deadlines)
    plan = make_plan(new_job_id(), held.directory, held.manifest, nodes, how.layout)
    plan = msgspec.structs.replace(plan, **changes)
    plans = [for_stage(plan, stage, held.directory) for stage in plan.stages]
    links = [StageLink(stage, channel) for stage, channel in zip(plan.stages, channels, strict=True)]
    await deploy(links, plans, how.deadlines, lambda _: None)
    return plan, channels


def test_a_peer_without_the_right_has_nothing_coordinated(
    model: Path, prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commands = {COMMAND: frozenset({"coordinate"}), "guest": frozenset[str]()}

    async def main() -> None:
        async with cluster_of([model] * 2, commands=commands) as cluster:

            @asynccontextmanager
            async def meddle(_: object) -> Any:
                job = job_of(cluster, "node-1")
                channel = await cluster.endpoints["guest"].connect(cluster.peers["node-1"])
                await channel.send(Message(Kind.COORDINATE, encode_header(coordinate(job))))
                refused = decode_header_untrusted(RefusedHeader, (await reply(channel, Kind.REFUSED)).header)
                assert "guest, which may not coordinate" in refused.reason
                group = RequestsHeader(job, 0, 0, (a_request(1),))
                await channel.send(Message(Kind.REQUESTS, encode_header(group)))
                with pytest.raises(BBQuicError, match="node-1 does not coordinate for guest"):
                    await channel.receive()
                yield

            how = at_stage(micro_batches=2)
            statistics = await answer(cluster, model, prompts, tmp_path / "b.jsonl", how, watch=meddle)
            assert statistics.done == len(PROMPTS)

    run(main)
    assert "guest sent a job to coordinate, and may not coordinate: refused" in caplog.text


def test_who_may_coordinate_cannot_take_over_the_job_of_another_connection(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:

            @asynccontextmanager
            async def meddle(_: object) -> Any:
                job = job_of(cluster, "node-1")
                group = RequestsHeader(job, 0, 0, (a_request(1),))
                for kind, header in ((Kind.COORDINATE, coordinate(job)), (Kind.REQUESTS, group)):
                    channel = await cluster.command.connect(cluster.peers["node-1"])
                    await channel.send(Message(kind, encode_header(header)))
                    with pytest.raises(BBQuicError, match="node-1 does not coordinate for command"):
                        await channel.receive()
                yield

            await answer(cluster, model, prompts, tmp_path / "out.jsonl", at_stage(), watch=meddle)

    run(main)


@asynccontextmanager
async def in_mid_run(cluster: Cluster, source: Any, meddle: Callable[[], Awaitable[None]]) -> Any:
    """Have `meddle` done while the job waits for its first stage."""
    gate = threading.Event()

    async def go() -> None:
        try:
            await until(lambda: source().generated_tokens > 0)
            cluster.nodes["node-1"]._device.submit(gate.wait)
            await meddle()
        finally:
            gate.set()

    task = asyncio.create_task(go())
    yield
    await task


def test_rows_tokens_and_attachments_from_anyone_else_cost_the_sender_its_connection(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model] * 3) as cluster:

            async def meddle() -> None:
                job = job_of(cluster, "node-1")
                pack = PackHeader(job, 0, 0, 1, (0, 1, 16), (Row(0, 1, 0, 1, True, None),), b"\1\0\0\0")
                tokens = TokensHeader(job, 0, 0, 1, (5,))
                attach = AttachHeader(job, 0)
                for sender, target, kind, header, words in (
                    (COMMAND, "node-1", Kind.ROWS, pack, "which come from its coordinator"),
                    ("node-2", "node-1", Kind.ROWS, pack, "which come from its coordinator"),
                    ("node-1", "node-1", Kind.ROWS, pack, "which come from its coordinator"),
                    ("node-2", "node-1", Kind.TOKENS, tokens, "TOKENS is not a message for a node"),
                    ("node-3", "node-1", Kind.TOKENS, tokens, "TOKENS is not a message for a node"),
                    (COMMAND, "node-2", Kind.ATTACH, attach, r"command \(command\) does not coordinate"),
                    ("node-2", "node-3", Kind.ATTACH, attach, r"node-2 \(node\) does not coordinate"),
                    ("node-1", "node-3", Kind.ATTACH, attach, "is known already"),
                ):
                    channel = await cluster.endpoints[sender].connect(cluster.peers[target])
                    await channel.send(Message(kind, encode_header(header)))
                    with pytest.raises(BBQuicError, match=words):
                        await channel.receive()

            def watch(source: Any) -> Any:
                return in_mid_run(cluster, source, meddle)

            statistics = await answer(cluster, model, prompts, tmp_path / "o.jsonl", at_stage(), watch=watch)
            assert statistics.done == len(PROMPTS)

    run(main)


def test_tokens_of_a_stage_that_is_not_the_last_end_the_job(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model] * 3) as cluster:

            async def forge() -> None:
                job = cluster.nodes["node-2"]._job
                assert job is not None
                assert job.service is not None
                tokens = TokensHeader(job.plan.job, 0, 0, 1, (5,))
                await job.service._back.send(Message(Kind.TOKENS, encode_header(tokens)))
                await until(lambda: cluster.nodes["node-2"]._job is None)

            def watch(source: Any) -> Any:
                return in_mid_run(cluster, source, forge)

            with pytest.raises(RemoteProtocolError, match="node-2: TOKENS is not what this stage sends"):
                await answer(cluster, model, prompts, tmp_path / "o.jsonl", at_stage(), watch=watch)

    run(main)


def test_hidden_states_before_the_coordinator_is_known_cost_the_sender_its_connection(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            plan, _ = await deployed(cluster, model)
            pack = PackHeader(plan.job, 0, 0, 1, (0, 1, 16), (Row(0, 1, 0, 1, True, None),))
            channel = await cluster.endpoints["node-1"].connect(cluster.peers["node-2"])
            await channel.send(Message(Kind.HIDDEN, encode_header(pack), bytes(4 * 64)))
            with pytest.raises(ConnectionLost, match="came before its coordinator"):
                await channel.receive()

    run(main)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([RequestsHeader(JOB, 0, 0, (a_request(1),))] * 2, "group 0 of requests came twice"),
        ([RequestsHeader(JOB, 0, 8, (a_request(1),))], "group 8 of requests came twice, or far too early"),
        (
            [RequestsHeader(JOB, 0, 0, tuple(a_request(line, 90) for line in range(1, 8)))],
            "7 requests are open, and 6 may be",
        ),
    ],
)
def test_requests_that_break_the_rules_cost_the_command_its_connection_and_the_job(
    model: Path, groups: list[RequestsHeader], words: str
) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            plan, (channel,) = await deployed(cluster, model)
            await channel.send(Message(Kind.COORDINATE, encode_header(coordinate(plan.job))))
            await reply(channel, Kind.PROGRESS)
            for group in groups:
                wrong = msgspec.structs.replace(group, job=plan.job)
                await channel.send(Message(Kind.REQUESTS, encode_header(wrong)))
            with pytest.raises(ConnectionLost, match=words):
                await reply(channel, Kind.ENDED)
            await until(lambda: cluster.nodes["node-1"]._job is None)

    run(main)


def test_a_job_is_coordinated_once_as_planned_and_after_it_was_asked(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            once = encode_header(RequestsHeader(JOB, 0, 0, (a_request(1),)))
            for kind in (Kind.REQUESTS, Kind.COORDINATE):
                plan, (channel,) = await deployed(cluster, model)
                ask = Message(Kind.COORDINATE, encode_header(coordinate(plan.job)))
                if kind is Kind.COORDINATE:
                    await channel.send(ask)
                    await channel.send(ask)
                    words = "is coordinated already"
                else:
                    group = msgspec.structs.replace(
                        decode_header_untrusted(RequestsHeader, once), job=plan.job
                    )
                    await channel.send(Message(kind, encode_header(group)))
                    words = "came before they were asked for"
                with pytest.raises(ConnectionLost, match=words):
                    await reply(channel, Kind.ENDED)
            plan, (channel,) = await deployed(cluster, model, coordinator=None)
            await channel.send(Message(Kind.COORDINATE, encode_header(coordinate(plan.job))))
            with pytest.raises(ConnectionLost, match="does not coordinate for command"):
                await channel.receive()

    run(main)


@pytest.mark.parametrize("kind", [Kind.COORDINATE, Kind.ATTACH])
def test_a_node_that_no_longer_has_the_job_says_so(model: Path, kind: Kind) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            header = coordinate() if kind is Kind.COORDINATE else AttachHeader(JOB, 0)
            await channel.send(Message(kind, encode_header(header)))
            refused = decode_header_untrusted(RefusedHeader, (await reply(channel, Kind.REFUSED)).header)
            assert refused.reason == f"node-1 has no stage of job {JOB}"

    run(main)


def test_slots_that_do_not_make_the_plans_micro_batches_are_refused(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            plan, (channel,) = await deployed(cluster, model, micro_batches=3)
            await channel.send(Message(Kind.COORDINATE, encode_header(coordinate(plan.job))))
            ended = await reply(channel, Kind.ENDED)
            assert b"2 slots do not make 3 micro-batches" in ended.header

    run(main)


def test_a_plan_cannot_put_the_coordinator_elsewhere(model: Path) -> None:
    held = run_model(model)

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            nodes = await describe_all([channel], options().deadlines)
            plan = make_plan(new_job_id(), held.directory, held.manifest, nodes, options().layout)
            raw = msgspec.to_builtins(plan) | {"coordinator": "node-2"}
            await channel.send(Message(Kind.PLAN, msgspec.msgpack.encode(raw)))
            with pytest.raises(ConnectionLost, match="neither the sender nor on the first stage's node"):
                await channel.receive()

    run(main)


@settings(max_examples=60)
@given(
    which=st.sampled_from(TO_NODES), place=st.integers(0, 300), byte=st.integers(0, 255), cut=st.booleans()
)
def test_damaged_messages_of_a_pinned_peer_cost_it_at_most_its_connection(
    which: tuple[Kind, bytes], place: int, byte: int, cut: bool
) -> None:
    kind, header = which
    at = place % len(header)
    damaged = header[:at] if cut else header[:at] + bytes([byte]) + header[at + 1 :]

    async def main() -> None:
        async with cluster_of([Path("no-model")]) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            await channel.send(Message(kind, damaged))
            again = await cluster.command.connect(cluster.peers["node-1"])
            await again.send(Message(Kind.PING, encode_header(PingHeader(2))))
            pong = decode_header_untrusted(PongHeader, (await reply(again, Kind.PONG)).header)
            assert pong.number == 2
            assert not cluster.tasks["node-1"].done()

    run(main)
