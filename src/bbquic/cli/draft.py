"""`bbquic draft`: make what guesses, and what judges guesses, for a model."""

from __future__ import annotations

import typer

from bbquic.cli.pruner import train_pruner

app = typer.Typer(help="Train drafts and pruners for a model.", no_args_is_help=True)
app.command("train-pruner")(train_pruner)
