"""Memory that is not there: said before a stage loads, and in mid-run the matter of single lines."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_helpers import CPU, answer, cluster_of, options, read_answers, run, run_model, write_prompts

from bbquic.errors import PlanRefused
from bbquic.kv.regions import Moving
from bbquic.plan.cost import MemoryOptions
from bbquic.runtime.layout import CoordinatorPlace, LayoutOptions, for_stage, make_plan
from bbquic.runtime.loading import DiskLoader, ModelStore
from bbquic.runtime.machine import Machine
from bbquic.runtime.memory import host_memory_free
from bbquic.runtime.placement import PLAIN, Placement
from bbquic.runtime.protocol import DescriptionHeader, PackHeader, PlanHeader, Stage
from bbquic.runtime.stage import Computed, ModelWorker, Output, Staged, StageWorker
from bbquic.units import Bytes
from tiny_model import make_tiny_llama

MB = 10**6
HERE = Path(__file__).parent
DEADLINE = 120.0  # seconds


def test_a_chunk_for_which_memory_is_missing_in_mid_run_costs_at_most_its_own_line(tmp_path: Path) -> None:
    """Read again by itself in smaller chunks, the long line is answered as ever, or has an error record with
    the figures; the others are answered as ever."""
    model = make_tiny_llama(tmp_path / "tiny", blocks=2, context=2048, intermediate=32_768)
    more = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "starved.py"), str(model)],
        env={**os.environ, **more, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found is None:
        pytest.skip("this system does not keep RLIMIT_AS")
    texts = found["free"]["texts"]
    assert len(texts) == 13
    assert not found["free"]["errors"]
    smaller, none = found["smaller"], found["none"]
    assert smaller["texts"] == texts
    assert any("ran out of memory at micro-batch 0, step" in one for one in smaller["decisions"])
    assert none["texts"] == {line: text for line, text in texts.items() if line != "6"}
    code, message = none["errors"]["6"]
    assert code == "out_of_memory"
    assert "node-1 (blocks 0-0) failed at micro-batch 0, step" in message
    assert "you tried to allocate" in message
    assert "are free there" in message


class Failing(ModelWorker):
    """A real stage whose machine has no memory now and then, in each part of its work."""

    def __init__(self, worker: ModelWorker) -> None:
        self.__dict__ |= worker.__dict__
        self.calls: Counter[str] = Counter()

    def _may_fail(self, part: str) -> None:
        """Once in 29 packs, each stage and part at another one."""
        self.calls[part] += 1
        if self.calls[part] % 29 == {"in": 3, "compute": 12, "out": 21}[part] + self.stage.first:
            torch.empty(2**60, dtype=torch.uint8)

    def stage_in(self, pack: PackHeader, body: bytes | memoryview, placement: Placement = PLAIN) -> Staged:
        self._may_fail("in")
        return super().stage_in(pack, body, placement)

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[Moving, ...] = ()) -> Computed:
        computed = super().compute(pack, staged, copies)
        self._may_fail("compute")
        return computed

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output:
        self._may_fail("out")
        return super().stage_out(pack, computed)


@pytest.mark.parametrize("place", list(CoordinatorPlace)[1:])
def test_whichever_stage_runs_out_of_memory_and_when_answers_are_right_or_say_so(
    model: Path, tmp_path: Path, place: CoordinatorPlace
) -> None:
    records = [{"prompt": f"the of {n} " + "and " * (n % 9), "max_tokens": 24} for n in range(16)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", records)
    workers: list[Failing] = []
    seen: list[str] = []

    class Loader(DiskLoader):
        def load(self, plan: PlanHeader, stage: Stage, report: Callable[[str], None]) -> StageWorker:
            worker = super().load(plan, stage, report)
            assert isinstance(worker, ModelWorker)
            workers.append(Failing(worker))
            return workers[-1]

    async def main() -> None:
        how = options(micro_batches=2, coordinator=place)
        async with cluster_of([model] * 3, order=random.Random(3)) as cluster:
            await answer(cluster, model, prompts, tmp_path / "whole.jsonl", how)
            for name, node in cluster.nodes.items():
                node._loader = Loader(ModelStore({"tiny": model}, tmp_path), CPU, name)
            statistics = await answer(cluster, model, prompts, tmp_path / "out.jsonl", how)
            seen.extend(statistics.decisions)
            assert statistics.done + statistics.failed == len(records)

    run(main)
    whole, found = read_answers(tmp_path / "whole.jsonl"), read_answers(tmp_path / "out.jsonl")
    assert found.keys() == whole.keys()
    for line, record in found.items():
        if "error" not in record:
            assert record["text"] == whole[line]["text"]
        else:
            assert record["error"]["code"] == "out_of_memory"
            assert re.match(r"node-[123] \(blocks .*you tried to allocate", record["error"]["message"])
    assert all(min(one.calls.values()) >= 29 for one in workers), "each stage failed in each part"
    assert any(re.match(r"node-[123] ran out of memory at micro-batch [01], step \d+; ", one) for one in seen)


def plan_of(model: Path, *, free: int, beside: int = 0, kv_tokens: int, offload: float = 0.0) -> PlanHeader:
    """For a node that says of itself that it has so much."""
    held = run_model(model)
    node = DescriptionHeader("node-1", "CPU", free, 1, ("float32",), None, beside)
    layout = LayoutOptions(
        batch=8, micro_batches=2, kv_tokens=kv_tokens, memory=MemoryOptions(offload=offload, pack_tokens=64)
    )
    plan = make_plan("0" * 16, held.directory, held.manifest, [node], layout)
    return for_stage(plan, plan.stages[0], held.directory)


def hinted(refused: pytest.ExceptionInfo[PlanRefused]) -> int:
    found = re.search(r"--kv-tokens (\d+) or less", refused.value.hint or "")
    assert found is not None, refused.value.hint
    return int(found[1])


@pytest.mark.parametrize("limit", [3 * MB, 4 * MB, 9 * MB])
@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_a_node_that_lacks_memory_refuses_before_it_loads_and_what_it_names_instead_works(
    model: Path, tmp_path: Path, limit: int, offload: float
) -> None:
    machine = Machine(torch.device("cpu"), 1, Bytes(limit), Bytes(limit // 2) if offload else None)
    loader = DiskLoader(ModelStore({"tiny": model}, tmp_path), machine, "node-1")
    said: list[str] = []
    plan = plan_of(model, free=10**10, beside=10**10, kv_tokens=32_000, offload=offload)
    need = r"need 3[34]\.\d+ MB" if not offload else r"need \d+\.\d+ MB"
    free = f"of its {limit / 1e6:.2f} MB free"
    parts = r"\(weights 0\.76 MB, KV [\d.]+ MB, workspace [\d.]+ MB, buffers [\d.]+ MB\)"
    with pytest.raises(PlanRefused, match=rf"node-1 \(blocks 0-3\): .* {need}, {free} {parts}") as refused:
        loader.load(plan, plan.stages[0], said.append)
    assert "loading the weights" not in said
    assert ("offloaded KV needs" in refused.value.message) == bool(offload)
    beside = limit // 2 if offload else 0
    plan = plan_of(model, free=limit, beside=beside, kv_tokens=hinted(refused), offload=offload)
    assert plan.cells > hinted(refused) - 2 * 8 * 16, "the hint is what is planned then, to whole slots"
    assert loader.load(plan, plan.stages[0], said.append).arena_bytes > 0


def test_weights_are_kept_for_a_plan_that_has_the_kv_elsewhere(model: Path, tmp_path: Path) -> None:
    machine = Machine(torch.device("cpu"), 1, Bytes(50 * MB), Bytes(50 * MB))
    loader = DiskLoader(ModelStore({"tiny": model}, tmp_path), machine, "node-1")
    said: list[str] = []
    for offload in (0.0, 0.5, 0.0):
        plan = plan_of(model, free=10**10, beside=10**10, kv_tokens=1024, offload=offload)
        assert plan.stages[0].on_host == (offload > 0)
        loader.load(plan, plan.stages[0], said.append)
    assert said.count("loading the weights") == 1


@pytest.mark.parametrize("knows", [True, False])
def test_the_setting_that_a_refusal_names_is_taken_by_the_same_command(
    model: Path, prompts: Path, tmp_path: Path, knows: bool
) -> None:
    """Refused by whoever plans; or by the node, where memory went away after it said what is free."""
    small = Machine(torch.device("cpu"), 1, Bytes(8 * MB))

    async def main() -> None:
        async with cluster_of([model]) as cluster:
            node = cluster.nodes["node-1"]
            node._loader = DiskLoader(ModelStore({"tiny": model}, tmp_path), small, "node-1")
            node._machine = small if knows else CPU
            with pytest.raises(PlanRefused, match="node-1 cannot hold node-1") as refused:
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", options(kv_tokens=60_000))
            node._machine = small
            fits = hinted(refused)
            with pytest.raises(PlanRefused, match="cannot hold"):
                await answer(cluster, model, prompts, tmp_path / "out.jsonl", options(kv_tokens=fits + 1))
            await answer(cluster, model, prompts, tmp_path / "out.jsonl", options(kv_tokens=fits))

    run(main)
    assert len(read_answers(tmp_path / "out.jsonl")) == 6


@pytest.mark.parametrize(("kind", "place"), [(resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)])
def test_what_is_free_is_within_the_limits_of_the_process(kind: int, place: int) -> None:
    has = int(Path("/proc/self/statm").read_text().split()[place]) * resource.getpagesize()
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (has + 100 * MB, hard))
    try:
        assert 0 < host_memory_free() <= 100 * MB
    finally:
        resource.setrlimit(kind, (soft, hard))
