"""Who may do what to a node, and what a peer's damaged messages cost it."""

from __future__ import annotations

import json
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

from bbquic.errors import (
    BBQuicError,
    PlanRefused,
)
from bbquic.runtime.cluster import StageLink, deploy, describe_all, new_job_id
from bbquic.runtime.layout import for_stage, make_plan
from bbquic.runtime.protocol import (
    Lost,
    MeasureHeader,
    PackHeader,
    PingHeader,
    PlanHeader,
    PongHeader,
    RefusedHeader,
    ReleaseHeader,
    Row,
    SurveyHeader,
)
from bbquic.transport.channel import Channel
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header


async def plan_of(cluster: Cluster, model: Path, channels: tuple[Channel, ...]) -> list[PlanHeader]:
    """The plans a coordinator would send, one for each node."""
    held, how = run_model(model), options()
    nodes = await describe_all(channels, how.deadlines)
    plan = make_plan(new_job_id(), held.directory, held.manifest, nodes, how.layout)
    return [for_stage(plan, stage, held.directory) for stage in plan.stages]


async def reply(channel: Channel, kind: Kind) -> Message:
    while True:
        message = await channel.receive()
        if message.kind is kind:
            return message


def test_a_peer_without_the_right_can_neither_plan_nor_cancel(
    model: Path, prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commands = {COMMAND: frozenset({"coordinate"}), "guest": frozenset[str]()}

    async def main() -> None:
        async with cluster_of([model], commands=commands) as cluster:
            guest = cluster.endpoints["guest"]
            with pytest.raises(PlanRefused, match="node-1 does not take a plan from guest"):
                await answer(cluster, model, prompts, tmp_path / "a.jsonl", options(), endpoint=guest)

            @asynccontextmanager
            async def meddle(_: object) -> Any:
                channel = await guest.connect(cluster.peers["node-1"])
                for kind in (Kind.CANCEL, Kind.RELEASE):
                    job = cluster.nodes["node-1"]._job
                    assert job is not None
                    await channel.send(Message(kind, encode_header(ReleaseHeader(job.plan.job))))
                    refused = decode_header_untrusted(
                        RefusedHeader, (await reply(channel, Kind.REFUSED)).header
                    )
                    assert "guest, which may not coordinate" in refused.reason
                yield

            statistics = await answer(cluster, model, prompts, tmp_path / "b.jsonl", options(), watch=meddle)
            assert statistics.done == len(PROMPTS)

    run(main)
    assert "guest sent a cancel, and may not coordinate: refused" in caplog.text


def test_rows_from_anyone_but_the_predecessor_cost_the_sender_its_connection(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:

            @asynccontextmanager
            async def meddle(_: object) -> Any:
                for place, kind in ((0, Kind.ROWS), (1, Kind.ROWS), (1, Kind.HIDDEN)):
                    channel = await cluster.command.connect(cluster.places()[place])
                    job = cluster.nodes[cluster.names[place]]._job
                    assert job is not None
                    header = PackHeader(
                        job.plan.job, 0, 0, 1, (0, 1, 16), (Row(0, 1, 0, 1, True, None),), b"\1\0\0\0"
                    )
                    await channel.send(Message(kind, encode_header(header)))
                    with pytest.raises(BBQuicError, match="which come from"):
                        await channel.receive()
                yield

            statistics = await answer(
                cluster, model, prompts, tmp_path / "out.jsonl", options(), watch=meddle
            )
            assert statistics.done == len(PROMPTS)

    run(main)


def test_a_second_coordinator_is_told_who_has_the_node(model: Path, prompts: Path, tmp_path: Path) -> None:
    commands = dict.fromkeys((COMMAND, "other"), frozenset({"coordinate"}))

    async def main() -> None:
        async with cluster_of([model], commands=commands) as cluster:

            @asynccontextmanager
            async def contend(_: object) -> Any:
                with pytest.raises(PlanRefused, match=r"node-1 is busy with job [0-9a-f]{16} of command"):
                    await answer(
                        cluster,
                        model,
                        prompts,
                        tmp_path / "b.jsonl",
                        options(),
                        endpoint=cluster.endpoints["other"],
                    )
                yield

            await answer(cluster, model, prompts, tmp_path / "a.jsonl", options(), watch=contend)
            other = cluster.endpoints["other"]
            await answer(cluster, model, prompts, tmp_path / "c.jsonl", options(), endpoint=other)

    run(main)


def test_a_new_plan_of_the_same_coordinator_replaces_its_last(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            for _ in range(2):  # the second time, the first job was never released
                channel = await cluster.command.connect(cluster.peers["node-1"])
                plans = await plan_of(cluster, model, (channel,))
                await deploy(
                    [StageLink(plans[0].stages[0], channel)], plans, options().deadlines, lambda _: None
                )
                job = cluster.nodes["node-1"]._job
                assert job is not None
                assert job.plan.job == plans[0].job

    run(main)


def test_a_job_whose_coordinator_is_gone_is_released(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            plans = await plan_of(cluster, model, (channel,))
            links = [StageLink(plans[0].stages[0], channel)]
            await deploy(links, plans, options().deadlines, lambda _: None)
            node = cluster.nodes["node-1"]
            assert node._job is not None
            channel.close("gone")
            await until(lambda: node._job is None)

    run(main)


@pytest.mark.parametrize("name", ["../tiny", "/etc", "tiny/../tiny", "", "a\0b"])
def test_a_peer_cannot_name_a_path_in_place_of_a_model(model: Path, name: str) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            plans = await plan_of(cluster, model, (channel,))
            wrong = msgspec.structs.replace(plans[0], model=name)
            await channel.send(Message(Kind.PLAN, encode_header(wrong)))
            if name == "":  # a header that no plan can have
                with pytest.raises(BBQuicError, match="not a PlanHeader"):
                    await reply(channel, Kind.REFUSED)
            else:
                message = await reply(channel, Kind.REFUSED)
                refused = decode_header_untrusted(RefusedHeader, message.header)
                assert "is not the name of a model" in refused.reason

    run(main)


def test_a_ping_is_answered_with_what_the_node_is_at(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            await channel.send(Message(Kind.PING, encode_header(PingHeader(7))))
            pong = decode_header_untrusted(PongHeader, (await reply(channel, Kind.PONG)).header)
            assert (pong.number, pong.activity, pong.queued) == (7, "idle", 0)

    run(main)


VALID: list[tuple[Kind, bytes]] = [
    (Kind.PING, encode_header(PingHeader(1))),
    (Kind.RELEASE, encode_header(ReleaseHeader("0" * 16))),
    (Kind.ROWS, encode_header(PackHeader("0" * 16, 0, 0, 1, (0, 1, 16), (Row(0, 1, 0, 1, True, None),)))),
    (Kind.PLAN, json.dumps({"job": "0" * 16}).encode()),
    (Kind.TOKENS, b"\x80"),
    (Kind.MEASURE, encode_header(MeasureHeader("m", {"model_type": '"llama"'}, "float32", False))),
    (Kind.SURVEY, encode_header(SurveyHeader(1, ("node-1", "command"), ("command",)))),
]


@settings(max_examples=60)
@given(which=st.sampled_from(VALID), place=st.integers(0, 200), byte=st.integers(0, 255), cut=st.booleans())
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


def test_rows_that_are_lost_before_any_stage_cost_the_sender_its_connection(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            plans = await plan_of(cluster, model, (channel,))
            links = [StageLink(plans[0].stages[0], channel)]
            await deploy(links, plans, options().deadlines, lambda _: None)
            lost = Lost("node-0", "0-1", "out_of_memory", "none left")
            header = PackHeader(plans[0].job, 0, 0, 1, (0, 1, 16), (Row(0, 1, 0, 1, True, None),), lost=lost)
            await channel.send(Message(Kind.ROWS, encode_header(header)))
            with pytest.raises(BBQuicError, match="lost before any stage"):
                await channel.receive()
            assert not cluster.tasks["node-1"].done()

    run(main)


def test_a_stage_that_is_handed_too_few_bytes_refuses_them(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            channel = await cluster.command.connect(cluster.peers["node-1"])
            plans = await plan_of(cluster, model, (channel,))
            links = [StageLink(plans[0].stages[0], channel)]
            await deploy(links, plans, options().deadlines, lambda _: None)
            header = PackHeader(
                plans[0].job, 0, 0, 1, (0, 1, 16), (Row(0, 1, 0, 2, True, None),), b"\1\0\0\0"
            )
            await channel.send(Message(Kind.ROWS, encode_header(header)))
            failed = await reply(channel, Kind.FAILED)
            assert b"4 bytes of token ids for 2 tokens" in failed.header

    run(main)
