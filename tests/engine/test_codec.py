"""Hops that compress: the same tokens, tables that both ends agree on, and what a damaged frame does."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_helpers import answer, cluster_of, options, read_answers, run, until, write_prompts

from bbquic.codec.frame import Codec
from bbquic.codec.table import ShiftTable
from bbquic.errors import StageFailed
from bbquic.plan.breakeven import Way
from bbquic.runtime.hop import CodecMode
from bbquic.runtime.protocol import PackHeader, TableHeader
from bbquic.runtime.service import StageService
from bbquic.transport.channel import Channel
from bbquic.transport.memory import MemoryChannel
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header

PROMPTS = [{"prompt": "some words " * (1 + n % 9), "max_tokens": 24 + n} for n in range(24)]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What is answered without a hop."""
    folder = tmp_path_factory.mktemp("plain")

    async def main() -> None:
        async with cluster_of([model]) as cluster:
            prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
            await answer(cluster, model, prompts, folder / "out.jsonl", options())

    run(main)
    return texts(folder / "out.jsonl")


def texts(path: Path) -> dict[int, str]:
    return {line: record["text"] for line, record in read_answers(path).items()}


def services(cluster: Any) -> list[StageService]:
    return [node._job.service for node in cluster.nodes.values() if node._job and node._job.service]


@pytest.mark.parametrize("quic", [False, True])
@pytest.mark.parametrize("mode", list(CodecMode))
def test_no_codec_changes_a_token(
    model: Path, plain: dict[int, str], tmp_path: Path, mode: CodecMode, quic: bool
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    order = None if quic else random.Random(len(mode))

    async def main() -> None:
        async with cluster_of([model] * 3, quic=quic, order=order) as cluster:
            how = options(micro_batches=2, codec=mode)
            statistics = await answer(cluster, model, prompts, tmp_path / "out.jsonl", how)
            middle = statistics.hops[1]
            assert middle.ratio is not None
            assert (middle.ratio > 1.05) == (mode in (CodecMode.H8, CodecMode.REC))

    run(main)
    assert texts(tmp_path / "out.jsonl") == plain


def test_a_table_is_used_once_the_next_stage_holds_it_and_not_before(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    used: list[int] = []
    tables = 0

    async def main() -> None:
        nonlocal tables
        receive = StageService.receive
        take = StageService.take_table

        def look(self: StageService, channel: Channel, message: Message) -> None:
            pack = decode_header_untrusted(PackHeader, message.header)
            if pack.frame:
                used.append(pack.frame[1])
            receive(self, channel, message)

        async def count(self: StageService, channel: Channel, message: Message) -> None:
            nonlocal tables
            assert Codec.REC not in used, "a frame named a table that was not told yet"
            tables += 1
            await take(self, channel, message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageService, "receive", look)
            patch.setattr(StageService, "take_table", count)
            async with cluster_of([model] * 2, order=random.Random(5)) as cluster:
                how = options(micro_batches=2, codec=CodecMode.REC)
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", how)

    run(main)
    assert tables == 1
    assert used[0] == Codec.H8
    assert Codec.REC in used


def test_a_damaged_frame_ends_the_job_by_name(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        send = MemoryChannel.send

        async def damage(self: MemoryChannel, message: Message) -> Any:
            if message.kind is Kind.HIDDEN:
                pack = decode_header_untrusted(PackHeader, message.header)
                bad = pack.frame[:1] + b"\x09" + pack.frame[2:]
                header = encode_header(msgspec.structs.replace(pack, frame=bad))
                message = Message(message.kind, header, message.body)
            return await send(self, message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryChannel, "send", damage)
            async with cluster_of([model] * 2) as cluster:
                with pytest.raises(StageFailed, match=r"node-2 .* step 1: .*unknown codec 9") as failed:
                    await answer(cluster, model, prompts, tmp_path / "out.jsonl", options())
                assert failed.value.code == "bad_input"

    run(main)
    assert read_answers(tmp_path / "out.jsonl") == {}


def a_table(job: str, digest: bytes | None = None) -> Message:
    from bbquic.codec.planes import Width

    table = ShiftTable.of(Width.FLOAT16, np.zeros(8, np.uint16))
    header = TableHeader(job, 0, table.width, 8, table.encode(), digest or table.digest)
    return Message(Kind.TABLE, encode_header(header))


@pytest.mark.parametrize("digest", [None, b"12345678"])
def test_a_table_from_anyone_but_the_stage_before_costs_its_sender_the_connection(
    model: Path, tmp_path: Path, digest: bytes | None
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            job = asyncio.create_task(
                answer(cluster, model, prompts, tmp_path / "out.jsonl", options(micro_batches=2))
            )
            await until(lambda: len(services(cluster)) == 2)
            stranger = await cluster.endpoints["node-1"].connect(cluster.peers["node-2"])
            other = await cluster.endpoints["command"].connect(cluster.peers["node-2"])
            plan = services(cluster)[0].plan.job
            await other.send(a_table(plan, digest))
            await other.wait_closed()
            if digest is not None:
                await stranger.send(a_table(plan, digest))
                await stranger.wait_closed()
            await job

    run(main)
    assert len(read_answers(tmp_path / "out.jsonl")) == len(PROMPTS)


def test_the_switch_says_what_a_hop_does_and_why(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    said: set[tuple[str, str]] = set()

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            job = asyncio.create_task(
                answer(cluster, model, prompts, tmp_path / "out.jsonl", options(micro_batches=2))
            )
            while not job.done():
                for service in services(cluster):
                    report = service.report()
                    said.add((report.codec, report.why))
                await asyncio.sleep(0.002)
            await job

    run(main)
    assert (Way.RAW.value, "the link was never seen full, so its rate is not known") in said or any(
        "too short" in why for _, why in said
    )
