"""`bbquic draft train-pruner`: what decides which guesses are worth a trip over the network."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bbquic.cli.generate import DEFAULT_MODEL, open_model
from bbquic.errors import ConfigError, JobError, RecordError
from bbquic.model.tokenizer import Tokenizer
from bbquic.runtime.job import JobFile
from bbquic.runtime.record import Record
from bbquic.units import Seconds

if TYPE_CHECKING:
    from bbquic.draft.train_pruner import Progress

INTERVAL = Seconds(10.0)  # between lines where there is no terminal
LONGEST = 512  # tokens of a prompt that is answered


def train_pruner(
    data: Annotated[Path, typer.Option(help="A JSON Lines file of prompts, as for `bbquic generate`.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A folder; pruner.safetensors is put there.")
    ],
    model: Annotated[str, typer.Option(help="A known model's name, or a directory.")] = DEFAULT_MODEL,
    first_blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Blocks of a first stage that it is for; may be repeated. Default: each."),
    ] = None,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer that is looked into.")] = 128,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the proxy heads.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training for each first stage.")] = 150,
    top: Annotated[
        int, typer.Option(min=1, max=128, help="A guess is right among so many of the likeliest tokens.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train the first stage's pruner for a model, on its own answers to prompts.

    Then `bbquic generate --pruner FOLDER/pruner.safetensors`, or put the file into the model's directory. Run
    it again after an interruption: what was answered is not answered again.
    """
    held = open_model(model)
    prompts = _prompts(data, held.directory.tokenizer)
    # torch and transformers take seconds to import: only once everything said on the command line is right
    from bbquic.draft.make_pruner import OBSERVED, MakeOptions, make_pruner
    from bbquic.draft.train_pruner import TrainOptions

    options = MakeOptions(
        tuple(sorted(set(first_blocks or ()))),
        answer,
        train=TrainOptions(rank=rank, steps=steps, top=top, seed=seed),
    )
    progress = _progress()
    try:
        output.mkdir(parents=True, exist_ok=True)
        file, scores = make_pruner(held.directory, held.manifest, prompts, output, options, progress)
    except OSError as error:
        raise ConfigError(f"cannot write to {output}: {error.strerror or error}") from error
    progress("done", 1, 1)
    for depth, score in scores.items():
        typer.echo(
            f"behind {depth} blocks: KL {score.divergence:.2f} nats, likeliest token agrees "
            f"{score.agreement:.0%}; right guesses stay {score.right:.0%}, others {score.wrong:.0%}",
            err=True,
        )
    size = file.path.stat().st_size
    typer.echo(
        f"{size:,} bytes, threshold {file.threshold:.3g}; {output / OBSERVED} may be deleted", err=True
    )
    typer.echo(file.path)


def _prompts(data: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Every prompt's tokens; too long ones are left out. Raises: JobError for a line that is none."""
    found: list[list[int]] = []
    for record in JobFile(data):
        if not isinstance(record, Record):
            raise JobError(f"{data}, line {record.line}: {record.message}")
        try:
            chat = record.messages
            tokens = (
                tokenizer.encode(record.prompt or "")
                if chat is None
                else tokenizer.encode_chat([asdict(message) for message in chat])
            )
        except RecordError as error:
            raise JobError(f"{data}, line {record.line}: {error.message}") from error
        found += [tokens] if 0 < len(tokens) <= LONGEST else []
    return found


def _progress() -> Progress:
    """Says how far it is: on a terminal in one line that changes, else now and then."""
    began, said, is_terminal = time.monotonic(), [-INTERVAL], sys.stderr.isatty()

    def say(what: str, done: int, of: int) -> None:
        now = time.monotonic() - began
        if not is_terminal and now - said[0] < INTERVAL and done < of:
            return
        said[0] = Seconds(now)
        line = f"{what}: {done:,} of {of:,}, {now:.0f} s"
        typer.echo(f"\r\x1b[K{line}" if is_terminal else line, err=True, nl=not is_terminal or done == of)

    return say
