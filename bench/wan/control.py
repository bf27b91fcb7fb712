"""What the owner of a network and its relay say to each other: one JSON object a message, each answered."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.wan.counters import LinkStatistics, RelayStatistics
from bench.wan.link import Link, Network, Pair, Uplink

MAX_MESSAGE = 4 << 20  # bytes; 32 hosts have 992 links, each a few hundred bytes here


def send(peer: socket.socket, message: Mapping[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def receive(peer: socket.socket) -> dict[str, Any] | None:
    """The next message; None where the other side has gone. There is never more than one on its way.

    Raises: TimeoutError as the socket is set to; ValueError on a message that is too long.
    """
    text = b""
    while not text.endswith(b"\n"):
        part = peer.recv(1 << 20)
        if not part:
            return None
        text += part
        if len(text) > MAX_MESSAGE:
            raise ValueError("the message does not end")
    message: dict[str, Any] = json.loads(text)
    return message


def network_to(network: Network) -> dict[str, Any]:
    links = [[*pair, asdict(network.link(*pair))] for pair in network.pairs()]
    uplinks = {host: asdict(uplink) for host, uplink in network.uplinks.items()}
    return {"hosts": network.hosts, "links": links, "uplinks": uplinks, "seed": network.seed}


def network_from(message: dict[str, Any]) -> Network:
    return Network(
        hosts=tuple(message["hosts"]),
        links={(source, to): Link(**fields) for source, to, fields in message["links"]},
        uplinks={host: Uplink(**fields) for host, fields in message["uplinks"].items()},
        seed=message["seed"],
    )


def report(relay: RelayStatistics, links: Mapping[Pair, LinkStatistics]) -> dict[str, Any]:
    return {"relay": asdict(relay), "links": [[*pair, asdict(one)] for pair, one in links.items()]}


def relay_from(message: dict[str, Any]) -> RelayStatistics:
    return RelayStatistics(**message["relay"])


def links_from(message: dict[str, Any]) -> dict[Pair, LinkStatistics]:
    return {(source, to): LinkStatistics(**fields) for source, to, fields in message["links"]}


def plain(settings: Link | Uplink) -> dict[str, Any]:
    return asdict(settings)
