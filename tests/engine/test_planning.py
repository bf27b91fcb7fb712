"""A run that plans by itself: the nodes that answer, the best layout, the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_helpers import (
    COMMAND,
    QUICK,
    Cluster,
    answer,
    cluster_of,
    options,
    read_answers,
    run,
    run_model,
    write_prompts,
)

from bbquic.errors import PeerUnreachable, PlanImpossible
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cost import MemoryOptions
from bbquic.runtime.generate import RunOptions, deployed
from bbquic.runtime.planning import PlanningOptions

RECORDS = [{"prompt": text, "max_tokens": 6} for text in ("one two three", "four", "five six seven eight")]


def planned(search: SearchOptions | None = None) -> RunOptions:
    how = options(kv_tokens=None)
    return RunOptions(
        layout=how.layout,
        prefill_tokens=how.prefill_tokens,
        coordinator=how.coordinator,
        deadlines=how.deadlines,
        planning=PlanningOptions(search or SearchOptions(), survey=QUICK),
    )


def test_a_run_plans_by_itself_and_says_what_it_chose(model: Path, profiles: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", RECORDS)
    said: list[str] = []

    async def main() -> None:
        async with cluster_of([model] * 2, profiles=profiles) as cluster:
            await answer(cluster, model, prompts, tmp_path / "planned.jsonl", planned(), report=said.append)
            await answer(cluster, model, prompts, tmp_path / "plain.jsonl", options())

    run(main)
    assert any(line.startswith("plan: blocks ") for line in said)
    assert any(line.startswith("predicted: ") for line in said)
    with_plan, without = (read_answers(tmp_path / f"{name}.jsonl") for name in ("planned", "plain"))
    assert {line: one["text"] for line, one in with_plan.items()} == {
        line: one["text"] for line, one in without.items()
    }


def test_an_offload_that_is_given_reaches_the_stages(model: Path, profiles: Path) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2, profiles=profiles) as cluster:
            held, nodes = run_model(model), cluster.places()
            memory = MemoryOptions(offload=0.5)
            search = SearchOptions(memory=memory, nodes=("node-1", "node-2"), ordered=True, micro_batches=2)
            async with deployed(
                cluster.endpoints[COMMAND], nodes, held, planned(search), lambda _: None
            ) as ready:
                half = ready.layout.batch // 2
                assert ready.layout.offloaded == (half, half)
                assert [stage.on_host for stage in ready.plan.stages] == [1, 1]
                slot = ready.layout.slot
                assert slot is not None
                assert ready.plan.tiers == (half * slot, half * slot)

    run(main)


def test_a_node_that_does_not_answer_is_done_without(model: Path, profiles: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", RECORDS)
    said: list[str] = []

    async def main() -> None:
        async with cluster_of([model] * 3, profiles=profiles) as cluster:
            await stop(cluster, "node-2")
            await answer(cluster, model, prompts, tmp_path / "out.jsonl", planned(), report=said.append)

    run(main)
    assert any(line.startswith("going on without node-2: ") for line in said)
    assert len(read_answers(tmp_path / "out.jsonl")) == len(RECORDS)


def test_a_node_that_serves_another_job_is_done_without(model: Path, profiles: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", RECORDS)
    said: list[str] = []
    commands = {name: frozenset({"coordinate"}) for name in (COMMAND, "other")}

    async def main() -> None:
        async with cluster_of([model] * 2, profiles=profiles, commands=commands) as cluster:
            held = run_model(model)
            async with deployed(
                cluster.endpoints["other"], cluster.places(["node-1"]), held, options(), lambda _: None
            ):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", planned(), report=said.append)

    run(main)
    assert any(line.startswith("node-1 is left out: it is busy with job ") for line in said)
    assert len(read_answers(tmp_path / "out.jsonl")) == len(RECORDS)


def test_a_file_of_bad_lines_gets_its_error_records_from_a_planned_run_too(
    model: Path, profiles: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 3}\nno JSON\n')

    async def main() -> None:
        async with cluster_of([model] * 2, profiles=profiles) as cluster:
            statistics = await answer(cluster, model, prompts, tmp_path / "out.jsonl", planned())
            assert (statistics.done, statistics.failed) == (0, 2)

    run(main)
    assert all("error" in one for one in read_answers(tmp_path / "out.jsonl").values())


def test_nodes_that_were_named_in_order_are_all_needed(model: Path, profiles: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", RECORDS)
    how = planned(SearchOptions(nodes=("node-1", "node-2"), ordered=True))

    async def main() -> None:
        async with cluster_of([model] * 2, profiles=profiles) as cluster:
            await stop(cluster, "node-2")
            with pytest.raises(PeerUnreachable, match="node-2"):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", how)

    run(main)


def test_what_fits_nowhere_is_refused_with_need_and_have(model: Path, profiles: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", RECORDS)
    how = planned(SearchOptions(memory=MemoryOptions(share=1e-9)))

    async def main() -> None:
        async with cluster_of([model] * 2, profiles=profiles) as cluster:
            with pytest.raises(PlanImpossible, match=r"needs [\d.]+ GB and has [\d.]+ GB") as caught:
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", how)
            assert caught.value.hint is not None

    run(main)
    assert not (tmp_path / "out.jsonl").exists()


async def stop(cluster: Cluster, name: str) -> None:
    """End a node as if its process had ended: nobody answers at its address any more."""
    cluster.tasks[name].cancel()
    await asyncio.wait([cluster.tasks[name]])
    await cluster.endpoints[name].close()
