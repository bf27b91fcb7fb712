"""Real runs as they are seen: by their own statistics, by a trace, and by one who does not drive them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import COMMAND, answer, cluster_of, options, run, until, write_prompts

from bbquic.runtime.telemetry import JobStatistics
from bbquic.runtime.watch import ClusterWatch, WatchOptions, watching
from bbquic.transport.identity import Peer
from bbquic.units import Seconds

PROMPTS = [{"prompt": f"the of {n} " * (1 + n % 5), "max_tokens": 24} for n in range(12)]
QUICK = WatchOptions(Seconds(0.02), Seconds(5), Seconds(5), Seconds(0.02), Seconds(0.1))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


def test_a_runs_parts_sum_to_its_measured_step(model: Path, prompts: Path, tmp_path: Path) -> None:
    statistics: list[JobStatistics] = []

    async def main() -> None:
        async with cluster_of([model] * 3, quic=True) as cluster:
            how = options(micro_batches=2)
            statistics.append(await answer(cluster, model, prompts, tmp_path / "out.jsonl", how))

    run(main)
    (job,) = statistics
    loop = job.loop
    assert loop is not None
    assert loop.total == pytest.approx(loop.measured, rel=0.05)
    assert [hop.flight is not None for hop in job.hops] == [True] * 4
    assert all(stage.split is not None and stage.split.compute > 0 for stage in job.stages)
    assert all(0 < (stage.busy or 0) < 1 for stage in job.stages)
    assert job.first_tokens is not None
    assert job.first_tokens.count == len(PROMPTS)
    assert 0 < job.first_tokens.median <= job.first_tokens.p95 < job.elapsed * 1.1
    assert job.limit is not None
    assert "%" in job.limit


def test_a_trace_of_a_run_opens_and_shows_every_step_of_every_stage(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            how = replace(options(micro_batches=2), trace=trace)
            await answer(cluster, model, prompts, tmp_path / "out.jsonl", how)

    run(main)
    events: list[dict[str, Any]] = json.loads(trace.read_text())
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    by_stage: dict[int, set[tuple[int, int]]] = {2: set(), 3: set()}
    ended = {2: 0.0, 3: 0.0}
    for event in sorted(computed, key=lambda event: float(event["ts"])):
        assert event["ts"] >= ended[event["pid"]] - 2, "a device is in one place at a time"
        ended[event["pid"]] = event["ts"] + event["dur"]
        by_stage[event["pid"]].add((event["args"]["micro_batch"], event["args"]["step"]))
    assert by_stage[2] == by_stage[3]
    assert len(by_stage[2]) > 20


def test_a_trace_of_a_run_that_was_interrupted_is_whole(model: Path, prompts: Path, tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.json", tmp_path / "out.jsonl"

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            how = replace(options(micro_batches=2), trace=trace)
            running = asyncio.create_task(answer(cluster, model, prompts, output, how))
            await until(lambda: output.exists() and output.read_bytes().count(b"\n") > 1)
            running.cancel()
            await asyncio.wait([running])

    run(main)
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text()))


@pytest.mark.parametrize("quic", [False, True])
def test_who_may_not_coordinate_may_watch(model: Path, prompts: Path, tmp_path: Path, quic: bool) -> None:
    commands = {COMMAND: frozenset({"coordinate"}), "guest": frozenset[str]()}

    async def main() -> None:
        async with cluster_of([model] * 2, quic=quic, commands=commands) as cluster:
            watch = ClusterWatch(cluster.endpoints["guest"], list(cluster.peers.values()), QUICK)

            @asynccontextmanager
            async def watched(source: Callable[[], JobStatistics]) -> AsyncIterator[None]:
                yield
                await watch.wait_answers(3)

            async with watching(watch):
                await watch.wait_answers(2)
                idle = watch.snapshot()
                assert [(node.name, node.activity, node.job) for node in idle.nodes] == [
                    ("node-1", "idle", None),
                    ("node-2", "idle", None),
                ]
                assert all(node.trouble is None and node.offset is not None for node in idle.nodes)
                # one process, one clock: the truth is 0, and lies within what is said
                assert all(abs(node.offset or 0) <= (node.uncertainty or 0) for node in idle.nodes)
                assert all(node.device for node in idle.nodes)
                how = options(micro_batches=2)
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", how, watch=watched)

    run(main)


def test_a_watched_job_shows_each_stages_work_and_each_hop(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2, quic=True) as cluster:
            job = asyncio.create_task(
                answer(cluster, model, prompts, tmp_path / "out.jsonl", options(micro_batches=2))
            )
            watch = ClusterWatch(cluster.command, cluster.places(), QUICK)
            async with watching(watch):

                def works() -> bool:
                    stages = [node.stage for node in watch.snapshot().nodes]
                    return job.done() or all(one is not None and one.busy for one in stages)

                await until(works)
                seen = watch.snapshot()
                assert not job.done(), "it was to be seen at work"
                first, last = seen.nodes
                for node, blocks in ((first, (0, 1)), (last, (2, 3))):
                    assert node.stage is not None
                    assert node.stage.split is not None
                    assert node.stage.split.compute > 0
                    assert (node.stage.first_block, node.stage.last_block) == blocks
                    assert node.job == seen.limits[0][0]
                assert last.hop is None
                assert first.hop is not None
                assert (first.hop.source, first.hop.target) == ("node-1", "node-2")
                assert first.hop.bytes_sent > 0
                assert first.hop.why
                await job

    run(main)


def test_a_node_that_is_not_there_is_named_with_the_reason_and_found_when_it_comes(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            nowhere = Peer("nowhere", ("memory", 99), cluster.peers["node-1"].keys)
            watch = ClusterWatch(cluster.command, [nowhere, *cluster.places()], QUICK)
            async with watching(watch):
                await watch.wait_answers(2)
                nodes = watch.snapshot().nodes
                assert nodes[0].trouble is not None
                assert "does not answer" in nodes[0].trouble
                assert [node.trouble for node in nodes[1:]] == [None, None]

    run(main)


def test_a_node_that_leaves_is_said_to_have_left(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            watch = ClusterWatch(cluster.command, cluster.places(), QUICK)
            async with watching(watch):
                await watch.wait_answers(1)
                await cluster.endpoints["node-2"].close()
                await until(lambda: watch.snapshot().nodes[1].trouble is not None)
                assert watch.snapshot().nodes[0].trouble is None

    run(main)
