"""Nodes on this machine, started for one command: processes on loopback with throw-away keys."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bbquic.errors import BBQuicError, Stalled
from bbquic.runtime.scheduler import DEPTH
from bbquic.transport.identity import Identity, Peer, load_identity, new_identity
from bbquic.units import Bytes, Seconds

START_DEADLINE = Seconds(120.0)  # importing torch from a cold disk on a small machine
STOP_DEADLINE = Seconds(10.0)
LOG_TAIL = 3  # lines of a dead node's log worth showing


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """Node processes that are up, and the identity the command coordinates them with."""

    nodes: tuple[Peer, ...]
    peers: dict[str, Peer]
    identity: Identity


@dataclass(frozen=True, slots=True)
class LocalTurns:
    """How the nodes of one machine share its cores."""

    micro_batches: int
    depth: int
    threads: int  # of each node

    @classmethod
    def of(cls, micro_batches: int | None, *, nodes: int, cores: int) -> LocalTurns:
        """One pack at a time on all cores, unless micro-batches were asked for.

        A decode step waits for memory, and one that reads each weight once for all rows, by all cores, beats
        two that read it side by side for half of the rows each.
        """
        if micro_batches is None or micro_batches == 1:
            return cls(1, 1, cores)
        return cls(micro_batches, DEPTH, max(1, cores // min(micro_batches, nodes)))

    @property
    def environment(self) -> dict[str, str]:
        """Of a node's process. Threads that compute by turns with nobody else may wait for one another
        spinning, some 0.3 ms; a third of a step's time is in it."""
        spinning = {"GOMP_SPINCOUNT": "100000"} if self.depth * self.micro_batches == 1 else {}
        return {"OMP_NUM_THREADS": str(self.threads), **spinning}


@asynccontextmanager
async def local_nodes(
    count: int, *, models: Sequence[str], turns: LocalTurns, memory: Bytes
) -> AsyncIterator[LocalCluster]:
    """Start `count` nodes that share the cores by `turns`, each with `memory` bytes at most; stop them after.

    Their keys live in a private temporary directory. A node ends by itself when this process does,
    however it ends: it watches a pipe. Raises: BBQuicError with the log of a node that did not start.
    """
    with tempfile.TemporaryDirectory(prefix="bbquic-") as folder:
        home = Path(folder)
        names = [f"local-{number + 1}" for number in range(count)]
        processes: list[asyncio.subprocess.Process] = []
        try:
            with ExitStack() as stack:
                sockets = [stack.enter_context(_bound_socket()) for _ in names]
                peers = _make_peers(home, names, [sock.getsockname()[:2] for sock in sockets])
                for name, sock in zip(names, sockets, strict=True):
                    processes.append(await _start(home, name, sock, models, turns, memory))
            for name, process in zip(names, processes, strict=True):
                await _wait_listening(home, name, process)
            yield LocalCluster(
                tuple(peers[name] for name in names), peers, load_identity(home / "command.key")
            )
        finally:
            await asyncio.gather(*(_stop(process) for process in processes))


def _bound_socket() -> socket.socket:
    """A UDP socket on a free loopback port; handed to the node, so that nobody can take the port between."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock


def _make_peers(home: Path, names: Sequence[str], addresses: Sequence[tuple[str, int]]) -> dict[str, Peer]:
    """Keys for the nodes and the command, and the peers.toml that pins them."""
    peers = {}
    for name, address in zip(names, addresses, strict=True):
        peers[name] = Peer(name, address, (new_identity(name, home).fingerprint,))
    command = new_identity("command", home)
    peers["command"] = Peer("command", None, (command.fingerprint,), frozenset({"coordinate"}))
    (home / "peers.toml").write_text("\n".join(_entry(peer) for peer in peers.values()))
    return peers


def _entry(peer: Peer) -> str:
    lines = ["[[peer]]", f'name = "{peer.name}"', f'keys = ["{peer.keys[0]}"]']
    if peer.address is not None:
        lines.append(f'address = "{peer.address[0]}:{peer.address[1]}"')
    if peer.may:
        lines.append('may = ["coordinate"]')
    return "\n".join(lines) + "\n"


async def _start(
    home: Path, name: str, sock: socket.socket, models: Sequence[str], turns: LocalTurns, memory: Bytes
) -> asyncio.subprocess.Process:
    arguments = [
        *("node", "--peers", str(home / "peers.toml"), "--key", str(home / f"{name}.key")),
        *("--threads", str(turns.threads), "--memory", str(memory), "--device", "cpu"),
        *("--listen-fd", str(sock.fileno()), "--until-stdin-closes"),
    ]
    for model in models:
        arguments += ["--model", model]
    with (home / f"{name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bbquic", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            pass_fds=(sock.fileno(),),
            start_new_session=True,  # Ctrl-C is the command's to handle; it stops its nodes in order
            env={**os.environ, **turns.environment},
        )


async def _wait_listening(home: Path, name: str, process: asyncio.subprocess.Process) -> None:
    """Until the node printed where it listens."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_DEADLINE):
            line = await process.stdout.readline()
    except TimeoutError:
        raise Stalled(f"waited {START_DEADLINE:.0f} s for {name} to start") from None
    if not line:
        log = (home / f"{name}.log").read_text(errors="replace").splitlines()
        raise BBQuicError(f"{name} did not start: {' | '.join(log[-LOG_TAIL:]) or 'it said nothing'}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close its pipe, and end it by force where it does not go."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_DEADLINE):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
