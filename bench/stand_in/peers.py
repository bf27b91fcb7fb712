"""Who is who in a replay: keys in a folder, addresses from the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bbquic.transport.identity import Peer, load_identity

COORDINATOR = "coordinator"


def node_on(host: str) -> str:
    """The name of the node on a host."""
    return f"node-{host}"


def read_peers(setup: dict[str, Any]) -> dict[str, Peer]:
    """Everybody whose key lies in the folder; the coordinator only dials, and may coordinate."""
    peers = {}
    for path in Path(setup["keys"]).glob("*.key"):
        name = path.stem
        host, port = setup["peers"].get(name, (None, None))
        address = None if host is None else (str(host), int(port))
        may = frozenset({"coordinate"}) if name == COORDINATOR else frozenset[str]()
        peers[name] = Peer(name, address, (load_identity(path).fingerprint,), may)
    return peers
