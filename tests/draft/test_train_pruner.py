"""From prompts to a pruner: what is observed is what the model computes, and what is learnt is of use."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from bbquic.cli.main import app
from bbquic.draft.make_pruner import OBSERVED, MakeOptions, make_pruner
from bbquic.draft.observe import Observed, Observer
from bbquic.draft.pruner_file import NAME, PrunerFile
from bbquic.draft.train_pruner import TrainOptions
from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import manifest_of
from tiny_model import make_tiny_llama

QUICK = MakeOptions((1, 3), 24, 16, TrainOptions(rank=32, common=160, steps=60, batch=128, held_out=0.2))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """A tiny model whose head is its embedding."""
    return ModelDirectory(make_tiny_llama(tmp_path_factory.mktemp("tied") / "tiny", tied=True), "tiny")


def prompts(count: int) -> list[list[int]]:
    drawn = random.Random(3)
    return [[drawn.randrange(3, 300) for _ in range(drawn.randint(1, 20))] for _ in range(count)]


def test_what_is_observed_is_what_the_model_computes(directory: ModelDirectory, tmp_path: Path) -> None:
    asked = [*prompts(3), [5] * 70]
    observer = Observer(directory, [1, 3])
    seen = observer.answers(asked, 9)
    model = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32).eval()
    for row, prompt in enumerate(asked):
        mine = seen.sequence == row
        written = seen.tokens[mine & seen.is_answer].tolist()
        noted = seen.tokens[mine].tolist()
        assert noted == [*prompt, *written][-len(noted) :], "the end of the prompt, and the answer"
        assert len(noted) == min(len(prompt), 64) + len(written)
        with torch.inference_mode():
            said = model(torch.tensor([[*prompt, *written]]), output_hidden_states=True)
        logits = said.logits[0, -len(noted) :]
        assert torch.equal(seen.likeliest[mine][:, 0].long(), logits.argmax(-1))
        chances = logits.softmax(-1).gather(1, seen.likeliest[mine].long())
        assert torch.allclose(seen.chances[mine].float(), chances, atol=2e-3)
        assert written == logits.argmax(-1)[len(noted) - len(written) - 1 : -1].tolist()
        for depth in (1, 3):
            state = said.hidden_states[depth][0, -len(noted) :]
            state = state / state.pow(2).mean(-1, keepdim=True).sqrt()
            assert torch.allclose(seen.hidden[depth][mine].float(), state, atol=0.01)
    seen.write(tmp_path / "seen")
    again = Observed.read(tmp_path / "seen", [3])
    assert torch.equal(again.hidden[3], seen.hidden[3])
    both = Observed.together([again, again])
    assert len(both) == 2 * len(seen)
    assert int(both.sequence.max()) == 7
    with pytest.raises(ValueError, match="behind 1 to 3 blocks"):
        Observer(directory, [4])


def test_a_trained_pruner_knows_more_than_how_common_tokens_are_and_is_the_same_each_time(
    directory: ModelDirectory, tmp_path: Path
) -> None:
    manifest, said = manifest_of(directory), list[str]()
    how = (directory, manifest, prompts(40), tmp_path, QUICK, lambda what, done, of: said.append(what))
    file, scores = make_pruner(*how)
    assert (file.depths, file.model) == ((1, 3), manifest.digest)
    seen = [Observed.read(path, [1]) for path in (tmp_path / OBSERVED).iterdir()]
    first = torch.cat([one.likeliest[:, 0] for one in seen])
    commonest = float((first == first.mode().values).float().mean())
    assert scores[3].agreement > max(2 * commonest, scores[1].agreement)
    for score in scores.values():
        assert score.right > 1.5 * score.wrong
    written = load_file(file.path)
    times = [one.stat().st_mtime_ns for one in (tmp_path / OBSERVED).iterdir()]
    again, _ = make_pruner(*how)
    assert all(torch.equal(tensor, written.pop(name)) for name, tensor in load_file(again.path).items())
    assert not written
    assert times == [one.stat().st_mtime_ns for one in (tmp_path / OBSERVED).iterdir()], (
        "nothing is looked at again"
    )
    assert said[0] == "answering prompts"
    with pytest.raises(ModelError, match="has 1 to 3 blocks"):
        make_pruner(*how[:4], replace(QUICK, depths=(4,)), how[5])
    with pytest.raises(ModelError, match="too few to train on"):
        make_pruner(directory, manifest, [[5]], tmp_path, QUICK, how[5])


def test_the_command_trains_one_and_says_what_it_is_worth(directory: ModelDirectory, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "the of and {n}"}}\n' for n in range(6)))
    flags = (
        f"--data {data} -o {tmp_path / 'out'} --model {directory.path} --first-blocks 2 --answer 4 --rank 8"
    )
    done = CliRunner().invoke(app, ["draft", "train-pruner", *flags.split(), "--steps", "2"])
    assert done.exit_code == 0, done.output
    path = tmp_path / "out" / NAME
    assert done.stdout.strip() == str(path)
    assert "behind 2 blocks: KL " in done.stderr
    assert PrunerFile.open(path).depths == (2,)
    data.write_text("{}\n")
    wrong = CliRunner().invoke(app, ["draft", "train-pruner", *flags.split()])
    assert "line 1" in str(wrong.exception)
