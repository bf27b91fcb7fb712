"""`bbquic model`: get a model, list those there are, write a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import manifest_of, write_manifest
from bbquic.model.registry import KNOWN, model_path, user_cache

app = typer.Typer(help="Get models, and see which are here.", no_args_is_help=True)


def say(line: str) -> None:
    """Progress, for people: to stderr."""
    typer.echo(line, err=True)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="A known model; `bbquic model list` names them.")],
) -> None:
    """Download a known model, verify it, and convert it into the cache. Prints its directory."""
    directory = fetch_model(name, user_cache(), say)
    typer.echo(directory.path)


@app.command("list")
def list_models() -> None:
    """List the known models: name, where it is in the cache (`-`: not there), what it is."""
    for name, source in sorted(KNOWN.items()):
        path = model_path(name, user_cache())
        typer.echo(f"{name}\t{path if path.is_dir() else '-'}\t{source.about}")


@app.command()
def manifest(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory with weights.")],
) -> None:
    """Write manifest.json beside a model's weights, for machines that hold none. Prints its path."""
    opened = ModelDirectory(directory, directory.resolve().name)
    say("hashing the weights")
    made = manifest_of(opened)
    path = write_manifest(opened, made)
    say(f"the model's digest is {made.digest}; beside manifest.json, a machine without weights needs")
    say("config.json, generation_config.json, tokenizer.json and tokenizer_config.json")
    typer.echo(path)
