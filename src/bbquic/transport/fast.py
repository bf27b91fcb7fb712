"""The connection with fast paths: aioquic's bookkeeping for what is rare, ours for what comes in thousands.

`Intake` receives, `Packetiser` sends, `FastRecovery` counts acknowledgements and `Pacer` holds back. They
work on aioquic's own state, so that each packet may take either way. `selfcheck` proves at start that this
state is as they expect it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from aioquic.quic.connection import NetworkAddress, QuicConnectionState
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from bbquic.transport.ending import CloseCode
from bbquic.transport.intake import ONE_RTT, Intake
from bbquic.transport.packetiser import Packetiser
from bbquic.transport.quic import PinnedConnection
from bbquic.transport.recovery import FastRecovery
from bbquic.transport.trains import Stamp, Train, arrival_of, couple_whole

log = logging.getLogger("bbquic.transport")

STEP = 64  # datagrams read at once: half of aioquic's window for telling duplicates, so that none looks old
LEAST_URGENT = 1 << 30  # for a stream nobody gave a priority


class FastConnection(PinnedConnection):
    """A PinnedConnection, and all it promises, with cheap packets once the handshake is confirmed.

    `observe_arrival`, where set, is told of every group of genuine 1-RTT datagrams that the kernel handed
    over as one: its time of arrival in ns by the kernel's clock, and its bytes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        stock = self._loss
        self._recovery = FastRecovery(
            congestion_control_algorithm=self._configuration.congestion_control_algorithm,
            initial_rtt=self._configuration.initial_rtt,
            max_datagram_size=self._max_datagram_size,
            peer_completed_address_validation=stock.peer_completed_address_validation,
            send_probe=self._send_probe,
            logger=self._logger,
        )
        self._loss = self._recovery
        self._intake = Intake(self)
        self._packetiser = Packetiser(self, self._recovery)
        self._has_keys = False

    @property
    def fast_packets(self) -> tuple[int, int]:
        """Packets sent and received the fast way."""
        return self._packetiser.packets, self._intake.packets

    def receive_batch(
        self, datagrams: list[bytes], address: NetworkAddress, now: float, stamps: Sequence[Stamp] = ()
    ) -> None:
        if not self._is_fast() or address != self._network_paths[0].addr:
            super().receive_batch(datagrams, address, now)
            return
        all_genuine = True
        for start in range(0, len(datagrams), STEP):
            odd, genuine = self._receive_step(datagrams[start : start + STEP], address, now)
            all_genuine = all_genuine and genuine and not odd
            if stamps:
                for stream_id, place in self._intake.ended:
                    self._arrivals[stream_id] = arrival_of(start + place, datagrams, stamps)
            for data in odd:
                self.receive_datagram(data, address, now)
            if self._close_event is not None:
                return
        if self.observe_arrival is not None and all_genuine:
            for time, size in stamps:
                self.observe_arrival(time, size)

    def _receive_step(
        self, datagrams: list[bytes], address: NetworkAddress, now: float
    ) -> tuple[list[bytes], bool]:
        try:
            return self._intake.receive(datagrams, now)
        except Exception:  # as in `receive_datagram`: the worst that follows is that this connection closes
            log.exception("datagrams from %s port %d broke the QUIC stack", address[0], address[1])
            self.close(CloseCode.INTERNAL)
            return [], False

    def trains_to_send(self, now: float) -> list[Train]:
        if not self._is_fast():
            return super().trains_to_send(now)
        self._discard_finished()
        control = self._control_trains(now) if self._has_control(now) else []
        streams = self._ready_streams()
        if not self._is_fast() or not (streams or self._datagrams_pending):
            self._pacing_at = None
            return control
        return control + self._packetiser.trains(streams, now)

    def _is_fast(self) -> bool:
        return (
            (self._has_keys or self._find_keys())
            and self._state is QuicConnectionState.CONNECTED
            and self._close_event is None
            and self._network_paths[0].is_validated
        )

    def _find_keys(self) -> bool:
        """Whether the handshake is over, the peer known, and the cipher one whose header protection takes
        many packets at once."""
        self._has_keys = self._handshake_confirmed and self.is_known and self._quic_logger is None
        if self._has_keys:
            hp = self._cryptos[ONE_RTT].recv.hp
            self._has_keys = hp is not None and not hp._is_chacha20
        return self._has_keys

    # Streams out.

    def _ready_streams(self) -> list[QuicStream]:
        """Streams with something to send, by priority, then by age: one message is sent whole before the
        next of its kind begins."""
        ready = [
            stream
            for stream in self._streams_queue
            if not stream.sender.buffer_is_empty and not stream.is_blocked
        ]
        if len(ready) > 1:
            ready.sort(key=self._urgency)
        return ready

    def _urgency(self, stream: QuicStream) -> tuple[int, int]:
        stream_id = stream.stream_id or 0
        return self._priorities.get(stream_id, LEAST_URGENT), stream_id

    def _discard_finished(self) -> None:
        """What aioquic does with each packet it writes; but that leave for new streams follows the reader."""
        finished = [stream for stream in self._streams_queue if stream.is_finished]
        if not finished:
            return
        for stream in finished:
            del self._streams[stream.stream_id or 0]
        self._streams_queue = [stream for stream in self._streams_queue if not stream.is_finished]

    # Everything else, which aioquic writes.

    def _has_control(self, now: float) -> bool:
        """Whether aioquic has anything to say that is not stream data: all that `_write_application` and
        `datagrams_to_send` look at."""
        space = self._spaces[ONE_RTT]
        return (
            (space.ack_at is not None and space.ack_at <= now)
            or self._probe_pending
            or self._handshake_done_pending
            or self._streams_blocked_pending
            or bool(self._ping_pending or self._retire_connection_ids)
            or len(self._network_paths) > 1
            or bool(self._network_paths[0].remote_challenges)
            or (self._is_client and self._remote_preferred_address is not None)
            or not self._crypto_streams[ONE_RTT].sender.buffer_is_empty
            or not all(host_id.was_sent for host_id in self._host_cids)
            or self._has_new_limits()
            or any(map(_has_stream_control, self._streams_queue))
        )

    def _has_new_limits(self) -> bool:
        data = self._local_max_data
        if data.value != data.sent:
            return True
        return any(
            limit.value != limit.sent and limit.sent - limit.used < limit.value - limit.sent
            for limit in (self._local_max_streams_uni, self._local_max_streams_bidi)
        )

    def _control_trains(self, now: float) -> list[Train]:
        """All but stream data and DATAGRAM frames, unpaced: it is little, and much waits for it."""
        queue, waiting = self._streams_queue, self._datagrams_pending
        self._streams_queue = [s for s in queue if s.sender.reset_pending or s.receiver.stop_pending]
        self._datagrams_pending = deque()
        self._recovery.pacer.is_open = True
        try:
            return couple_whole(self.datagrams_to_send(now))
        finally:
            self._recovery.pacer.is_open = False
            self._streams_queue, self._datagrams_pending = queue, waiting

    def _write_ack_frame(self, builder: QuicPacketBuilder, space: QuicPacketSpace, now: float) -> None:
        super()._write_ack_frame(builder, space, now)
        self._intake.unanswered = 0


def _has_stream_control(stream: QuicStream) -> bool:
    """Whether a reset, a stop or a new limit of a stream is to be told."""
    limit = stream.max_stream_data_local
    receiver = stream.receiver
    return (
        stream.sender.reset_pending
        or receiver.stop_pending
        or limit != stream.max_stream_data_local_sent
        or (limit > 0 and receiver.highest_offset * 2 > limit)
    )
