"""The endpoint on a thread and an event loop of its own, so that its owner's work delays no acknowledgement.

Its owner's loop sees the same `Endpoint` and `Channel`. What crosses between the loops goes through two
`Crossing`s. Queues on the way are bounded as they are without a thread: a sender waits until its message is
with the stack, and a receiver's credit is given back when the message is read here, not when it crosses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import sys
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from bbquic import __version__
from bbquic.errors import TransportError
from bbquic.transport.channel import ChannelStatistics, Role, Sent
from bbquic.transport.connection import QuicChannel
from bbquic.transport.crossing import Crossing
from bbquic.transport.ending import Ending, closed_here
from bbquic.transport.endpoint import QuicEndpoint, open_endpoint_here
from bbquic.transport.identity import Identity, Peer
from bbquic.transport.mailbox import Mailbox
from bbquic.transport.message import Message
from bbquic.transport.options import EndpointOptions
from bbquic.transport.outbox import Posting
from bbquic.transport.probe import ProbeResult
from bbquic.transport.turns import take_short_turns

T = TypeVar("T")

# Python lets a thread that computes keep the interpreter for so long when another one asks for it. With the
# default of 5 ms, a busy Python thread doubles the time of a burst; with this, it costs a tenth of it.
SWITCH_INTERVAL = 0.0005  # seconds


async def open_endpoint(
    identity: Identity,
    peers: Mapping[str, Peer],
    role: Role,
    *,
    host: str = "",
    port: int = 0,
    sock: socket.socket | None = None,
    engine: str = __version__,
    options: EndpointOptions | None = None,
) -> ThreadedEndpoint:
    """As `open_endpoint_here`, which tells what the arguments mean and what is raised, but on a thread of the
    endpoint's own. Sets the interpreter's switch interval to `SWITCH_INTERVAL`."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
    opening = open_endpoint_here(
        identity, peers, role, host=host, port=port, sock=sock, engine=engine, options=options
    )
    thread = _TransportThread(opening)
    return ThreadedEndpoint(thread, await thread.start())


class _TransportThread:
    """The thread, from the opening of an endpoint to `stop`."""

    def __init__(self, opening: Coroutine[Any, Any, QuicEndpoint]) -> None:
        self._opening = opening
        self._opened: concurrent.futures.Future[QuicEndpoint] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bbquic transport", daemon=True)
        self.loop: asyncio.AbstractEventLoop

    async def start(self) -> QuicEndpoint:
        self._thread.start()
        try:
            return await asyncio.wrap_future(self._opened)
        except Exception:
            await asyncio.to_thread(self._thread.join)
            raise

    async def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Have a coroutine run over there. Cancelled, it is cancelled there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, self.loop))

    async def stop(self) -> None:
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)  # it may have to wait for a name to be looked up

    def _run(self) -> None:
        take_short_turns()
        with asyncio.Runner() as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            endpoint = await self._opening
        except Exception as error:  # whoever opens it is to hear of it
            if self._opened.set_running_or_notify_cancel():
                self._opened.set_exception(error)
            return
        if self._opened.set_running_or_notify_cancel():
            self._opened.set_result(endpoint)
            await self._stop.wait()
        else:
            await endpoint.close()  # nobody waits for it any more


class ThreadedEndpoint:
    """See `bbquic.transport.channel.Endpoint`. Belongs to the loop that opened it."""

    def __init__(self, thread: _TransportThread, endpoint: QuicEndpoint) -> None:
        """Made by `open_endpoint`."""
        self._thread = thread
        self._endpoint = endpoint
        self._address = endpoint.address
        self._there = Crossing(thread.loop)
        self._here = Crossing(asyncio.get_running_loop())
        self._accepted: Mailbox[ThreadedChannel] = Mailbox()
        self._accepting = 0  # callers of `accept` that wait
        self._asked = 0  # channels asked for over there, and not here yet
        self._tasks: set[asyncio.Task[None]] = set()  # over there
        self._ended: Ending | None = None

    @property
    def address(self) -> tuple[str, int]:
        if self._ended is not None:
            raise self._ended.error()
        return self._address

    async def connect(self, peer: Peer) -> ThreadedChannel:
        if self._ended is not None:
            raise self._ended.error()
        made: list[QuicChannel] = []
        try:
            return await self._thread.ask(self._connect(peer, made))
        except asyncio.CancelledError:
            self._there.call(_close_all, made)  # it may just have come about
            raise

    async def accept(self) -> ThreadedChannel:
        # Channels stay over there until somebody asks for one: there it must be known when nobody does.
        self._accepting += 1
        try:
            if self._asked + len(self._accepted) < self._accepting and self._ended is None:
                self._asked += 1
                self._there.call(self._accept_one)
            return await self._accepted.get()
        finally:
            self._accepting -= 1

    async def close(self) -> None:
        if self._ended is not None:
            return
        self._ended = closed_here("every peer", "the endpoint was closed")
        self._accepted.end(self._ended, drop=True)
        try:
            await self._thread.ask(self._endpoint.close())
        finally:
            await self._thread.stop()
        await asyncio.sleep(0)  # whoever waited on a channel hears of its end before this returns

    # Over there.

    async def _connect(self, peer: Peer, made: list[QuicChannel]) -> ThreadedChannel:
        made.append(await self._endpoint.connect(peer))
        return self._channel(made[0])

    def _accept_one(self) -> None:
        task = asyncio.get_running_loop().create_task(self._accept())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        with suppress(TransportError):  # the endpoint is closed, which is known here
            channel = await self._endpoint.accept()
            self._here.call(self._arrive, self._channel(channel))

    def _channel(self, channel: QuicChannel) -> ThreadedChannel:
        return ThreadedChannel(channel, self._thread, self._here, self._there)

    # Here.

    def _arrive(self, channel: ThreadedChannel) -> None:
        self._asked -= 1
        self._accepted.put_nowait(channel)


class _Sending:
    """A message on its way to the stack. `done` belongs to this side's loop, `posting` to the other's."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.sent = Sent()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_withdrawn = False
        self.posting: Posting | None = None

    def settle(self, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class ThreadedChannel:
    """See `bbquic.transport.channel.Channel`."""

    def __init__(
        self, channel: QuicChannel, thread: _TransportThread, here: Crossing, there: Crossing
    ) -> None:
        """Made over there: what has arrived, and all that will, crosses from now on."""
        self._channel = channel
        self._thread = thread
        self._here = here
        self._there = there
        self._mailbox: Mailbox[Message] = Mailbox()
        self._closed = asyncio.Event()
        self._ending: Ending | None = None
        self.peer = channel.peer
        self.role = channel.role
        channel.forward(_Inbox(self))

    @property
    def is_closed(self) -> bool:
        return self._ending is not None

    async def send(self, message: Message) -> Sent:
        if self._ending is not None:
            raise self._ending.error()
        sending = _Sending(_own(message))
        self._there.call(self._post, sending)
        try:
            await sending.done
        except asyncio.CancelledError:
            self._there.call(self._withdraw, sending)
            raise
        return sending.sent

    async def receive(self) -> Message:
        message = await self._mailbox.get()
        self._there.call(self._channel.release, message.size)
        return message

    def close(self, reason: str = "") -> None:
        if self._ending is None:
            self._there.call(self._channel.close, reason)
            self._end(closed_here(self.peer.name, reason), drop=True)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def statistics(self) -> ChannelStatistics:
        return self._channel.statistics()

    async def probe(self) -> ProbeResult:
        return await self._thread.ask(self._channel.probe())

    # Over there.

    def _post(self, sending: _Sending) -> None:
        if sending.is_withdrawn:
            return
        try:
            sending.posting = posting = self._channel.post(sending.message, sending.sent)
        except TransportError as error:
            self._here.call(sending.settle, error)
            return
        posting.done.add_done_callback(
            lambda done: None if done.cancelled() else self._here.call(sending.settle, done.exception())
        )

    def _withdraw(self, sending: _Sending) -> None:
        sending.is_withdrawn = True
        if sending.posting is not None:
            self._channel.withdraw(sending.posting)

    # Here.

    def _end(self, ending: Ending, *, drop: bool) -> None:
        if self._ending is None:
            self._ending = ending
            self._mailbox.end(ending, drop=drop)
            self._closed.set()

    def _put(self, message: Message) -> None:
        self._mailbox.put_nowait(message)


class _Inbox:
    """Where a channel over there puts its messages, and its end."""

    def __init__(self, channel: ThreadedChannel) -> None:
        self._channel = channel

    def put_nowait(self, item: Message) -> None:
        self._channel._here.call(self._channel._put, item)

    def end(self, ending: Ending, *, drop: bool = False) -> None:
        self._channel._here.call(lambda: self._channel._end(ending, drop=drop))


def _close_all(channels: list[QuicChannel]) -> None:
    for channel in channels:
        channel.close("gave up dialling")


def _own(message: Message) -> Message:
    """The message with a body nobody else writes to: a caller who cancels may use its buffer again at once,
    while over there the message is still being read."""
    if isinstance(message.body, memoryview):
        return replace(message, body=bytes(message.body))
    return message
