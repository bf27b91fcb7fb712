"""Bulk over loopback between two processes: how much CPU a byte costs, and how fast that makes it.

A process is `python -m bench.loopback STACK send|receive`, driven in JSON lines on its standard streams.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bbquic.transport.identity import new_identity
from bench.wire.stacks import open_receiver, open_sender

HOST = "127.0.0.1"
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Bulk:
    """One transfer. CPU seconds are those of each whole process, all of its threads."""

    size: int
    seconds: float
    send_cpu: float
    receive_cpu: float

    @property
    def mbit(self) -> float:
        return self.size * 8 / self.seconds / 1e6

    @property
    def send_cost(self) -> float:
        """CPU seconds a GB."""
        return self.send_cpu / self.size * 1e9

    @property
    def receive_cost(self) -> float:
        """CPU seconds a GB."""
        return self.receive_cpu / self.size * 1e9


class Loopback:
    """A sender and a receiver of one stack, connected, which idle between transfers. A context manager."""

    def __init__(self, stack: str) -> None:
        self._stack = stack

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="bbquic-loopback-")
        for name in ("sender", "receiver"):
            new_identity(name, Path(self._folder.name))
        setup = {"keys": self._folder.name, "host": HOST}
        self._receiver = self._start("receive")
        port = _ask(self._receiver, setup)["listening"]
        self._sender = self._start("send")
        _ask(self._sender, setup | {"port": port})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._sender, self._receiver):
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        self._folder.cleanup()

    def transfer(self, megabytes: int) -> Bulk:
        """One message, from its first byte's start to its last one's arrival. (Of several at once, stock
        aioquic sends a packet of each in turn, at several times the cost.)"""
        _tell(self._receiver, {"expect": megabytes})
        _hear(self._receiver)
        started = _ask(self._sender, {"send": megabytes})
        finished = _hear(self._receiver)
        left = _ask(self._sender, {"cpu": True})
        return Bulk(
            megabytes * MEGABYTE,
            finished["at"] - started["at"],
            left["cpu"] - started["cpu"],
            finished["cpu"] - finished["cpu_before"],
        )

    def _start(self, role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bench.loopback", self._stack, role]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(process: subprocess.Popen[str], line: dict[str, Any]) -> None:
    print(json.dumps(line), file=process.stdin, flush=True)


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the bench ended, exit code {process.wait()}")
    heard: dict[str, Any] = json.loads(line)
    return heard


def _ask(process: subprocess.Popen[str], line: dict[str, Any]) -> dict[str, Any]:
    _tell(process, line)
    return _hear(process)


# The processes.


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


async def _order() -> dict[str, Any]:
    """The driver's next line; empty once it is gone."""
    line = await asyncio.to_thread(sys.stdin.readline)
    order: dict[str, Any] = json.loads(line or "{}")
    return order


async def _receive(stack: str) -> None:
    receiver = await open_receiver(stack, await _order())
    _say(listening=receiver.port)
    while order := await _order():
        before = time.process_time()
        _say(ready=True)
        size, at = await receiver.next_message()
        assert size == order["expect"] * MEGABYTE
        _say(at=at, cpu=time.process_time(), cpu_before=before)


async def _send(stack: str) -> None:
    sender = await open_sender(stack, await _order())
    _say(connected=True)
    while order := await _order():
        body = os.urandom(order.get("send", 0) * MEGABYTE)
        _say(at=time.monotonic(), cpu=time.process_time())
        if body:
            await sender.send(body)
    await sender.close()


if __name__ == "__main__":
    stack_name, role_name = sys.argv[1:3]
    asyncio.run((_send if role_name == "send" else _receive)(stack_name))
    os._exit(0)  # a receiver has nothing to clean up, and would wait for its open endpoint
