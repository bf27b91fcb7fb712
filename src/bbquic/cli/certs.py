"""`bbquic certs`: this machine's key. Private keys never travel; what is pasted is a fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bbquic.config import parse_address
from bbquic.errors import ConfigError
from bbquic.transport.identity import RIGHTS, Fingerprint, load_identity, new_identity

app = typer.Typer(help="Make and show this machine's key.", no_args_is_help=True)

KEEP_OUT_OF_GIT = "# Keys stay on the machine that made them.\n*\n!.gitignore\n"

Directory = Annotated[Path, typer.Option("--dir", help="Where keys lie.")]


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="This machine's name: a-z, 0-9 and -.")],
    directory: Directory = Path("certs"),
    address: Annotated[
        str | None, typer.Option(help="host:port where others reach its node; none if it only dials.")
    ] = None,
    may: Annotated[
        list[str] | None, typer.Option(help="A right: coordinate (start jobs). May be repeated.")
    ] = None,
) -> None:
    """Make a key, and print the [[peer]] entry to paste into peers.toml on every machine."""
    if address is not None:
        try:
            parse_address(address)
        except ValueError as error:
            raise ConfigError(f"--address: {error}", hint="--address 203.0.113.7:4433") from None
    rights = sorted(set(may or []))
    if not RIGHTS.issuperset(rights):
        raise ConfigError(f"--may: {rights[0]!r} is no right", hint=f"there is {', '.join(sorted(RIGHTS))}")
    is_fresh = not directory.exists()
    identity = new_identity(name, directory)
    if is_fresh:
        (directory / ".gitignore").write_text(KEEP_OUT_OF_GIT, encoding="utf-8")
    typer.echo(f"wrote {directory / name}.key (keep it here) and {directory / name}.crt", err=True)
    typer.echo("paste this into peers.toml, the same file on every machine:", err=True)
    typer.echo(peer_entry(name, identity.fingerprint, address, rights), nl=False)


@app.command()
def show(directory: Directory = Path("certs")) -> None:
    """Print name and fingerprint of each key here, a line each."""
    paths = sorted(directory.glob("*.key"))
    if not paths:
        raise ConfigError(f"{directory} holds no key", hint="bbquic certs new NAME makes one")
    for path in paths:
        typer.echo(f"{path.stem}\t{load_identity(path).fingerprint}")


def peer_entry(name: str, fingerprint: Fingerprint, address: str | None, may: list[str]) -> str:
    """A machine's entry in peers.toml. Without an address there is a line to fill in."""
    lines = ["[[peer]]", f'name = "{name}"']
    if address is not None:
        lines.append(f'address = "{address}"')
    else:
        lines.append('# address = "host:port"  (where its node is reached; leave out if it only dials)')
    lines.append(f'keys = ["{fingerprint}"]')
    if may:
        lines.append("may = [{}]".format(", ".join(f'"{right}"' for right in may)))
    return "\n".join(lines) + "\n"
