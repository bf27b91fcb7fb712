"""A QUIC connection whose peer is known by its key. It touches aioquic's private parts: `check_aioquic` finds
out at start whether they are where this version had them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from ipaddress import ip_address
from ssl import CERT_NONE
from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.connection import (
    Limit,
    NetworkAddress,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicProtocolVersion
from aioquic.quic.stream import QuicStream, QuicStreamSender

from bbquic.errors import TransportError
from bbquic.transport.congestion import RATE_CONTROL, register
from bbquic.transport.ending import CloseCode, unpinned_reason
from bbquic.transport.identity import Fingerprint, Identity, fingerprint_of
from bbquic.transport.options import EndpointOptions
from bbquic.transport.printable import cut
from bbquic.transport.trains import Stamp, Train, couple_whole
from bbquic.units import Seconds

log = logging.getLogger("bbquic.transport")
logging.getLogger("quic").addHandler(logging.NullHandler())  # aioquic's: a stranger's errors are no news

ALPN = "bbquic"
WINDOW_STEP = 16  # a sixteenth of the window must be free before the sender is told of it
CONNECTION_ID_LENGTH = 8  # bytes
VERSIONS = [QuicProtocolVersion.VERSION_1]

register()


def configuration(
    identity: Identity, options: EndpointOptions, address: NetworkAddress, *, is_client: bool
) -> QuicConfiguration:
    """TLS with pinned keys: no authority, no dates, no names, no tickets. `address` is the peer's."""
    host = ip_address(address[0])
    mapped = getattr(host, "ipv4_mapped", None) or host
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[ALPN],
        certificate=identity.certificate,
        private_key=identity.private_key,
        verify_mode=CERT_NONE,  # in place of a chain, `PinnedConnection` checks the key itself
        idle_timeout=options.idle_timeout,
        connection_id_length=CONNECTION_ID_LENGTH,
        max_data=options.receive_window,
        max_stream_data=options.receive_window,  # the connection's window is what bounds memory
        max_datagram_size=options.loopback_datagram_size if mapped.is_loopback else options.datagram_size,
        congestion_control_algorithm=RATE_CONTROL if options.rate_control else "reno",
        supported_versions=list(VERSIONS),
    )


ArrivalObserver = Callable[[int, int], None]


class _Credit(Limit):
    """A receive limit that grows with what the application took; aioquic's own doubles regardless."""

    def __init__(self, limit: Limit, window: int, step: int) -> None:
        self.released = 0
        self._window = window
        self._step = step
        super().__init__(limit.frame_type, limit.name, window)

    @property
    def value(self) -> int:
        """What the peer may have sent in all. In steps, so that not every packet carries a new limit."""
        value = self._window + self.released
        return value if value - self.sent >= self._step else self.sent

    @value.setter
    def value(self, value: int) -> None:
        """aioquic doubles the limit, or adds a stream for each that ended. It does not decide here."""


class PinnedConnection(QuicConnection):
    """aioquic's connection, plus: certificates from both sides, the key checked the moment the handshake
    completes and before another frame is read, and credits that follow the reader."""

    def __init__(
        self,
        *,
        is_pinned: Callable[[Fingerprint], bool],
        options: EndpointOptions,
        configuration: QuicConfiguration,
        **accepting: bytes | None,
    ) -> None:
        """`accepting` are aioquic's connection ids of a server's side."""
        super().__init__(configuration=configuration, **accepting)  # type: ignore[arg-type]
        self._is_pinned = is_pinned
        self._outgoing: dict[int, QuicStreamSender] = {}
        self._priorities: dict[int, int] = {}  # of outgoing streams
        self.fingerprint: Fingerprint | None = None
        self.is_known = False
        self._arrivals: dict[int, int] = {}  # of streams that ended; filled by subclasses
        self.observe_arrival: ArrivalObserver | None = None  # called by subclasses that know times of arrival
        self._data_credit = _Credit(
            self._local_max_data, options.receive_window, max(1, options.receive_window // WINDOW_STEP)
        )
        self._stream_credit = _Credit(self._local_max_streams_uni, options.inbox_messages, 1)
        self._local_max_data = self._data_credit
        self._local_max_streams_uni = self._stream_credit
        self._local_max_streams_bidi.value = self._local_max_streams_bidi.sent = 0  # we use none

    # The handshake.

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if not self._is_client:
            self.tls._request_client_certificate = True

    def _handle_crypto_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        super()._handle_crypto_frame(context, frame_type, buf)
        if self._handshake_complete and not self.is_known:
            self._check_key()

    def _check_key(self) -> None:
        certificate = self.tls._peer_certificate
        if certificate is not None:
            self.fingerprint = fingerprint_of(certificate)
        if self.fingerprint is None or not self._is_pinned(self.fingerprint):
            # No stream frame can be in this packet, and no packet is read any more once this is called.
            self.close(CloseCode.UNPINNED, reason_phrase=unpinned_reason(self.fingerprint))
        else:
            self.is_known = True

    # Datagrams.

    def receive_batch(
        self, datagrams: list[bytes], address: NetworkAddress, now: float, stamps: Sequence[Stamp] = ()
    ) -> None:
        """Take datagrams that came together. `stamps` tell when, by the kernel's clock, if it is known."""
        for data in datagrams:
            self.receive_datagram(data, address, now)

    def trains_to_send(self, now: float) -> list[Train]:
        """What is to leave now."""
        return couple_whole(self.datagrams_to_send(now))

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        """Take a datagram. Whatever is in it, the worst that follows is that this connection closes."""
        if self._close_event is not None:
            return
        try:
            super().receive_datagram(data, addr, now)
        except Exception:
            log.exception("a datagram from %s port %d broke the QUIC stack", addr[0], addr[1])
            self.close(CloseCode.INTERNAL)

    def _handle_ack_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        """aioquic believes any number; one that was never sent would have all in flight declared lost."""
        start = buf.tell()
        if buf.pull_uint_var() >= self._packet_number:
            raise QuicConnectionError(
                QuicErrorCode.PROTOCOL_VIOLATION, frame_type, "it acknowledges a packet that was never sent"
            )
        buf.seek(start)
        super()._handle_ack_frame(context, frame_type, buf)

    # How it ends.

    @property
    def closing(self) -> events.ConnectionTerminated | None:
        """Why this connection closes, from the moment that is known; aioquic's event comes much later."""
        return self._close_event

    @property
    def is_closed_by_peer(self) -> bool:
        return self._state is QuicConnectionState.DRAINING

    def is_silent(self) -> bool:
        """Whether it closed because the idle timeout ran out."""
        event = self._close_event
        return (
            event is not None
            and event.error_code == QuicErrorCode.INTERNAL_ERROR
            and event.frame_type == QuicFrameType.PADDING
            and event.reason_phrase == "Idle timeout"
            and self._state is QuicConnectionState.TERMINATED
        )

    def close_with(self, code: CloseCode, reason: str) -> None:
        self.close(code, reason_phrase=cut(reason))

    # Streams out.

    def open_stream(self, priority: int) -> int:
        """A fresh unidirectional stream; it may have to wait for the peer's leave to be sent."""
        stream_id = self.get_next_available_stream_id(is_unidirectional=True)
        self.send_stream_data(stream_id, b"")
        self._outgoing[stream_id] = self._streams[stream_id].sender
        self._priorities[stream_id] = priority
        return stream_id

    def write_stream(self, stream_id: int, data: memoryview, *, end: bool) -> None:
        self.send_stream_data(stream_id, data, end_stream=end)  # type: ignore[arg-type]

    def is_acknowledged(self, stream_id: int) -> bool:
        """Whether all of a stream of ours, its end included, is with the peer."""
        sender = self._outgoing.get(stream_id)
        return sender is None or sender.is_finished

    def has_begun(self, stream_id: int) -> bool:
        """Whether anything of a stream of ours was put in a datagram."""
        sender = self._outgoing.get(stream_id)
        return sender is None or sender.highest_offset > 0

    def unacknowledged(self) -> tuple[int, int]:
        """Bytes and streams of ours that the peer has not acknowledged, sent or not."""
        total = 0
        finished = []
        for stream_id, sender in self._outgoing.items():
            if sender.is_finished or sender._reset_error_code is not None:
                finished.append(stream_id)
            else:
                total += sender._buffer_stop - sender._buffer_start
        for stream_id in finished:
            del self._outgoing[stream_id], self._priorities[stream_id]
        return total, len(self._outgoing)

    def unacknowledged_bytes(self) -> int:
        """The same bytes; unlike everything else here, any thread may ask."""
        senders = list(self._outgoing.values())
        return sum([sender._buffer_stop - sender._buffer_start for sender in senders])

    # Streams in.

    def take_arrival(self, stream_id: int) -> int | None:
        """When the datagram that ended a stream came, in ns by the kernel's clock; None where only the batch
        it came with is known. To be asked once."""
        return self._arrivals.pop(stream_id, None)

    def reset_size(self, stream_id: int) -> int:
        """Bytes a stream counted against the window when the peer reset it."""
        stream = self._streams.get(stream_id)
        return stream.receiver.highest_offset if stream is not None else 0

    def release(self, size: int) -> bool:
        """The application took one message of `size` bytes. Whether the peer should hear of new credit."""
        data, streams = self._data_credit, self._stream_credit
        data.released += size
        streams.released += 1
        few_left = streams.sent - streams.used < streams.value - streams.sent
        return data.value != data.sent or few_left

    @property
    def controller(self) -> QuicCongestionControl:
        """What decides how fast to send."""
        return self._loss._cc

    @property
    def datagram_size(self) -> int:
        """Bytes of UDP payload in a full datagram."""
        return self._max_datagram_size

    def pace_anew(self) -> None:
        """The controller changed its mind between two acknowledgements."""
        recovery = self._loss
        if recovery._rtt_initialized:
            recovery._pacer.update_rate(
                congestion_window=recovery._cc.congestion_window, smoothed_rtt=recovery._rtt_smoothed
            )

    def round_trip(self) -> tuple[Seconds, Seconds] | None:
        """Smoothed and least round trip, None before the first sample."""
        recovery = self._loss
        if not recovery._rtt_initialized:
            return None
        return Seconds(recovery._rtt_smoothed), Seconds(recovery._rtt_min)


CONNECTION_PARTS = (
    "_close_event",
    "_handshake_complete",
    "_is_client",
    "_local_max_data",
    "_local_max_streams_bidi",
    "_local_max_streams_uni",
    "_loss",
    "_packet_number",
    "_state",
    "_streams",
)
SENDER_PARTS = ("_buffer_start", "_buffer_stop", "_reset_error_code", "highest_offset", "is_finished")
RECOVERY_PARTS = ("_rtt_initialized", "_rtt_smoothed", "_rtt_min")
TLS_PARTS = ("_peer_certificate", "_request_client_certificate")


def check_aioquic(options: EndpointOptions, identity: Identity) -> None:
    """Raises: TransportError when the installed aioquic lacks what this module relies on."""
    server = PinnedConnection(
        is_pinned=lambda fingerprint: False,
        options=options,
        configuration=configuration(identity, options, ("127.0.0.1", 1), is_client=False),
        original_destination_connection_id=bytes(CONNECTION_ID_LENGTH),
    )
    stream = QuicStream(stream_id=3)
    missing = [name for name in CONNECTION_PARTS if not hasattr(server, name)]
    missing += [name for name in SENDER_PARTS if not hasattr(stream.sender, name)]
    missing += [name for name in RECOVERY_PARTS if not hasattr(server._loss, name)]
    if not missing:
        server._version = VERSIONS[0]
        server._initialize(bytes(CONNECTION_ID_LENGTH))
        missing += [name for name in TLS_PARTS if not hasattr(server.tls, name)]
    handlers: dict[int, Any] = getattr(server, "_QuicConnection__frame_handlers", {})
    for kind, ours in (
        (QuicFrameType.CRYPTO, PinnedConnection._handle_crypto_frame),
        (QuicFrameType.ACK, PinnedConnection._handle_ack_frame),
    ):
        if getattr(handlers.get(kind, (None,))[0], "__func__", None) is not ours:
            missing.append(f"the call of {ours.__name__}")
    if missing:
        raise TransportError(
            f"aioquic {version('aioquic')} is not built as bbquic expects: it lacks {', '.join(missing)}",
            hint="pip install 'aioquic>=1.7.2,<1.8'",
        )
