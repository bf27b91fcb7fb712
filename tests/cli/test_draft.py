from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bbquic.cli.draft import app, progress_line
from bbquic.cli.main import app as main
from bbquic.draft.distill.distillation import Progress
from bbquic.draft.distill.objective import Score
from bbquic.draft.distilled import read_distilled
from bbquic.errors import ConfigError
from bbquic.model.directory import ModelDirectory
from tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("distil")
    make_tiny_llama(folder / "target", tied=True)
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"the {n}"}) + "\n" for n in range(40)))
    return ["--model", str(folder / "target"), "--data", str(folder / "p.jsonl"), "--answer", "8"]


def test_distill_prints_the_draft_s_directory_and_says_how_good_it_is(
    command: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "draft"
    options = ["-o", str(output), "--epochs", "1", "--threads", "1", "--blocks", "0,3", "--dtype", "bfloat16"]
    done = CliRunner().invoke(main, ["draft", "distill", *command, *options])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{output}\n"
    assert "5 of 5 steps" in done.stderr
    assert "tokens a pass of three" in done.stderr
    made = read_distilled(ModelDirectory(output, "draft"))
    assert made is not None
    assert (made.target, made.blocks, made.made["step"]) == ("target", (0, 3), 5)
    assert (tmp_path / "draft.work" / "state.json").is_file()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--dtype", "int4"], "--dtype is float32 or bfloat16"),
        (["--blocks", "0,x"], "--blocks is numbers"),
        (["--blocks", "0,4"], "has blocks 0 to 3"),
    ],
)
def test_what_cannot_be_is_refused(command: list[str], tmp_path: Path, options: list[str], why: str) -> None:
    done = CliRunner().invoke(
        app, ["distill", *command, "-o", str(tmp_path / "d"), "--threads", "1", *options]
    )
    assert isinstance(done.exception, ConfigError)
    assert why in str(done.exception)


def test_a_line_says_how_far_it_is_and_how_good() -> None:
    assert progress_line(Progress(done=3, total=40)) == "3 of 40 passages answered or read"
    score = Score(first=0.5, first_four=0.754, chain_of_three=1.5, tokens=9)
    now = Progress(trains=True, done=5, total=1205, rate=10, loss=1.25, score=score)
    assert progress_line(now) == (
        "5 of 1,205 steps, 2 min 00 s left, loss 1.250, "
        "held out: 50 % first, 75 % of the first four, 1.50 tokens a pass of three"
    )
