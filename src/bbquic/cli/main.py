"""The command line: what there is, and how an error looks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bbquic import __version__
from bbquic.cli import certs, draft, generate, model, node, plan, top
from bbquic.cli.render import print_error
from bbquic.errors import BBQuicError

INTERRUPTED = 130  # 128 + SIGINT, what shells expect

app = typer.Typer(
    name="bbquic",
    help="Run a large language model over a handful of machines that are far apart.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("generate")(generate.generate)
app.command("node")(node.node)
app.command("plan")(plan.plan)
app.command("top")(top.top)
app.add_typer(certs.app, name="certs", help="Make and show this machine's key.")
app.add_typer(model.app, name="model", help="Get and inspect models.")
app.add_typer(draft.app, name="draft", help="Train drafts and pruners for a model.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bbquic {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run a large language model over a handful of machines that are far apart."""


def run() -> None:
    """Entry point: a BBQuicError becomes a sentence, a hint and an exit code; never a traceback."""
    try:
        app()
    except BBQuicError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
