"""Things that arrived and wait for a reader, and the reader that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from bbquic.transport.ending import Ending

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue that, once ended, is read to its end before it raises.

    It never refuses: whoever fills it stops in time, by credits it gives for what was read.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._ending: Ending | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put_nowait(self, item: T) -> None:
        """Nothing enters after the end."""
        if self._ending is None:
            self._items.append(item)
            self._changed.set()

    async def get(self) -> T:
        """The next item. Raises: the ending's error when nothing is left and nothing will come."""
        while not self._items:
            if self._ending is not None:
                raise self._ending.error()
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()

    def get_nowait(self) -> T:
        """The next item. Raises: IndexError when there is none."""
        return self._items.popleft()

    def end(self, ending: Ending, *, drop: bool = False) -> None:
        """No more will come; with `drop`, what waits is thrown away too. The first ending counts."""
        if self._ending is None:
            self._ending = ending
        if drop:
            self._items.clear()
        self._changed.set()
