"""Two workers on two hosts, and messages between them one after another."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bbquic.transport.identity import new_identity
from bench.wan import Wan

DEADLINE_S = 300.0  # for everything that a pair does
FLOOD_MESSAGE = 100_000  # bytes; one of another size ends a flood


class Pair:
    """A sender on host `a` and a receiver on host `b`, both of one stack. A context manager."""

    def __init__(self, wan: Wan, stack: str) -> None:
        self._wan = wan
        self.stack = stack

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="bbquic-wire-")
        keys = Path(self._folder.name)
        for name in ("sender", "receiver"):
            new_identity(name, keys)
        self._receiver = self._start("b", "receive")
        self._order(self._receiver, keys=str(keys), host=self._wan.address("b"))
        self._port = self._hear(self._receiver, "listening")["listening"]
        self._sender = self._start("a", "send")
        self._order(self._sender, keys=str(keys), host=self._wan.address("b"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._sender, self._receiver):
            process.close()
        self._folder.cleanup()

    def connect(self, *, remember: bool = False) -> float:
        """A new connection from a fresh endpoint; seconds until it could be used.

        With `remember`, our endpoint starts from what earlier connections of this pair noted, and notes too.
        """
        links = str(Path(self._folder.name) / "links.json") if remember else None
        self._order(self._sender, connect={"port": self._port, "links": links})
        return float(self._hear(self._sender, "connected")["connected"])

    def send(self, size: int) -> float:
        """One message; its one-way time in seconds."""
        self._order(self._sender, send=size)
        left = float(self._hear(self._sender, "sent")["at"])
        arrived = self._hear(self._receiver, "got")
        assert arrived["size"] == size
        return float(arrived["at"]) - left

    def send_many(self, size: int, count: int, silence_s: float) -> list[float]:
        """Messages with silence between the arrival of one and the next."""
        times = []
        for _ in range(count):
            time.sleep(silence_s)
            times.append(self.send(size))
        return times

    def rate(self) -> float | None:
        """The sender's estimate of the link, bytes/s."""
        self._order(self._sender, estimate=True)
        value = self._hear(self._sender, "rate")["rate"]
        return None if value is None else float(value)

    def keep_busy(self, on: bool) -> None:
        """Run, or stop, a thread of Python-heavy torch code in both processes' sender."""
        self._order(self._sender, busy=on)
        self._hear(self._sender, "busy")

    def flood(self, seconds: float) -> None:
        """Begin to send without pause, for so long."""
        self._order(self._sender, flood=seconds)

    def flooded(self) -> int:
        """Bytes of the flood that arrived before it ended, messages of `FLOOD_MESSAGE` whole."""
        end = float(self._hear(self._sender, "flooded")["flooded"])
        size = 0
        while True:
            got = self._hear(self._receiver, "got")
            if got["at"] <= end:
                size += int(got["size"])
            if got["size"] != FLOOD_MESSAGE:
                return size

    def _start(self, host: str, role: str) -> Any:
        argv = [sys.executable, "-m", "bench.wire.worker", self.stack, role]
        return self._wan.run(host, argv, deadline_s=DEADLINE_S, stdin=-1, stdout=-1)

    @staticmethod
    def _order(process: Any, **line: Any) -> None:
        print(json.dumps(line), file=process.stdin, flush=True)

    @staticmethod
    def _hear(process: Any, key: str) -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended, exit code {process.wait()}")
        heard: dict[str, Any] = json.loads(line)
        assert key in heard, f"expected {key}, heard {heard}"
        return heard
