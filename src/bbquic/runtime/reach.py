"""A node's way to other nodes of a plan: dialled by the name that the plan gives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bbquic.errors import PlanRefused
from bbquic.transport.channel import Channel, Endpoint
from bbquic.transport.identity import Peer
from bbquic.units import Seconds

DIAL_DEADLINE = Seconds(20.0)  # for another node of a plan to answer


async def reach(endpoint: Endpoint, me: Peer, peers: Mapping[str, Peer], name: str, what: str) -> Channel:
    """A channel to the node `name`; `what` says what it is to this one, such as "the next stage's node".

    Raises: PlanRefused where there is no way there; PeerUnreachable, PeerRefused.
    """
    peer = peers.get(name)
    if peer is None or peer.address is None:
        raise PlanRefused(
            f"{me.name} does not know {what} {name}, or no address for it",
            hint="use the same peers.toml on every machine",
        )
    try:
        async with asyncio.timeout(DIAL_DEADLINE):
            return await endpoint.connect(peer)
    except TimeoutError:
        raise PlanRefused(
            f"{me.name} cannot reach {name} at {peer.address[0]}:{peer.address[1]}: "
            f"no answer for {DIAL_DEADLINE:.0f} s",
            hint="is its UDP port open to this machine?",
        ) from None
