"""A host that probes its links on the driver's word: `python -m bench.wire.prober NAME`, in JSON lines.

Reads `{"keys": folder, "host": address}` and prints `{"port": port}`; then the peers' addresses, and prints
`{"connected": count}`; then `{"probe": peer}` each time, and prints rate, bytes and whether it settled.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from bbquic.transport.channel import Channel, Endpoint, Role
from bbquic.transport.identity import Peer, load_identity
from bbquic.transport.threaded import open_endpoint


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


async def hear() -> dict[str, Any]:
    """The driver's next line. Raises: EOFError at the end."""
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    heard: dict[str, Any] = json.loads(line)
    return heard


async def keep(endpoint: Endpoint, kept: list[Channel]) -> None:
    """Hold what others dial: they probe us, and we answer by ourselves."""
    while True:
        kept.append(await endpoint.accept())


def read_peers(keys: Path) -> dict[str, Peer]:
    """Everybody whose key lies in the folder."""
    found = {path.stem: load_identity(path).fingerprint for path in keys.glob("*.key")}
    return {name: Peer(name, None, (key,)) for name, key in found.items()}


async def main() -> None:
    name, setup = sys.argv[1], await hear()
    keys = Path(setup["keys"])
    peers = read_peers(keys)
    identity = load_identity(keys / f"{name}.key")
    endpoint = await open_endpoint(identity, peers, Role.NODE, host=setup["host"])
    kept: list[Channel] = []
    task = asyncio.create_task(keep(endpoint, kept))
    say(port=endpoint.address[1])
    channels = {}
    for other, (host, port) in (await hear()).items():
        if other != name:
            channels[other] = await endpoint.connect(Peer(other, (host, port), peers[other].keys))
    say(connected=len(channels))
    try:
        while True:
            order = await hear()
            result = await channels[order["probe"]].probe()
            say(rate=result.rate, bytes=result.bytes_sent, settled=result.is_settled)
    except EOFError:
        task.cancel()
        await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main())
