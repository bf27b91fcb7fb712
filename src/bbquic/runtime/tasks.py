"""Task groups whose failure is one error, the one that a person can act on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from bbquic.errors import BBQuicError


@asynccontextmanager
async def owned_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` that raises a BBQuicError of its tasks as itself, not inside a group.

    Other failures are bugs; they stay in their ExceptionGroup, with every traceback.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if all(isinstance(leaf, BBQuicError) for leaf in leaves):
            raise leaves[0] from None
        raise


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
