"""`bbquic draft`: make what guesses ahead for a model."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bbquic.cli.figures import duration, share
from bbquic.cli.pruner import train_pruner
from bbquic.cli.render import make_lines_view, print_note, showing
from bbquic.errors import ConfigError
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import ModelMissing, resolve_model, user_cache

if TYPE_CHECKING:  # torch takes seconds, and `--help` none
    from bbquic.draft.distill.distillation import Distillation, Progress

INTERRUPTED = 130
DTYPES = ("float32", "bfloat16")

app = typer.Typer(help="Make what guesses ahead for a model.", no_args_is_help=True)
app.command("train-pruner")(train_pruner)


@app.command()
def distill(
    data: Annotated[Path, typer.Option(help="JSON lines with prompt, messages or text.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The draft's directory.")],
    model: Annotated[str, typer.Option(help="The target: a known model or a directory.")] = "smollm2-135m",
    blocks: Annotated[
        str | None, typer.Option(help="Of the target, to begin with, as 0,1,2,29.", show_default=False)
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each line is learnt from.")] = 6,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 160,
    rate: Annotated[float, typer.Option(min=1e-7, help="Learning rate at its highest.")] = 6e-4,
    dtype: Annotated[
        str, typer.Option(help="Of matrix products: bfloat16 is faster where the CPU has it.")
    ] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of torch; all cores.", show_default=False)
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Lessons and checkpoint; DIR.work.", show_default=False)
    ] = None,
) -> None:
    """Distil a tiny draft model from a target, for `generate --draft-model`. The same command goes on after
    an interruption. Prints the draft's directory."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {' or '.join(DTYPES)}, not {dtype!r}")
    try:
        target = resolve_model(model, user_cache())
    except ModelMissing as missing:
        target = fetch_model(missing.name, user_cache(), print_note)
    import torch

    from bbquic.draft.distill.distillation import Distillation, DistillOptions
    from bbquic.draft.distill.lessons import LessonOptions
    from bbquic.draft.distill.trainer import TrainingOptions

    chosen = getattr(torch, dtype)
    options = DistillOptions(
        blocks=() if blocks is None else _blocks(blocks),
        threads=threads or len(os.sched_getaffinity(0)),
        lessons=LessonOptions(answer=answer, dtype=chosen),
        training=TrainingOptions(epochs=epochs, rate=rate, dtype=chosen),
    )
    beside = work or output.with_name(f"{output.name}.work")
    done = asyncio.run(_run(Distillation(target, data, output, beside, options)))
    print_note(progress_line(done))
    if not done.is_done:
        print_note("interrupted; the same command goes on")
        raise typer.Exit(INTERRUPTED)
    typer.echo(output)


async def _run(distillation: Distillation) -> Progress:
    """In a thread, shown meanwhile; SIGINT and SIGTERM end it with a checkpoint."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, distillation.stop)
    view = make_lines_view(lambda: [progress_line(distillation.progress)])
    async with showing(view):
        return await asyncio.to_thread(distillation.run)


def progress_line(now: Progress) -> str:
    """How far it is, in a line."""
    unit = "steps" if now.trains else "passages answered or read"
    parts = [f"{now.done:,} of {now.total:,} {unit}"]
    if now.left is not None and now.done < now.total:
        parts.append(f"{duration(now.left)} left")
    if now.loss is not None:
        parts.append(f"loss {now.loss:.3f}")
    if now.score is not None:
        parts.append(
            f"held out: {share(now.score.first)} first, {share(now.score.first_four)} of the first four, "
            f"{now.score.chain_of_three:.2f} tokens a pass of three"
        )
    return ", ".join(parts)


def _blocks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--blocks is numbers with commas, not {text!r}") from None
