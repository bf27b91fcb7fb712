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
from bench.stand_in.peers import COORDINATOR, node_on
from bench.wan import Command, Link, Network, Wan, mesh

PORT = 4433
DEADLINE_S = 1200.0  # for everything a cluster does
HOSTS = ("a", "b", "c", "d", "e", "f")


class Passes(msgspec.Struct):
    """The coordinator's answer."""

    passes: list[Passed]


class Cluster:
    """Nodes on hosts of a network, and a coordinator on each of `homes`. A context manager.

    A host may be both: its coordinator is then beside its node, on one machine.
    """

    def __init__(
        self, network: Network, nodes: Sequence[str], homes: Sequence[str], *, moderation_us: float = 0.0
    ) -> None:
        self._hosts = tuple(nodes)
        self._homes = tuple(homes)
        self.wan = Wan(network, moderation_us=moderation_us)
        self._stack = ExitStack()

    @classmethod
    def alike(cls, nodes: int, link: Link, *, moderation_us: float = 0.0) -> Cluster:
        """Nodes on hosts a, b, ..., like links between any two, the coordinator on a."""
        hosts = HOSTS[:nodes]
        return cls(mesh(*hosts, link=link), hosts, hosts[:1], moderation_us=moderation_us)

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

    def run(self, cell: Cell, home: str | None = None) -> Sequence[Passed]:
        """Run a cell to its end, by the coordinator on `home`, else by the first one; all passes of it."""
        coordinator = self._coordinators[home or self._homes[0]]
        _order(coordinator, msgspec.json.encode(cell).decode())
        return msgspec.json.decode(_hear(coordinator), type=Passes).passes

    def set_links(self, **changes: Any) -> None:
        """Change every link, live (fields of bench.wan.Link)."""
        for source, destination in self.wan.network.pairs():
            self.wan.set(source, destination, **changes)

    def _start(self, keys: Path) -> None:
        names = {host: node_on(host) for host in self._hosts}
        for name in (*names.values(), COORDINATOR):
            new_identity(name, keys)
        setup = {
            "keys": str(keys),
            "peers": {name: (self.wan.address(host), PORT) for host, name in names.items()},
        }
        nodes = {host: self._process(host, "node") for host in self._hosts}
        self._coordinators = {host: self._process(host, "coordinator") for host in self._homes}
        for host, node in nodes.items():
            _order(node, json.dumps({"name": names[host], **setup}))
        hosts = list(self._hosts)
        for host, coordinator in self._coordinators.items():
            _order(coordinator, json.dumps({"host": self.wan.address(host), "nodes": hosts, **setup}))
        for process in (*nodes.values(), *self._coordinators.values()):
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
