"""`bbquic top`: what the nodes of a cluster are at, whoever drives them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from bbquic.cli.draw_cluster import limit_lines, snapshot_lines
from bbquic.cli.render import make_cluster_view, print_note, showing
from bbquic.config import find_identity, load_peers
from bbquic.errors import ConfigError
from bbquic.runtime.watch import ClusterWatch, watching
from bbquic.transport.channel import Role
from bbquic.transport.link_memory import default_path
from bbquic.transport.options import EndpointOptions
from bbquic.transport.threaded import open_endpoint

PARTIAL = 3  # exit code of --once: some nodes did not answer
SNAPSHOT_ANSWERS = 2  # of each node: two reports make a difference, from which rates come


def top(
    peers: Annotated[Path, typer.Option(help="The cluster's peers.toml.")] = Path("peers.toml"),
    certs: Annotated[Path, typer.Option(help="Where this machine's key lies.")] = Path("certs"),
    key: Annotated[Path | None, typer.Option(help="Which key, where several here are pinned.")] = None,
    once: Annotated[
        bool, typer.Option(help="Print one snapshot, fields between tabs, and end; 3 if a node is down.")
    ] = False,
) -> None:
    """Watch every node of a cluster: what it computes, how busy it is, its hop and its clock."""
    whole = asyncio.run(_run(peers, certs, key, once=once))
    if not whole:
        raise typer.Exit(PARTIAL)


async def _run(path: Path, certs: Path, key: Path | None, *, once: bool) -> bool:
    """Whether all nodes answered, as far as that matters."""
    known = load_peers(path)
    identity, _ = find_identity(known, certs, key)
    nodes = [peer for peer in known.values() if peer.address is not None]
    if not nodes:
        raise ConfigError(f"{path} has no peer with an address to ask")
    options = EndpointOptions(links=default_path(os.environ, Path.home()))
    endpoint = await open_endpoint(identity, known, Role.COMMAND, host="", port=0, options=options)
    try:
        watch = ClusterWatch(endpoint, nodes)
        async with watching(watch):
            if once:
                return await _print_once(watch)
            await _show(watch)
            return True
    finally:
        await endpoint.close()


async def _print_once(watch: ClusterWatch) -> bool:
    await watch.wait_answers(SNAPSHOT_ANSWERS)
    cluster = watch.snapshot()
    for line in snapshot_lines(cluster):
        typer.echo(line)
    for line in limit_lines(cluster):
        print_note(f"limit of {line}")
    return all(node.trouble is None for node in cluster.nodes)


async def _show(watch: ClusterWatch) -> None:
    """Until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with showing(make_cluster_view(watch.snapshot)):
        await stop.wait()
