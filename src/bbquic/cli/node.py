"""`bbquic node`: serve stages for the peers in peers.toml."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bbquic.cli.sizes import parse_bytes
from bbquic.config import Peers, find_identity, load_peers
from bbquic.errors import ConfigError
from bbquic.model.registry import user_cache
from bbquic.transport.channel import Role
from bbquic.transport.identity import Identity, Peer
from bbquic.transport.link_memory import default_path
from bbquic.transport.options import EndpointOptions
from bbquic.transport.threaded import open_endpoint
from bbquic.transport.turns import take_short_turns

if TYPE_CHECKING:
    from bbquic.runtime.loading import DiskLoader
    from bbquic.runtime.machine import Machine

ANY_HOST = ""  # all addresses of the machine


def node(
    peers: Annotated[Path, typer.Option(help="The cluster's peers.toml, the same on every machine.")],
    certs: Annotated[Path, typer.Option(help="Where this machine's key lies.")] = Path("certs"),
    key: Annotated[Path | None, typer.Option(help="Which key, where several here are pinned.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A directory with a model to serve; may be repeated.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Address to bind, host:port. Default: the port in peers.toml.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the best there is.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for compute.")] = None,
    memory: Annotated[str | None, typer.Option(help="Use at most so much, such as 8G.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory for KV of offloaded slots, beside --memory.")
    ] = None,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve a stage of a model to the peers in peers.toml that may coordinate."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("quic").setLevel(logging.WARNING)
    cluster = load_peers(peers)
    identity, me = find_identity(cluster, certs, key)
    sock = socket.socket(fileno=listen_fd) if listen_fd is not None else None
    limit = parse_bytes(memory) if memory is not None else None
    host_limit = parse_bytes(host_memory) if host_memory is not None else None
    # A thread that spins while it waits for another one costs more than a context switch as soon as
    # anything else runs on the machine: with a busy core out of two, 15 times (libgomp, measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torch and transformers take seconds to import: only once everything said on the command line is right
    from bbquic.runtime.loading import DiskLoader, ModelStore
    from bbquic.runtime.machine import open_machine

    machine = open_machine(device, threads, limit, host_limit)
    loader = DiskLoader(ModelStore(_directories(model or []), user_cache()), machine, me.name)
    take_short_turns()
    with suppress(KeyboardInterrupt):
        asyncio.run(
            _serve(cluster, identity, me, loader, machine, _bind(listen, me), sock, until_stdin_closes)
        )


def _directories(paths: list[str]) -> dict[str, Path]:
    """Models by the names peers know them by: their directories' names."""
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is not a model directory: it has no config.json")
        name = path.resolve().name
        if name in found:
            raise ConfigError(f"two models are named {name}: {found[name]} and {path}")
        found[name] = path
    return found


def _bind(listen: str | None, me: Peer) -> tuple[str, int]:
    """Where to listen: as told, else on all addresses at the port that the others know."""
    from bbquic.config import parse_address

    if listen is not None:
        try:
            return parse_address(listen)
        except ValueError as error:
            raise ConfigError(str(error), hint="--listen 0.0.0.0:4433") from None
    if me.address is None:
        raise ConfigError(
            f"{me.name} has no address in peers.toml, so nobody could reach this node",
            hint=f'add address = "host:port" to {me.name}, or say --listen host:port',
        )
    return ANY_HOST, me.address[1]


async def _serve(
    cluster: Peers,
    identity: Identity,
    me: Peer,
    loader: DiskLoader,
    machine: Machine,
    bind: tuple[str, int],
    sock: socket.socket | None,
    until_stdin_closes: bool,
) -> None:
    from bbquic.runtime.measure import Profiler
    from bbquic.runtime.node import Node
    from bbquic.runtime.profile_cache import ProfileCache

    # nodes of one command have keys that are thrown away, and no link worth remembering
    options = EndpointOptions(links=None if sock else default_path(os.environ, Path.home()))
    endpoint = await open_endpoint(
        identity, cluster, Role.NODE, host=bind[0], port=bind[1], sock=sock, options=options
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), stop.set)
    profiler = Profiler(machine, ProfileCache(user_cache() / "profiles"))
    serving = Node(endpoint, me, dict(cluster), loader, machine, profiler)
    task = asyncio.create_task(serving.serve(), name="node")
    waiter = asyncio.create_task(stop.wait(), name="stop")
    host, port = endpoint.address
    print(f"{me.name} listens on {_shown(host)}:{port}/udp, key {identity.fingerprint}", flush=True)
    print(f"{me.name} computes on {machine.device_name}, {_free(machine)}", flush=True)
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, waiter):
            one.cancel()
        await asyncio.wait([task, waiter])
        await endpoint.close()
    if not task.cancelled():
        task.result()


def _free(machine: Machine) -> str:
    beside = f", {machine.host_memory_free() / 1e9:.1f} GB for offloaded KV" if machine.offloads else ""
    return f"{machine.memory_free() / 1e9:.1f} GB free{beside}"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
