"""Real nodes, each on a host of an emulated network, and their coordinator in a third process."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from bbquic.transport.identity import new_identity
from bench.guessing.home import COMMAND, Told, Work
from bench.wan import Command, Link, Wan, mesh
from bench.wire.cells import moderation

HOSTS = ("a", "b")
PORT = 4433
DEADLINE_S = 3600.0  # for everything that one start of them does
MEMORY = "4G"  # of a node at most
FASTEST = Link()  # no limit, no delay


class RealNodes:
    """`bbquic node` on two hosts, one torch thread each, and the coordinator on the first. A context manager.

    Raises: WanUnavailable where this machine has no emulated links; RuntimeError where a process ends.
    """

    def __init__(self) -> None:
        self._wan = Wan(mesh(*HOSTS, link=FASTEST), moderation_us=moderation(Link(rate_mbps=200)))
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._wan)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bbquic-real-"))
            self._start(Path(folder))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def at(self, rate_mbps: float | None, rtt_ms: float) -> Self:
        """Set the link between the two, both ways, live."""
        self._wan.set_both(*HOSTS, rate_mbps=rate_mbps, delay_ms=rtt_ms / 2)
        return self

    def run(self, work: Work) -> Told:
        """A job to its end."""
        _order(self._home, msgspec.json.encode(work).decode())
        return msgspec.json.decode(_hear(self._home), type=Told)

    def _start(self, folder: Path) -> None:
        names = {host: f"node-{host}" for host in HOSTS}
        entries = [self._entry(folder, COMMAND, 'may = ["coordinate"]')]
        for host, name in names.items():
            entries.append(self._entry(folder, name, f'address = "{self._wan.address(host)}:{PORT}"'))
        (folder / "peers.toml").write_text("\n".join(entries))
        nodes = {host: self._node(folder, host, name) for host, name in names.items()}
        home = [sys.executable, "-m", "bench.guessing.home"]
        self._home = self._wan.run(HOSTS[0], home, deadline_s=DEADLINE_S, stdin=-1, stdout=-1)
        setup = {"folder": str(folder), "host": self._wan.address(HOSTS[0]), "nodes": list(names.values())}
        _order(self._home, json.dumps(setup))
        for host, node in nodes.items():
            try:
                _hear(node)
            except RuntimeError as error:
                log = (folder / f"{names[host]}.log").read_text(errors="replace")[-500:]
                raise RuntimeError(f"{names[host]} did not start: {log}") from error
        _hear(self._home)

    @staticmethod
    def _entry(folder: Path, name: str, more: str) -> str:
        return f'[[peer]]\nname = "{name}"\nkeys = ["{new_identity(name, folder).fingerprint}"]\n{more}\n'

    def _node(self, folder: Path, host: str, name: str) -> Command:
        argv = [
            *(sys.executable, "-m", "bbquic", "node", "--until-stdin-closes", "--device", "cpu"),
            *("--peers", str(folder / "peers.toml"), "--key", str(folder / f"{name}.key")),
            *("--threads", "1", "--memory", MEMORY),
        ]
        # `env` rather than this process's own: what nodes remember of links is not to outlive the bench
        argv = ["env", f"XDG_STATE_HOME={folder}", *argv]
        with (folder / f"{name}.log").open("w") as log:
            return self._wan.run(host, argv, deadline_s=DEADLINE_S, stdin=-1, stdout=-1, stderr=log)


def _order(process: Command, line: str) -> None:
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def _hear(process: Command) -> str:
    """The process's next line. Raises: RuntimeError where it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the bench ended, exit code {process.wait()}")
    return line
