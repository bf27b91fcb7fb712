"""A drafter that works beside the loop: one thread, which serves all micro-batches that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bbquic.draft.tree import DraftTree
from bbquic.runtime.drafting import DraftWork
from bbquic.runtime.scheduler import Scheduler
from bbquic.units import Seconds


class DraftCycle:
    """Has the scheduler's drafter draft, as often as it is free and somebody waits."""

    def __init__(self, scheduler: Scheduler, done: Callable[[], None], deadline: Seconds) -> None:
        """`done` is called whenever rows may go on; a draft that takes longer than `deadline` is the last."""
        self._scheduler = scheduler
        self._done = done
        self._deadline = deadline
        self._asked = asyncio.Event()

    def wake(self) -> None:
        """Somebody may wait."""
        self._asked.set()

    async def run(self) -> None:
        """Draft until cancelled, or until the drafter fails: then the job goes on without."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="drafter")
        try:
            while self._scheduler.drafts_beside:
                await self._asked.wait()
                self._asked.clear()
                while (work := self._scheduler.asks()) is not None:
                    await self._draft(thread, work)
                    self._done()
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _draft(self, thread: ThreadPoolExecutor, work: DraftWork) -> None:
        loop = asyncio.get_running_loop()
        trees: list[DraftTree]
        try:
            async with asyncio.timeout(self._deadline):
                trees = await loop.run_in_executor(thread, work.draft)
        except TimeoutError as error:
            words = str(error) or f"it took longer than {self._deadline:.0f} s"
            self._scheduler.stop_drafting(TimeoutError(words))
        except Exception as error:  # the boundary of a drafter
            self._scheduler.stop_drafting(error)
        else:
            self._scheduler.take_drafts(work, trees)
