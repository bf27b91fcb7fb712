"""A node process with a stand-in for its device: `python -m bench.stand_in.node`, inside a host of bench.wan.

Reads one line, `{"name": ..., "keys": folder, "peers": {name: [host, port]}}`, prints `{"listening": port}`,
and serves until its input ends. All but the worker is what `bbquic node` runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from bbquic.runtime.machine import Machine
from bbquic.runtime.node import Node
from bbquic.transport.channel import Role
from bbquic.transport.identity import load_identity
from bbquic.transport.threaded import open_endpoint
from bbquic.transport.turns import take_short_turns
from bench.stand_in.peers import read_peers
from bench.stand_in.worker import StandInLoader


async def serve(setup: dict[str, Any]) -> None:
    peers = read_peers(setup)
    me = peers[setup["name"]]
    assert me.address is not None, "a node has an address"
    identity = load_identity(Path(setup["keys"]) / f"{me.name}.key")
    endpoint = await open_endpoint(identity, peers, Role.NODE, host=me.address[0], port=me.address[1])
    machine = Machine(torch.device("cpu"), threads=1)
    node = asyncio.create_task(Node(endpoint, me, peers, StandInLoader(), machine).serve())
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    print(json.dumps({"listening": me.address[1]}), flush=True)
    await asyncio.wait([node, ended], return_when=asyncio.FIRST_COMPLETED)
    node.cancel()
    await endpoint.close()
    if node.done() and not node.cancelled():
        node.result()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    take_short_turns()
    asyncio.run(serve(json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
