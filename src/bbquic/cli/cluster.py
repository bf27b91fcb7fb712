"""A command's place in the cluster of a peers.toml: who it is, whom it may ask, and an endpoint to do it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bbquic.config import Peers, find_identity, load_peers
from bbquic.errors import ConfigError
from bbquic.transport.channel import Endpoint, Role
from bbquic.transport.identity import Identity, Peer
from bbquic.transport.link_memory import default_path
from bbquic.transport.options import EndpointOptions
from bbquic.transport.threaded import open_endpoint


@dataclass(frozen=True, slots=True)
class Joined:
    """An open endpoint, and the nodes to use in the order they were named in."""

    endpoint: Endpoint
    nodes: tuple[Peer, ...]
    prices: Mapping[str, float]  # dollars an hour, by name
    host: str | None = None  # this machine's address, as the others know it


@asynccontextmanager
async def joined(peers: Path, certs: Path, key: Path | None, names: tuple[str, ...]) -> AsyncIterator[Joined]:
    """The nodes of a cluster that this machine may coordinate; without `names` all that have an address.

    Raises: ConfigError.
    """
    known = load_peers(peers)
    identity, me = find_identity(known, certs, key)
    if "coordinate" not in me.may:
        raise ConfigError(
            f"{me.name} may not coordinate",
            hint=f'add may = ["coordinate"] to {me.name} in {peers}, on every machine',
        )
    wanted = names or tuple(peer.name for peer in known.values() if peer.address is not None)
    nodes = tuple(_node(name, known) for name in wanted)
    if not nodes:
        raise ConfigError(f"{peers} has no peer with an address to run on")
    links = default_path(os.environ, Path.home())
    async with opened(identity, known, "", links) as endpoint:
        yield Joined(endpoint, nodes, known.prices, me.address[0] if me.address else None)


@asynccontextmanager
async def opened(
    identity: Identity, peers: Mapping[str, Peer], host: str, links: Path | None = None
) -> AsyncIterator[Endpoint]:
    """An endpoint on any free port: a command is never dialled. `links` is where rates are remembered."""
    options = EndpointOptions(links=links)
    endpoint = await open_endpoint(identity, peers, Role.COMMAND, host=host, port=0, options=options)
    try:
        yield endpoint
    finally:
        await endpoint.close()


def _node(name: str, known: Peers) -> Peer:
    if name not in known:
        raise ConfigError(f"{known.path} names no peer {name}", hint=f"it has {', '.join(known)}")
    if known[name].address is None:
        raise ConfigError(f"{name} has no address in {known.path}", hint='add address = "host:port"')
    return known[name]
