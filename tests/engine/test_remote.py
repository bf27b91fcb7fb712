"""Whole runs with the coordinator on the first stage's node: the same answers, failures and figures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import COMMAND, answer, cluster_of, options, read_answers, run, until, write_prompts
from oracle import Oracle
from remote_helpers import at_stage
from safetensors.torch import load_file, save_file

from bbquic.errors import BBQuicError, ConfigError, ConnectionLost, StageFailed
from bbquic.runtime.telemetry import JobStatistics
from bbquic.transport.memory import MemoryChannel, MemoryEndpoint
from bbquic.transport.message import Kind, Message
from bbquic.units import Seconds
from tiny_model import make_tiny_llama

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "a", "max_tokens": 20},
    {"prompt": "some what there we can " * 8, "max_tokens": 16},
    {"messages": [{"role": "user", "content": "which one?"}], "max_tokens": 9},
    {"prompt": "日本語 и русский 🙂", "max_tokens": 1},
    *({"prompt": f"word {'the of ' * (n % 7)}{n}", "max_tokens": 5 + 2 * n} for n in range(6)),
]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, str]:
    """By line, what transformers generates for each prompt alone."""
    oracle = Oracle(model)
    return {
        line: oracle.tokenizer.decode(
            oracle.generate(oracle.prompt(record), record["max_tokens"]), skip_special_tokens=True
        )
        for line, record in enumerate(PROMPTS, 1)
    }


def texts(path: Path) -> dict[int, str]:
    return {line: record["text"] for line, record in read_answers(path).items()}


@pytest.mark.parametrize(
    ("nodes", "micro_batches", "chunk"),
    [(1, 1, 8), (1, 2, 512), (2, 1, 512), (2, 2, 8), (3, 1, 8), (3, 2, 512)],
)
def test_greedy_answers_equal_transformers_over_a_network_that_reorders(
    model: Path, expected: dict[int, str], tmp_path: Path, nodes: int, micro_batches: int, chunk: int
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    statistics: list[JobStatistics] = []

    async def main() -> None:
        order = random.Random(nodes * 10 + micro_batches + chunk)
        how = at_stage(micro_batches=micro_batches, prefill_tokens=chunk)
        async with cluster_of([model] * nodes, order=order) as cluster:
            statistics.append(await answer(cluster, model, prompts, tmp_path / "out.jsonl", how))

    run(main)
    answers = read_answers(tmp_path / "out.jsonl")
    assert {line: record["text"] for line, record in answers.items()} == expected
    (job,) = statistics
    assert job.finished
    assert job.generated_tokens == sum(record["completion_tokens"] for record in answers.values())
    assert job.prompt_tokens == sum(record["prompt_tokens"] for record in answers.values())


def test_over_quic_answers_are_the_same_and_the_loop_is_accounted_for(
    model: Path, expected: dict[int, str], tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    statistics: list[JobStatistics] = []

    async def main() -> None:
        async with cluster_of([model] * 3, quic=True) as cluster:
            how = at_stage(micro_batches=2)
            statistics.append(await answer(cluster, model, prompts, tmp_path / "out.jsonl", how))

    run(main)
    assert texts(tmp_path / "out.jsonl") == expected
    (job,) = statistics
    assert job.loop is not None
    assert job.loop.total == pytest.approx(job.loop.measured, rel=0.05)
    assert [hop.flight is not None for hop in job.hops] == [True] * 4
    assert job.hops[0].rtt == Seconds(0.0), "between the coordinator and the first stage there is no network"
    assert (job.hops[-1].rtt or 0) > 0
    assert job.first_tokens is not None
    assert job.first_tokens.count == len(PROMPTS)


@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_cross_no_network_and_tokens_go_to_the_first_stages_node(
    model: Path, tmp_path: Path, nodes: int
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    sent: set[tuple[Kind, str]] = set()

    async def main() -> None:
        send = MemoryChannel.send

        async def look(self: MemoryChannel, message: Message) -> Any:
            sent.add((message.kind, self.peer.name))
            return await send(self, message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryChannel, "send", look)
            async with cluster_of([model] * nodes) as cluster:
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", at_stage())

    run(main)
    assert not [peer for kind, peer in sent if kind is Kind.ROWS]
    assert {peer for kind, peer in sent if kind is Kind.TOKENS} == ({"node-1"} if nodes > 1 else set())
    assert {peer for kind, peer in sent if kind is Kind.OUTCOMES} == {COMMAND}


def test_stop_strings_seeds_and_records_that_do_not_fit_are_as_with_the_coordinator_here(
    model: Path, expected: dict[int, str], tmp_path: Path
) -> None:
    records = [
        *({**record, "stop": [expected[line][3:5]]} for line, record in enumerate(PROMPTS[:2], 1)),
        *(
            {
                "prompt": f"all {n}",
                "max_tokens": 12,
                "temperature": 0.5 + n / 5,
                "top_k": 5 * n,
                "seed": 2**63 + n,
            }
            for n in range(4)
        ),
        {"prompt": "too long", "max_tokens": 500},
    ]
    prompts = write_prompts(tmp_path / "prompts.jsonl", records)

    async def main() -> None:
        async with cluster_of([model] * 2, order=random.Random(3)) as cluster:
            for name, how in (("here", options), ("stage", at_stage)):
                run_options = how(micro_batches=2, kv_tokens=256)
                await answer(cluster, model, prompts, tmp_path / f"{name}.jsonl", run_options)

    run(main)
    here, stage = (read_answers(tmp_path / f"{name}.jsonl") for name in ("here", "stage"))
    assert here == stage
    assert stage[1]["text"] == expected[1][:3]
    assert stage[7]["error"]["code"] == "does_not_fit"


def test_a_window_of_few_requests_is_enough_and_nothing_is_answered_twice(
    model: Path, expected: dict[int, str], tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        async with cluster_of([model] * 2, order=random.Random(11)) as cluster:
            how = replace(at_stage(batch=2, micro_batches=1), look_ahead=1)  # 4 requests may be open
            await answer(cluster, model, prompts, tmp_path / "out.jsonl", how)

    run(main)
    assert texts(tmp_path / "out.jsonl") == expected


def test_a_job_without_a_line_to_answer_ends(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [])

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            statistics = await answer(cluster, model, prompts, tmp_path / "out.jsonl", at_stage())
            assert statistics.finished

    run(main)


def test_a_command_that_dies_frees_the_nodes_and_another_goes_on(
    model: Path, expected: dict[int, str], tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    output = tmp_path / "out.jsonl"
    commands = dict.fromkeys((COMMAND, "again"), frozenset({"coordinate"}))

    async def main() -> None:
        async with cluster_of([model] * 2, order=random.Random(1), commands=commands) as cluster:

            @asynccontextmanager
            async def die_after_some(source: Callable[[], JobStatistics]) -> Any:
                async def die() -> None:
                    await until(lambda: source().done >= 2)
                    assert isinstance(cluster.command, MemoryEndpoint)
                    cluster.command.vanish()

                task = asyncio.create_task(die())
                yield
                await task

            how = replace(at_stage(batch=2), look_ahead=1)
            with pytest.raises(ConnectionLost):
                await answer(cluster, model, prompts, output, how, watch=die_after_some)
            await until(lambda: all(node._job is None for node in cluster.nodes.values()))
            before = len(read_answers(output))
            assert 2 <= before < len(PROMPTS)
            statistics = await answer(
                cluster, model, prompts, output, how, endpoint=cluster.endpoints["again"]
            )
            assert (statistics.skipped, statistics.done) == (before, len(PROMPTS) - before)

    run(main)
    assert texts(output) == expected


@pytest.mark.parametrize(
    ("tensor", "node", "blocks"),
    [
        ("model.layers.1.mlp.up_proj.weight", "node-1", "0-1"),
        ("model.layers.2.mlp.up_proj.weight", "node-2", "2-3"),
    ],
)
def test_a_failing_stage_is_named_where_the_command_is(
    tmp_path: Path, tensor: str, node: str, blocks: str
) -> None:
    broken = make_tiny_llama(tmp_path / "tiny")
    tensors = load_file(broken / "model.safetensors")
    tensors[tensor][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        async with cluster_of([broken] * 2) as cluster:
            with pytest.raises(StageFailed, match=rf"{node} \(blocks {blocks}\) failed at .* step 1") as e:
                await answer(cluster, broken, prompts, tmp_path / "out.jsonl", at_stage())
            assert (e.value.node, e.value.code) == (node, "non_finite")
            assert "run the same command again" in (e.value.hint or "")
            await until(lambda: all(node._job is None for node in cluster.nodes.values()))

    run(main)
    assert read_answers(tmp_path / "out.jsonl") == {}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_node_lost_in_mid_run_is_named_and_the_others_are_freed(
    model: Path, tmp_path: Path, lost: int
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        async with cluster_of([model] * 3, order=random.Random(1)) as cluster:
            name = cluster.names[lost]

            @asynccontextmanager
            async def lose(source: Callable[[], JobStatistics]) -> Any:
                async def close() -> None:
                    await until(lambda: source().done >= 2)
                    await cluster.endpoints[name].close()

                task = asyncio.create_task(close())
                yield
                await task

            how = replace(at_stage(batch=2, micro_batches=1), look_ahead=1)
            with pytest.raises((ConnectionLost, StageFailed), match=name):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", how, watch=lose)
            others = [node for other, node in cluster.nodes.items() if other != name]
            await until(lambda: all(node._job is None for node in others))

    run(main)
    assert 2 <= len(read_answers(tmp_path / "out.jsonl")) < len(PROMPTS)


def test_a_stage_that_its_coordinator_cannot_reach_is_named(model: Path, tmp_path: Path) -> None:
    """It is behind a network that lets the command and the stage before it in, but not the first one."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        async with cluster_of([model] * 3) as cluster:
            known = dict(cluster.peers)
            known["node-3"] = replace(known["node-3"], address=("memory", 999))
            cluster.nodes["node-1"]._peers = known
            with pytest.raises(BBQuicError, match="node-3 does not answer"):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", at_stage())
            del known["node-3"]
            with pytest.raises(BBQuicError, match="node-1 does not know the stage's node node-3"):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", at_stage())

    run(main)


def test_a_trace_of_a_loop_on_another_machine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a trace is made by the coordinator") as refused:
        replace(at_stage(), trace=tmp_path / "trace.json")
    assert "--coordinator here" in (refused.value.hint or "")
