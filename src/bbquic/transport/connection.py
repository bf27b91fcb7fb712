"""A channel over one QUIC connection: its hello, its streams, its clocks and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from aioquic.quic import events

from bbquic.errors import (
    ConnectionLost,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
    TransportError,
)
from bbquic.transport.arrival import monotonic_time
from bbquic.transport.channel import ChannelStatistics, Role, Sent
from bbquic.transport.ending import (
    CloseCode,
    Ending,
    bad_message,
    broken,
    closed_by_peer,
    closed_here,
    silent,
    wrong_key,
)
from bbquic.transport.identity import Fingerprint, Peer
from bbquic.transport.link_memory import LinkMemory
from bbquic.transport.mailbox import Mailbox
from bbquic.transport.message import Kind, Message, MessageDecoder
from bbquic.transport.options import EndpointOptions
from bbquic.transport.outbox import Outbox, Posting
from bbquic.transport.probe import ProbeResult
from bbquic.transport.quic import PinnedConnection
from bbquic.transport.sense import LinkSense, probe_message
from bbquic.transport.session import Hello, Session
from bbquic.transport.trains import Stamp, Train
from bbquic.units import Bytes, Seconds

log = logging.getLogger("bbquic.transport")


class Host(Protocol):
    """The endpoint a connection belongs to, as the connection sees it."""

    name: str
    options: EndpointOptions
    hello: Hello
    links: LinkMemory | None

    def send_train(self, train: Train) -> None: ...

    def find_peer(self, fingerprint: Fingerprint) -> Peer | None: ...

    def add_connection_id(self, connection_id: bytes, channel: QuicChannel) -> None: ...

    def drop_connection_id(self, connection_id: bytes) -> None: ...

    def established(self, channel: QuicChannel) -> None:
        """Hellos are exchanged, and the peer has ours."""

    def refused_stranger(self, address: Any, fingerprint: Fingerprint | None) -> None:
        """Whoever dialled showed a key that is nobody's."""

    def forget(self, channel: QuicChannel) -> None:
        """The QUIC connection is over; its ids mean nothing now."""


class Inbox(Protocol):
    """Where a channel's messages go."""

    def put_nowait(self, item: Message) -> None: ...

    def end(self, ending: Ending, *, drop: bool = False) -> None: ...


class QuicChannel:
    """See `bbquic.transport.channel.Channel`. Driven by its host's datagrams and its own timers."""

    def __init__(self, host: Host, quic: PinnedConnection, dialled: Peer | None = None) -> None:
        """`dialled` is the peer we dial, None when we were dialled: then the key tells who it is."""
        self._host = host
        self._options = host.options
        self._loop = asyncio.get_running_loop()
        self._quic = quic
        self._is_dialled = dialled is not None
        self._peer = dialled
        self._who = dialled.name if dialled is not None else "an unknown machine"
        self._session: Session | None = None
        self._hello_posting: Posting | None = None
        self._decoders: dict[int, MessageDecoder] = {}
        self._mailbox: Mailbox[Message] = Mailbox()
        self._inbox: Inbox = self._mailbox
        self._outbox = Outbox(host.options, quic, self._flush_soon)
        self._sense = LinkSense(quic, host.links)
        quic.observe_arrival = self._sense.observe
        self._ending: Ending | None = None
        self._is_established = False
        self._settled = asyncio.Event()  # established, or ended
        self._closed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._flush_handle: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if dialled is None:
            self._deadline = self._loop.call_later(host.options.handshake_timeout, self._give_up)
        self._keep_alive: asyncio.TimerHandle | None = None
        self._last_stamp: int | None = None  # of the datagrams that came last, by the kernel's clock
        self._sent = self._received = 0
        self._bytes_sent = self._bytes_received = 0

    # The channel, as its user sees it.

    @property
    def peer(self) -> Peer:
        assert self._peer is not None
        return self._peer

    @property
    def role(self) -> Role:
        assert self._session is not None
        return self._session.role

    @property
    def is_closed(self) -> bool:
        return self._ending is not None

    @property
    def is_dialled(self) -> bool:
        """Whether this side opened it."""
        return self._is_dialled

    async def send(self, message: Message) -> Sent:
        posting = self.post(message)
        try:
            await posting.done
        except asyncio.CancelledError:
            self.withdraw(posting)
            raise
        return posting.sent

    async def receive(self) -> Message:
        message = await self._mailbox.get()
        self.release(message.size)
        return message

    def close(self, reason: str = "") -> None:
        self._close(closed_here(self._who, reason), CloseCode.DONE, reason)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def statistics(self) -> ChannelStatistics:
        """Any thread may ask."""
        round_trip = self._quic.round_trip()
        return ChannelStatistics(
            messages_sent=self._sent,
            messages_received=self._received,
            bytes_sent=Bytes(self._bytes_sent),
            bytes_received=Bytes(self._bytes_received),
            unacknowledged=Bytes(self._quic.unacknowledged_bytes()),
            rtt=round_trip[0] if round_trip else None,
            min_rtt=round_trip[1] if round_trip else None,
            link=self._sense.estimate(self._loop.time()),
        )

    async def probe(self) -> ProbeResult:
        probe = self._sense.begin_probe(self._loop.time())
        while (result := probe.result(self._loop.time())) is None:
            size = probe.next_burst(self._loop.time())
            if size:
                await self.send(probe_message(size))
            await self._sense.wait_report(Seconds(max(0.0, probe.get_timer() - self._loop.time())))
        return result

    # The halves of `send` and `receive`, for who waits elsewhere.

    def post(self, message: Message, sent: Sent | None = None) -> Posting:
        """Start to send. Its `done` is set as `send` would return or raise; `sent` is the one to fill in.

        Raises: ConnectionLost.
        """
        if self._ending is not None:
            raise self._ending.error()
        posting = self._outbox.post(message, sent)
        posting.done.add_done_callback(lambda done: self._count(message.size, done))
        return posting

    def withdraw(self, posting: Posting) -> None:
        """Give a message up: unless it was handed over by now, it never arrives."""
        self._outbox.withdraw(posting)

    def forward(self, inbox: Inbox) -> None:
        """Messages go to another inbox, those that wait first. Whoever reads them there calls `release`."""
        while self._mailbox:
            inbox.put_nowait(self._mailbox.get_nowait())
        if self._ending is not None:
            inbox.end(self._ending)
        self._inbox = inbox

    def release(self, size: int) -> None:
        """A message of so many bytes was read: the peer may send as much again."""
        if self._quic.release(size):
            self._flush_soon()

    # The channel, as its host drives it.

    def dial(self, address: Any) -> None:
        self._quic.connect(address, now=self._loop.time())
        self._transmit()

    async def wait_established(self) -> None:
        """Returns once both hellos are known to both. Raises: TransportError when that cannot be."""
        await self._settled.wait()
        if self._ending is not None:
            raise self._ending.error()

    def receive_batch(self, datagrams: list[bytes], address: Any, stamps: Sequence[Stamp]) -> None:
        """Take datagrams from one address; `flush` when all that came is through."""
        self._last_stamp = stamps[-1][0] if stamps else None
        self._quic.receive_batch(datagrams, address, self._loop.time(), stamps)

    def flush(self) -> None:
        """Handle what came, write what may go, send it."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        event = self._quic.next_event()
        while event is not None:
            self._handle(event)
            event = self._quic.next_event()
        closing = self._quic.closing
        if closing is not None and self._ending is None:
            self._note(closing)
        self._settle()
        if self._ending is None:
            if self._session is not None:
                for report in self._sense.reports():
                    self._outbox.post(report)
            self._outbox.pump()
        self._transmit()

    def refuse(self, code: CloseCode, reason: str) -> None:
        """Close from the host's side, the peer being told why."""
        self._close(closed_here(self._who, reason), code, reason)

    def abandon(self) -> None:
        """The socket is going: no timer of ours may outlive it."""
        self.close("the endpoint was closed")
        for handle in (self._timer, self._flush_handle):
            if handle is not None:
                handle.cancel()
        self._timer = self._timer_at = self._flush_handle = None

    # Events.

    def _handle(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.StreamDataReceived):
            self._receive_untrusted(event)
        elif isinstance(event, events.HandshakeCompleted):
            self._start_session()
        elif isinstance(event, events.StreamReset):
            self._decoders.pop(event.stream_id, None)
            self._quic.release(self._quic.reset_size(event.stream_id))
        elif isinstance(event, events.StopSendingReceived):
            error = RemoteProtocolError("it stopped a stream, which no bbquic does")
            self._close(bad_message(self._who, error), CloseCode.BAD_MESSAGE, str(error))
        elif isinstance(event, events.ConnectionIdIssued):
            self._host.add_connection_id(event.connection_id, self)
        elif isinstance(event, events.ConnectionIdRetired):
            self._host.drop_connection_id(event.connection_id)
        elif isinstance(event, events.ConnectionTerminated):
            self._note(event)
            self._host.forget(self)

    def _start_session(self) -> None:
        if not self._quic.is_known or self._ending is not None:
            return  # it is being closed for its key
        assert self._quic.fingerprint is not None
        peer = self._peer or self._host.find_peer(self._quic.fingerprint)
        assert peer is not None
        self._peer, self._who = peer, peer.name
        self._sense.recall(peer, self._quic.fingerprint, self._loop.time())
        self._session = Session(self._host.hello, name=self._host.name, peer=peer.name)
        self._hello_posting = self._outbox.post(self._session.hello())

    def _receive_untrusted(self, event: events.StreamDataReceived) -> None:
        if self._session is None or self._ending is not None:
            return
        try:
            decoder = self._decoders.get(event.stream_id)
            if decoder is None:
                decoder = MessageDecoder(self._options.receive_window)
                self._decoders[event.stream_id] = decoder
            decoder.feed_untrusted(event.data)
            if event.end_stream:
                del self._decoders[event.stream_id]
                stamp = self._quic.take_arrival(event.stream_id) or self._last_stamp
                message = decoder.finish_untrusted(monotonic_time(stamp))
                if message.kind is Kind.HELLO:
                    self._quic.release(message.size)
                for ready in self._session.receive_untrusted(message):
                    self._take_untrusted(ready)
        except RemoteProtocolError as error:
            self._close(bad_message(self._who, error), CloseCode.BAD_MESSAGE, str(error))
        except PeerRefused as error:
            self._close(Ending(PeerRefused, str(error), error.hint), CloseCode.REFUSED, str(error))

    def _take_untrusted(self, message: Message) -> None:
        """A whole message: the channel's own business, or its user's."""
        if message.kind is Kind.RATE:
            self._sense.take_report_untrusted(message, self._loop.time())
        if message.kind in (Kind.RATE, Kind.PROBE):
            self.release(message.size)
            return
        self._received += 1
        self._bytes_received += message.size
        self._inbox.put_nowait(message)

    def _settle(self) -> None:
        """Notice that both hellos are known to both."""
        if self._is_established or self._ending is not None or self._session is None:
            return
        posting = self._hello_posting
        assert posting is not None
        has_ours = posting.stream_id is not None and self._quic.is_acknowledged(posting.stream_id)
        if self._session.peer_hello is None or not has_ours:
            return
        self._is_established = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._keep_alive = self._loop.call_later(self._options.keep_alive, self._ping)
        self._settled.set()
        self._host.established(self)

    # The end.

    def _note(self, event: events.ConnectionTerminated) -> None:
        """The QUIC connection ends and we did not say so: find out why."""
        if self._ending is not None:
            return
        reason, fingerprint = event.reason_phrase, self._quic.fingerprint
        if self._quic.is_silent():
            ending = silent(self._who, self._options.idle_timeout)
        elif event.frame_type is not None:
            ending = broken(self._who, event.error_code, reason)
        elif self._quic.is_closed_by_peer:
            ending = closed_by_peer(self._who, event.error_code, reason)
        elif event.error_code == CloseCode.UNPINNED:
            ending = wrong_key(self._who, fingerprint)
            if not self._is_dialled:
                self._host.refused_stranger(self._quic.get_peer_address(), fingerprint)
        else:
            ending = broken(self._who, event.error_code, reason)
        self._end(ending)

    def _close(self, ending: Ending, code: CloseCode, reason: str) -> None:
        if self._ending is not None:
            return
        self._quic.close_with(code, reason)
        drop = ending.error_type is ConnectionLost  # closed by its owner, who reads no more
        self._end(ending, drop=drop)
        self._transmit()

    def _end(self, ending: Ending, *, drop: bool = False) -> None:
        self._ending = ending
        log.debug("%s", ending.text)
        if self._peer is not None and self._quic.fingerprint is not None and self._session is not None:
            self._sense.remember(self._peer, self._quic.fingerprint, self._loop.time())
        self._inbox.end(ending, drop=drop)
        self._outbox.end(ending)
        self._decoders.clear()
        for handle in (self._deadline, self._keep_alive):
            if handle is not None:
                handle.cancel()
        self._settled.set()
        self._closed.set()

    def _give_up(self) -> None:
        timeout = self._options.handshake_timeout
        self.refuse(CloseCode.NO_HELLO, f"handshake and hello took over {timeout:.3g} s")

    # Clocks and datagrams.

    def _count(self, size: int, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._sent += 1
            self._bytes_sent += size

    def _ping(self) -> None:
        self._quic.send_ping(0)
        self._transmit()
        self._keep_alive = self._loop.call_later(self._options.keep_alive, self._ping)

    def _flush_soon(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self.flush)

    def _transmit(self) -> None:
        trains = self._quic.trains_to_send(now=self._loop.time())
        if trains:
            self._outbox.note_begun(self._loop.time())
        for train in trains:
            self._host.send_train(train)
        timer_at = self._quic.get_timer()
        if timer_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = timer_at
        if timer_at is not None:
            self._timer = self._loop.call_at(timer_at, self._on_timer)

    def _on_timer(self) -> None:
        now = max(self._loop.time(), self._timer_at or 0.0)
        self._timer = self._timer_at = None
        self._quic.handle_timer(now=now)
        self.flush()


def failed_dial(error: TransportError, peer: Peer) -> TransportError:
    """What a connection that ended before it was established means to the one who dialled."""
    if isinstance(error, PeerRefused):
        return error
    if isinstance(error, RemoteProtocolError):
        return PeerRefused(error.message, hint=error.hint)
    return PeerUnreachable(error.message, hint=f"is `bbquic node` running on {peer.name}?")
