"""The real model over real processes: tokens equal transformers' for each prompt alone.

The default suite runs one of the nine layouts, and one sampled job in two; the others are marked slow (`make
test-slow`). One pass of transformers over prompt and answer checks every token of an answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle

from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache

DATA = Path(__file__).parent.parent / "data"
MODEL = "smollm2-135m"
DEADLINE = 280  # seconds for a run of all prompts
DEFAULT_SUITE = {(3, 2)}
LAYOUTS = [
    pytest.param(nodes, batches, marks=[] if (nodes, batches) in DEFAULT_SUITE else [pytest.mark.slow])
    for nodes in (1, 2, 3)
    for batches in (1, 2, 4)
]

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def generate(prompts: Path, output: Path, nodes: int, micro_batches: int) -> dict[int, dict[str, Any]]:
    """A run of the command; its answers by line."""
    command = (sys.executable, "-m", "bbquic", "generate", prompts, "-o", output, "--nodes", str(nodes))
    done = subprocess.run(
        [*map(str, command), "--microbatches", str(micro_batches), "--dtype", "float32"],
        cwd=output.parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {record["line"]: record for record in read(output)}


@pytest.fixture(scope="module")
def model() -> ModelDirectory:
    return fetch_model(MODEL, user_cache(), print)


@pytest.fixture(scope="module")
def oracle(model: ModelDirectory) -> Oracle:
    return Oracle(model.path)


@pytest.mark.parametrize(("nodes", "micro_batches"), LAYOUTS)
def test_greedy_answers_equal_transformers(
    model: ModelDirectory, oracle: Oracle, tmp_path: Path, nodes: int, micro_batches: int
) -> None:
    prompts = DATA / "prompts.jsonl"
    answers = generate(prompts, tmp_path / "answers.jsonl", nodes, micro_batches)
    for line, record in enumerate(read(prompts), 1):
        oracle.check_answer(record, answers[line])


def test_sampled_answers_are_the_same_in_every_layout(model: ModelDirectory, tmp_path: Path) -> None:
    texts = []
    for nodes, micro_batches in ((1, 1), (3, 4)):
        output = tmp_path / f"{nodes}.jsonl"
        answers = generate(DATA / "sampled.jsonl", output, nodes, micro_batches)
        texts.append({line: record["text"] for line, record in answers.items()})
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_greedy_answers_equal_what_transformers_generates(
    model: ModelDirectory, oracle: Oracle, tmp_path: Path
) -> None:
    prompts = DATA / "prompts.jsonl"
    answers = generate(prompts, tmp_path / "answers.jsonl", 3, 3)
    for line, record in enumerate(read(prompts), 1):
        oracle.check_generated(record, answers[line])


def test_a_node_takes_no_more_than_its_share_and_a_gigabyte(model: ModelDirectory, tmp_path: Path) -> None:
    """Peak memory of the largest process of a run; the node holds every block, and few tokens of KV."""
    script = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'bbquic', 'generate', *sys.argv[1:]], check=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)\n"
    )
    arguments = [DATA / "sampled.jsonl", "-o", tmp_path / "answers.jsonl", "--nodes", "1"]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    weights = 2 * (model.path / "model.safetensors").stat().st_size  # float32, stored in 16 bits
    assert int(done.stdout) <= weights + 1_000_000_000
