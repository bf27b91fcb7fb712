"""Whole runs with the drafters that a command can ask for: the same answers, and what it came to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import answer, cluster_of, options, read_answers, run, write_prompts

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.runtime.drafters import DraftMode, DraftOptions
from bbquic.runtime.layout import CoordinatorPlace
from bbquic.runtime.telemetry import JobStatistics
from tiny_model import first_blocks, make_tiny_llama

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "the of and to in " * 6, "max_tokens": 24},
    {"prompt": "some what there we can ", "max_tokens": 20},
    {"prompt": "which one?", "max_tokens": 18, "temperature": 0.8, "seed": 4},
    {"prompt": "all were your when " * 3, "max_tokens": 16, "temperature": 0.7, "top_p": 0.9, "seed": 9},
]


def drafted(
    model: Path, tmp_path: Path, drafting: DraftOptions, place: CoordinatorPlace = CoordinatorPlace.HERE
) -> tuple[dict[int, str], JobStatistics]:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    output = tmp_path / f"{drafting.mode.value}-{place.value}-{drafting.model is not None}.jsonl"
    statistics: list[JobStatistics] = []
    threads = torch.get_num_threads()

    async def main() -> None:
        how = replace(options(micro_batches=2, coordinator=place), drafting=drafting)
        async with cluster_of([model] * 2) as cluster:
            statistics.append(await answer(cluster, model, prompts, output, how))

    run(main)
    torch.set_num_threads(threads)
    return {line: record["text"] for line, record in read_answers(output).items()}, statistics[0]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    texts, job = drafted(model, tmp_path_factory.mktemp("plain"), DraftOptions())
    assert job.drafts is None
    return texts


@pytest.mark.parametrize("place", [CoordinatorPlace.HERE, CoordinatorPlace.STAGE])
def test_n_grams_change_no_answer_wherever_the_coordinator_is(
    tmp_path: Path, place: CoordinatorPlace
) -> None:
    parrot = make_tiny_llama(tmp_path / "parrot", blocks=2, tied=True)  # it says much again
    texts, job = drafted(parrot, tmp_path, DraftOptions(DraftMode.NGRAM, guesses=4, always=True), place)
    assert texts == drafted(parrot, tmp_path, DraftOptions())[0]
    assert job.finished
    assert job.drafts is not None
    assert job.drafts.guesses > 0
    assert job.drafts.seconds > 0


def test_a_targets_first_blocks_save_passes_and_change_no_answer(
    model: Path, plain: dict[int, str], tmp_path: Path
) -> None:
    small = ModelDirectory(first_blocks(model, tmp_path / "small", 3), "small")
    texts, job = drafted(model, tmp_path, DraftOptions(DraftMode.AUTO, small, guesses=6, always=True))
    assert texts == plain
    assert job.drafts is not None
    assert job.drafts.accepted > 0
    assert (job.drafts.tokens_a_pass or 0) > 1.1
    assert job.drafts.tokens == job.generated_tokens - len(PROMPTS)  # the first of each is its prompt's


def test_a_draft_model_with_another_tokenizer_is_refused_before_any_node_is_asked(
    model: Path, tmp_path: Path
) -> None:
    other = ModelDirectory(make_tiny_llama(tmp_path / "other", vocab=330), "other")
    with pytest.raises(ModelError, match="draft model other has another tokenizer than tiny"):
        drafted(model, tmp_path, DraftOptions(DraftMode.AUTO, other))
