"""Messages on their way out: the urgent ones first, and never more in flight than the watermark allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from bbquic.transport.channel import Sent
from bbquic.transport.ending import Ending, ResetCode
from bbquic.transport.message import KIB, Message, encode
from bbquic.transport.options import EndpointOptions

CHUNK = 256 * KIB  # written at once; between two of them a more urgent message may step in


class Streams(Protocol):
    """What an outbox needs of a QUIC connection."""

    def open_stream(self, priority: int) -> int: ...

    def write_stream(self, stream_id: int, data: memoryview, *, end: bool) -> None: ...

    def reset_stream(self, stream_id: int, error_code: int) -> None: ...

    def unacknowledged(self) -> tuple[int, int]: ...

    def has_begun(self, stream_id: int) -> bool: ...


@dataclass(order=True)
class Posting:
    """A message in the outbox. `done` is set when its last byte is handed to the stack."""

    priority: int
    number: int
    buffers: list[memoryview] = field(compare=False)
    done: asyncio.Future[None] = field(compare=False)
    sent: Sent = field(compare=False)
    stream_id: int | None = field(default=None, compare=False)
    is_written: bool = field(default=False, compare=False)


class Outbox:
    """One channel's. Of equal priority, a message is written whole before the next begins, so that what a
    receiver holds in unfinished messages stays near one for each priority."""

    def __init__(self, options: EndpointOptions, streams: Streams, on_written: Callable[[], None]) -> None:
        """`on_written` is called after `post` and a cancelled `send` wrote to the streams."""
        self._options = options
        self._streams = streams
        self._on_written = on_written
        self._heap: list[Posting] = []
        self._to_begin: dict[int, Sent] = {}  # by stream: those of which no datagram has left
        self._number = 0
        self._paused = False

    async def send(self, message: Message) -> Sent:
        """Returns when the whole message is with the stack. Cancelled before that, it never arrives."""
        posting = self.post(message)
        try:
            await posting.done
        except asyncio.CancelledError:
            self.withdraw(posting)
            raise
        return posting.sent

    def post(self, message: Message, sent: Sent | None = None) -> Posting:
        """Enqueue a message, and write what the watermark allows. `sent` is the one to fill in."""
        buffers = [memoryview(buffer) for buffer in encode(message)]
        self._number += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        posting = Posting(message.priority, self._number, buffers, done, sent or Sent())
        heappush(self._heap, posting)
        if self.pump():
            self._on_written()
        return posting

    def withdraw(self, posting: Posting) -> None:
        """Give a message up: unless all of it is with the stack by now, it never arrives."""
        posting.done.cancel()  # `pump` passes over it
        if posting.stream_id is not None and not posting.is_written:
            self._to_begin.pop(posting.stream_id, None)
            self._streams.reset_stream(posting.stream_id, ResetCode.CANCELLED)
            self._on_written()

    def pump(self) -> bool:
        """Write on while there is room. Whether anything was written."""
        wrote = False
        while self._heap:
            posting = self._heap[0]
            if posting.done.done():  # withdrawn
                heappop(self._heap)
                continue
            if not self._has_room(posting):
                break
            self._write_chunk(posting)
            wrote = True
        return wrote

    def note_begun(self, now: float) -> None:
        """Datagrams were sent at `now`: fill in whose first one was among them. Nearly always none or one."""
        for stream_id in [one for one in self._to_begin if self._streams.has_begun(one)]:
            self._to_begin.pop(stream_id).began = now

    def end(self, ending: Ending) -> None:
        """The channel is over: every sender that waits hears why."""
        for posting in self._heap:
            if not posting.done.done():
                posting.done.set_exception(ending.error())
        self._heap.clear()
        self._to_begin.clear()

    def _has_room(self, posting: Posting) -> bool:
        unacknowledged, messages = self._streams.unacknowledged()
        if posting.stream_id is None and messages >= self._options.outbox_messages:
            return False
        limit = self._options.low_watermark if self._paused else self._options.high_watermark
        self._paused = unacknowledged > 0 and unacknowledged >= limit
        return not self._paused

    def _write_chunk(self, posting: Posting) -> None:
        if posting.stream_id is None:
            posting.stream_id = self._streams.open_stream(posting.priority)
            self._to_begin[posting.stream_id] = posting.sent
        buffer = posting.buffers[0]
        chunk, rest = buffer[:CHUNK], buffer[CHUNK:]
        if rest:
            posting.buffers[0] = rest
        else:
            del posting.buffers[0]
        is_last = not posting.buffers
        self._streams.write_stream(posting.stream_id, chunk, end=is_last)
        if is_last:
            heappop(self._heap)
            posting.is_written = True
            posting.done.set_result(None)
