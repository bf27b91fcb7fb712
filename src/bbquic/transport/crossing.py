"""Calls from one thread into another one's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("bbquic.transport")


class Crossing:
    """Calls in one direction, made in the order they were asked for.

    A wake-up of a loop costs two system calls and often a switch of threads, so that all calls which gather
    before the loop wakes share one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` is where the calls are made; `call` may be used in any one thread."""
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_due = False

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have it called soon. Once the loop is closed nobody is left to hear, and nothing happens."""
        self._calls.append((function, arguments))
        if self._is_due:
            return  # `_run` has yet to clear this, and takes the call after that
        self._is_due = True
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            self._calls.clear()
            self._is_due = False

    def _run(self) -> None:
        self._is_due = False  # before the queue is looked at: a call that comes later wakes us again
        while self._calls:
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception:  # a bug of ours; the other calls have nothing to do with it
                log.exception("a call between threads failed")
