"""A model and a job in the planner's figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bbquic.errors import JobError
from bbquic.kv.slab import bytes_per_cell
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import manifest_of
from bbquic.model.weights import load_tensors, tensors_for
from bbquic.plan.cluster import JobShape
from bbquic.plan.cost import weights_bytes
from bbquic.runtime.job import JobFile
from bbquic.runtime.sizes import job_shape, model_sizes
from bbquic.runtime.source import PromptTokenizer
from tiny_model import make_tiny_llama


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_sizes_are_those_that_its_stages_have(tmp_path: Path, tied: bool, dtype: str) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path, tied=tied, blocks=3), "tiny")
    sizes = model_sizes(directory, manifest_of(directory), dtype)
    kind = getattr(torch, dtype)
    for blocks, embeds, heads in (
        (range(3), True, True),
        (range(1), True, False),
        (range(1, 3), False, True),
    ):
        needed = tensors_for(directory.spec, directory.config, blocks, embeds=embeds, heads=heads)
        tensors = load_tensors(directory, needed, kind, "cpu")
        model = StageModel(
            directory.spec, directory.config, tensors, blocks=blocks, embeds=embeds, heads=heads
        )
        assert weights_bytes(sizes, len(blocks), embeds=embeds, heads=heads) == model.nbytes
    assert sizes.kv_bytes == bytes_per_cell(kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=kind)
    assert (sizes.blocks, sizes.hidden, sizes.intermediate, sizes.vocabulary) == (3, 64, 128, 320)
    assert (sizes.value_bytes, sizes.tied, sizes.name) == (kind.itemsize, tied, "tiny")


def shape_of(job: JobFile, tokenizer: PromptTokenizer, context: int, **more: Any) -> JobShape:
    shape = job_shape(job, tokenizer, context, **more)
    assert shape is not None
    return shape


def test_sizes_are_known_without_loading_torch(tiny: Path) -> None:
    script = (
        "import sys\n"
        "from bbquic.model.directory import ModelDirectory\n"
        "from bbquic.model.manifest import manifest_of\n"
        "from bbquic.runtime import sizes, survey\n"
        "directory = ModelDirectory(__import__('pathlib').Path(sys.argv[1]), 'tiny')\n"
        "assert sizes.model_sizes(directory, manifest_of(directory), 'float32').blocks == 4\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tiny)], check=True, timeout=60)


class Letters:
    """A token a letter, and one more for each turn of a conversation."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Any) -> list[int]:
        return [1] * sum(1 + len(message["content"]) for message in messages)


def job_of(path: Path, records: list[dict[str, Any] | str]) -> JobFile:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines))
    return JobFile(path)


def test_a_job_is_as_many_lines_as_long_as_they_may_become(tmp_path: Path) -> None:
    job = job_of(
        tmp_path / "p.jsonl",
        [
            {"prompt": "x" * 10, "max_tokens": 20},
            {"messages": [{"role": "user", "content": "y" * 29}], "max_tokens": 40},
            {"prompt": "x" * 60, "max_tokens": 500},  # the context holds 100
            {"prompt": "x" * 100},  # no room for an answer
            "no JSON",
        ],
    )
    shape = shape_of(job, Letters(), 100)
    assert (shape.sequences, shape.prompt, shape.output, shape.longest) == (5, 100 / 3, 100 / 3, 40)
    assert shape.slot == 112  # 60 + 40, up to the next 16


def test_slots_are_for_nine_lines_in_ten(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [{"prompt": "x" * 8, "max_tokens": 8}] * 95
    job = job_of(tmp_path / "p.jsonl", [*lines, *[{"prompt": "x" * 800, "max_tokens": 8}] * 5])
    assert shape_of(job, Letters(), 1000).slot == 16


def test_answers_that_are_there_already_say_how_long_they_are(tmp_path: Path) -> None:
    job = job_of(tmp_path / "p.jsonl", [{"prompt": "abc", "max_tokens": 64}] * 10)
    answers = tmp_path / "a.jsonl"
    assert shape_of(job, Letters(), 1000, answers=answers).output == 64
    records = [{"completion_tokens": 10}, {"completion_tokens": 14}, {"error": {"code": "x"}}]
    answers.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"id": "torn')
    shape = shape_of(job, Letters(), 1000, answers=answers)
    assert (shape.sequences, shape.output, shape.longest) == (7, 12.0, 64.0)
    answers.write_text('{"completion_tokens": 9000}\n' * 10)
    shape = shape_of(job, Letters(), 1000, answers=answers)
    assert (shape.sequences, shape.output) == (1, 64.0)  # done; and no answer is longer than may be


def test_a_sample_is_spread_over_the_file(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [{"prompt": "x", "max_tokens": number} for number in range(1, 1001)]
    job = job_of(tmp_path / "p.jsonl", lines)
    records = job.sample(100)
    assert len(records) == 100
    assert [record.line for record in records] == list(range(10, 1001, 10))
    assert len(job.sample(1000)) == len(job.sample(5000)) == 1000
    assert shape_of(job, Letters(), 10_000, sample=100).output == pytest.approx(505)


def test_a_job_without_a_line_to_answer_has_no_shape(tmp_path: Path) -> None:
    for records in ([], ["no JSON"]):
        assert job_shape(job_of(tmp_path / "p.jsonl", list(records)), Letters(), 100) is None
    with pytest.raises(JobError, match="cannot read"):
        job_shape(JobFile(tmp_path / "missing"), Letters(), 100)


def test_what_prompts_begin_with_in_common_counts_once(tmp_path: Path) -> None:
    """Ten share 60 tokens, the last is the same as the first but for its last token."""
    lines: list[dict[str, Any] | str] = [{"prompt": "s" * 60 + chr(97 + n) * 20} for n in range(10)]
    lines += [{"prompt": "s" * 60 + "a" * 20}, {"prompt": "t" * 31}, {"prompt": "t" * 31}]
    shape = shape_of(job_of(tmp_path / "p.jsonl", lines), Letters(), 1000)
    assert shape.shared == pytest.approx((9 * 60 + 79) / 13)
    assert shape.read == pytest.approx((80 + 9 * 20 + 1 + 2 * 31) / 13)
