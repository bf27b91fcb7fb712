"""A replay's processes on the hosts of an emulated network: nodes with stand-ins, and their coordinator."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from bbquic.transport.identity import new_identity
from bench.stand_in.cell import Cell
from bench.stand_in.observed import Passed
from bench.stand_in.peers import COORDINATOR
from bench.wan import Command, Link, Wan, mesh

PORT = 4433
DEADLINE_S = 1200.0  # for everything a cluster does
HOSTS = ("a", "b", "c", "d")


class Passes(msgspec.Struct):
    """The coordinator's answer."""

    passes: list[Passed]


class Cluster:
    """Nodes on hosts a, b, ..., like links between any two, the coordinator on a. A context manager."""

    def __init__(self, nodes: int, link: Link, *, moderation_us: float = 0.0) -> None:
        self._hosts = HOSTS[:nodes]
        self.wan = Wan(mesh(*self._hosts, link=link), moderation_us=moderation_us)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.wan)
            keys = stack.enter_context(tempfile.TemporaryDirectory(prefix="bbquic-replay-"))
            self._start(Path(keys))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, cell: Cell) -> Sequence[Passed]:
        """Run a cell to its end; all passes of it."""
        _order(self._coordinator, msgspec.json.encode(cell).decode())
        return msgspec.json.decode(_hear(self._coordinator), type=Passes).passes

    def set_links(self, **changes: Any) -> None:
        """Change every link, live (fields of bench.wan.Link)."""
        for source, destination in self.wan.network.pairs():
            self.wan.set(source, destination, **changes)

    def _start(self, keys: Path) -> None:
        names = [f"node-{host}" for host in self._hosts]
        for name in (*names, COORDINATOR):
            new_identity(name, keys)
        peers = {name: (self.wan.address(host), PORT) for name, host in zip(names, self._hosts, strict=True)}
        setup = {"keys": str(keys), "peers": peers, "host": self.wan.address(self._hosts[0])}
        nodes = [self._process(host, "node") for host in self._hosts]
        self._coordinator = self._process(self._hosts[0], "coordinator")
        for name, node in zip(names, nodes, strict=True):
            _order(node, json.dumps({"name": name, **setup}))
        _order(self._coordinator, json.dumps(setup))
        for process in (*nodes, self._coordinator):
            _hear(process)

    def _process(self, host: str, module: str) -> Command:
        argv = [sys.executable, "-m", f"bench.stand_in.{module}"]
        return self.wan.run(host, argv, deadline_s=DEADLINE_S, stdin=-1, stdout=-1)


def _order(process: Command, line: str) -> None:
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def _hear(process: Command) -> str:
    """The process's next line. Raises: RuntimeError where it has ended; its error is on stderr."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the replay ended, exit code {process.wait()}")
    return line
