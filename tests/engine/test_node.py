"""What a node refuses to do, and what its failures say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import (
    CPU,
    answer,
    cluster_of,
    options,
    read_answers,
    run,
    run_model,
    until,
    write_prompts,
)
from safetensors.torch import load_file, save_file

from bbquic.errors import (
    ConfigError,
    ConnectionLost,
    PeerUnreachable,
    PlanRefused,
    StageFailed,
)
from bbquic.runtime.generate import RunOptions
from bbquic.runtime.layout import LayoutOptions
from bbquic.runtime.loading import DiskLoader, ModelStore
from bbquic.runtime.protocol import PlanHeader, Stage
from bbquic.runtime.stage import StageWorker
from bbquic.units import Seconds
from tiny_model import make_tiny_llama


def test_a_node_that_holds_other_weights_is_named_with_the_tensor(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    other = make_tiny_llama(tmp_path / "tiny", seed=1)

    async def main() -> None:
        async with cluster_of([model, other]) as cluster:
            with pytest.raises(PlanRefused, match=r"coordinator and node-2 .*model\.layers\.2\.\S+ has"):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", options())

    run(main)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_node_with_another_tokenizer_is_refused(model: Path, prompts: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "tiny")
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")

    async def main() -> None:
        async with cluster_of([other]) as cluster:
            with pytest.raises(PlanRefused, match=r"node-1 .*tokenizer"):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", options())

    run(main)


def test_a_dtype_that_a_node_lacks_is_refused_by_name(model: Path, prompts: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            with pytest.raises(PlanRefused, match=r"node-1 .* does not compute in float16"):
                await answer(cluster, model, prompts, tmp_path / "o.jsonl", options(dtype="float16"))
            with pytest.raises(ConfigError, match="int4 is not a dtype"):
                await answer(cluster, model, prompts, tmp_path / "o.jsonl", options(dtype="int4"))

    run(main)


def test_more_kv_memory_than_there_is_is_refused_with_need_and_have(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            with pytest.raises(PlanRefused, match=r"node-1 .* need [\d.]+ GB, of its [\d.]+ GB free"):
                await answer(cluster, model, prompts, tmp_path / "o.jsonl", options(kv_tokens=10**12))

    run(main)


def test_a_model_that_a_node_lacks_is_refused_with_what_to_do(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    named = run_model(model)
    named.directory.name = "elsewhere"

    async def main() -> None:
        async with cluster_of([model]) as cluster:
            with pytest.raises(PlanRefused, match="has no model elsewhere") as refused:
                await answer(cluster, model, prompts, tmp_path / "o.jsonl", options(), held=named)
            assert "--model" in (refused.value.hint or "")

    run(main)


def test_a_block_that_computes_nan_names_node_blocks_and_step(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    broken = make_tiny_llama(tmp_path / "tiny")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})

    async def main() -> None:
        async with cluster_of([broken] * 2) as cluster:
            with pytest.raises(
                StageFailed, match=r"node-2 \(blocks 2-3\) failed at micro-batch \d, step 1"
            ) as e:
                await answer(cluster, broken, prompts, tmp_path / "out.jsonl", options())
            assert (e.value.node, e.value.code) == ("node-2", "non_finite")

    run(main)
    assert read_answers(tmp_path / "out.jsonl") == {}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_lost_in_mid_run_is_named_and_a_rerun_does_what_is_missing(
    model: Path, tmp_path: Path, lost: int
) -> None:
    many = [{"prompt": f"some {n}", "max_tokens": 4 + 40 * (n % 2)} for n in range(24)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", many)
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            await answer(cluster, model, prompts, whole, options())
        async with cluster_of([model] * 2, order=random.Random(1)) as cluster:

            @asynccontextmanager
            async def kill_after_some(source: Callable[[], Any]) -> Any:
                async def kill() -> None:
                    await until(lambda: source().done >= 5)
                    await cluster.endpoints[cluster.names[lost]].close()

                task = asyncio.create_task(kill())
                yield
                await task

            with pytest.raises((ConnectionLost, StageFailed), match=cluster.names[lost]) as error:
                await answer(cluster, model, prompts, output, options(), watch=kill_after_some)
            assert "run the same command again" in (error.value.hint or "")
        before = read_answers(output)
        assert 5 <= len(before) < len(many)
        async with cluster_of([model]) as cluster:
            statistics = await answer(cluster, model, prompts, output, options())
            assert statistics.skipped == len(before)
            assert statistics.done == len(many) - len(before)

    run(main)
    texts = {line: record["text"] for line, record in read_answers(output).items()}
    assert texts == {line: record["text"] for line, record in read_answers(whole).items()}


def test_a_node_that_does_not_answer_is_named_with_its_address(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            cluster.peers["node-1"] = replace(cluster.peers["node-1"], address=("memory", 999))
            with pytest.raises(PeerUnreachable, match="node-1"):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", options())

    run(main)


def test_settings_that_do_not_fit_the_model_are_refused(model: Path, prompts: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            for layout in (
                LayoutOptions(split=(1, 2)),
                LayoutOptions(split=(4,)),
                LayoutOptions(batch=2, micro_batches=3),
            ):
                with pytest.raises(ConfigError):
                    await answer(cluster, model, prompts, tmp_path / "o.jsonl", RunOptions(layout=layout))
        async with cluster_of([model] * 5) as cluster:
            with pytest.raises(ConfigError, match="4 blocks do not split over 5 nodes"):
                await answer(cluster, model, prompts, tmp_path / "o.jsonl", options())

    run(main)


def test_while_a_node_loads_it_is_said_what_it_is_at(model: Path, prompts: Path, tmp_path: Path) -> None:
    asked = asyncio.Event()
    heard: list[str] = []

    async def main() -> None:
        async with cluster_of([model]) as cluster:
            node = cluster.nodes["node-1"]
            loop = asyncio.get_running_loop()

            def hear(line: str) -> None:
                heard.append(line)
                if "checking" in line:
                    asked.set()

            class Slow(DiskLoader):
                """A loader whose disk is slow: it goes on once it was asked what it is at."""

                def load(self, plan: PlanHeader, stage: Stage, report: Callable[[str], None]) -> StageWorker:
                    report("checking the weights against the plan")
                    asyncio.run_coroutine_threadsafe(asked.wait(), loop).result()
                    return super().load(plan, stage, report)

            node._loader = Slow(ModelStore({"tiny": model}, tmp_path), CPU, "node-1")
            how = options()
            quick = replace(how, deadlines=replace(how.deadlines, ask=Seconds(0.01)))
            await answer(cluster, model, prompts, tmp_path / "out.jsonl", quick, report=hear)

    run(main)
    assert heard[0] == "node-1 (blocks 0-3): loading"
    assert "node-1 (blocks 0-3): checking the weights against the plan" in heard
