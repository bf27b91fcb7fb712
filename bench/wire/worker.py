"""One end of a timed link: `python -m bench.wire.worker STACK send|receive`, run inside a host of bench.wan.

The driver (bench.wire.pair) talks to it in JSON lines. The receiver prints `{"listening": port}` and then,
for each message, `{"got": number, "at": seconds, "size": bytes}`; the sender reads `{"send": size}` and
prints `{"sent": number, "at": seconds}` before the first byte leaves. Both use CLOCK_MONOTONIC, which all
hosts of a machine share, so the difference is the one-way time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from bench.wire.pair import FLOOD_MESSAGE
from bench.wire.stacks import Receiver, Sender, open_receiver, open_sender


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


async def commands() -> AsyncIterator[dict[str, Any]]:
    """The driver's lines, until it closes the pipe."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def receive(stack: str, setup: dict[str, Any]) -> None:
    receiver: Receiver = await open_receiver(stack, setup)
    say(listening=receiver.port)
    number = 0
    while True:
        size, at = await receiver.next_message()
        say(got=number, at=at, size=size)
        number += 1


async def send(stack: str, setup: dict[str, Any], orders: AsyncIterator[dict[str, Any]]) -> None:
    sender: Sender | None = None
    number = 0
    async for order in orders:
        if "connect" in order:
            if sender is not None:
                await sender.close()
            started = time.monotonic()
            sender = await open_sender(stack, setup | order["connect"])
            say(connected=time.monotonic() - started)
        elif "send" in order:
            assert sender is not None
            body = os.urandom(order["send"])
            say(sent=number, at=time.monotonic())
            await sender.send(body)
            number += 1
        elif "flood" in order:
            assert sender is not None
            say(flooded=await flood(sender, order["flood"]))
        elif "estimate" in order:
            assert sender is not None
            say(rate=sender.rate())
        elif "busy" in order:
            _Busy.switch(order["busy"])
            say(busy=order["busy"])


async def flood(sender: Sender, seconds: float) -> float:
    """Messages one after another, a few at a time on their way; when it ended. A short one comes last."""
    end = time.monotonic() + seconds
    body = os.urandom(FLOOD_MESSAGE)
    while time.monotonic() < end:
        await sender.send(body)
    await sender.send(b"end")
    return end


class _Busy:
    """A thread of this process that runs Python-heavy torch code, as a stage does beside its transport."""

    running = threading.Event()
    thread: threading.Thread | None = None

    @classmethod
    def switch(cls, on: bool) -> None:
        if not on:
            cls.running.clear()
            return
        cls.running.set()
        if cls.thread is None or not cls.thread.is_alive():
            cls.thread = threading.Thread(target=cls._work, daemon=True)
            cls.thread.start()

    @classmethod
    def _work(cls) -> None:
        import torch

        torch.set_num_threads(1)
        matrix = torch.randn(64, 64)
        while cls.running.is_set():
            for _ in range(200):  # small operations: most of the time is the interpreter's
                matrix = torch.tanh(matrix @ matrix * 0.01)


async def main() -> None:
    stack, role = sys.argv[1:3]
    orders = commands()
    setup = await anext(orders)
    if role == "send":
        await send(stack, setup, orders)
        return
    task = asyncio.create_task(receive(stack, setup))
    async for _ in orders:
        pass
    task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
