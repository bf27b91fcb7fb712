"""Sending, many packets a call: STREAM and DATAGRAM frames sealed one after the other, header protection for
all of them in one call, straight into trains."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from aioquic import tls
from aioquic.quic.connection import QuicConnection
from aioquic.quic.stream import QuicStream

from bbquic.transport.recovery import FastRecovery, SentFrames
from bbquic.transport.trains import MOST_BYTES, Train, couple
from bbquic.transport.varint import encode_varint

ONE_RTT = tls.Epoch.ONE_RTT
TAG = 16  # bytes of authentication tag
NUMBER = 2  # bytes of packet number in a header, as aioquic's: right for up to 32,768 packets in flight
STREAM, FIN = 0x0E, 0x01  # STREAM with offset and length
LENGTH = 2  # bytes of a STREAM frame's length
DATAGRAM = 0x31  # with length
LARGEST_FRAME = 16_383  # bytes; what LENGTH can say


class Packetiser:
    """Makes the packets of one connection, whose handshake is confirmed."""

    def __init__(self, connection: QuicConnection, recovery: FastRecovery) -> None:
        self._connection = connection
        self._recovery = recovery
        self.packets = 0  # made here

    def trains(self, streams: Iterable[QuicStream], now: float) -> list[Train]:
        """What may leave now of the DATAGRAM frames that wait, and of `streams`, the first of them first.

        Where the pacer alone holds some back, `_pacing_at` tells aioquic's `get_timer` when to come again.
        """
        connection, recovery = self._connection, self._recovery
        connection._pacing_at = None
        room = recovery.congestion_window - recovery.bytes_in_flight
        if room < connection._max_datagram_size:
            return []  # an acknowledgement will come, or the probe timeout
        flight = _Flight(connection, now, min(room, recovery.pacer.allowance(now)))
        has_room = flight.write_datagrams()
        for stream in streams:
            if not has_room:
                break
            has_room = flight.write_stream(stream)
        recovery.pacer.consume(flight.size)
        if not has_room and room - flight.size >= connection._max_datagram_size:
            connection._pacing_at = recovery.pacer.next_time(now)
        if not flight.sent:
            return []
        self.packets += len(flight.sent)
        recovery.on_batch_sent(flight.sent, connection._spaces[ONE_RTT], now)
        connection._packet_number += len(flight.sent)
        connection._network_paths[0].bytes_sent += flight.size
        if not connection._ack_eliciting_sent_since_receipt:
            connection._close_at = now + connection._idle_timeout()  # RFC 9000, 10.1
            connection._ack_eliciting_sent_since_receipt = True
        limit = recovery.pacer.quantum if recovery.pacer.rate else MOST_BYTES
        return couple(flight.protected(), connection._network_paths[0].addr, limit)


class _Flight:
    """Packets that leave together."""

    def __init__(self, connection: QuicConnection, now: float, budget: int) -> None:
        pair = connection._cryptos[ONE_RTT]
        if pair._update_key_requested:
            pair._update_key("local_update")
        keys = pair.send
        assert keys.aead is not None
        assert keys.hp is not None
        self._connection = connection
        self._now = now
        self._budget = budget
        self._encrypt, self._iv = keys.aead._aead.encrypt, keys.aead._iv
        self._mask = keys.hp._encryptor.update
        self._peer_id = connection._peer_cid.cid
        self._first = 0x40 | connection._spin_bit << 5 | pair.key_phase << 2 | NUMBER - 1
        self._header = b"%c%b" % (self._first, self._peer_id)
        self._overhead = len(self._header) + NUMBER + TAG
        self._sealed: list[tuple[bytes, bytes]] = []  # a number's two bytes, the rest of the packet
        self.sent: list[SentFrames] = []
        self.size = 0

    def write_datagrams(self) -> bool:
        """Whether there is room for more."""
        waiting = self._connection._datagrams_pending
        while waiting:
            frame = b"%c%b%b" % (DATAGRAM, encode_varint(len(waiting[0])), waiting[0])
            size = self._overhead + len(frame)
            if self.size + size > self._budget:
                return False
            waiting.popleft()
            self._seal(frame, size)
        return True

    def write_stream(self, stream: QuicStream) -> bool:
        """Write what the peer's limits allow. Whether there is room for more."""
        sender = stream.sender
        has_room = True
        while has_room and len(sender._pending):
            part = sender._pending[0]
            credit = self._connection._remote_max_data - self._connection._remote_max_data_used
            stop = min(part.stop, sender.highest_offset + credit, stream.max_stream_data_remote)
            if stop <= part.start:
                return True  # the peer's limit, not ours: other streams may have lost pieces to send again
            has_room = self._write_range(stream, part.start, stop)
        if has_room and sender._pending_eof and not len(sender._pending):
            has_room = self._write_end(stream)
        if not len(sender._pending) and not sender._pending_eof:
            sender.buffer_is_empty = True
        return has_room

    def _write_range(self, stream: QuicStream, start: int, stop: int) -> bool:
        """Write bytes of a stream, of which none is acknowledged. Whether there is room for more."""
        sender = stream.sender
        stream_id = encode_varint(stream.stream_id or 0)
        usual, last = bytes([STREAM]) + stream_id, bytes([STREAM | FIN]) + stream_id
        largest = self._connection._max_datagram_size - self._overhead - len(usual) - LENGTH
        place, has_room = start, True
        with memoryview(sender._buffer) as buffer:
            while place < stop:
                offset = encode_varint(place)
                length = min(stop - place, largest - len(offset), LARGEST_FRAME)
                size = self._overhead + len(usual) + len(offset) + LENGTH + length
                if self.size + size > self._budget:
                    has_room = False
                    break
                fin = place + length == sender._buffer_fin
                head = (last if fin else usual) + offset + (0x4000 | length).to_bytes(LENGTH, "big")
                at = place - sender._buffer_start
                sent = self._seal(head + buffer[at : at + length], size)
                sent.sender, sent.start, sent.stop, sent.fin = sender, place, place + length, fin
                place += length
        self._account(stream, start, place)
        return has_room

    def _account(self, stream: QuicStream, start: int, stop: int) -> None:
        sender = stream.sender
        if stop > start:
            sender._pending.subtract(start, stop)
        if stop > sender.highest_offset:
            self._connection._remote_max_data_used += stop - sender.highest_offset
            sender.highest_offset = stop
        if stop > start and stop == sender._buffer_fin:
            sender._pending_eof = False

    def _write_end(self, stream: QuicStream) -> bool:
        """Write a frame that has no bytes and ends its stream. Whether there was room."""
        sender = stream.sender
        stop = sender._buffer_fin
        assert stop is not None
        head = b"%c%b%b\x40\x00" % (STREAM | FIN, encode_varint(stream.stream_id or 0), encode_varint(stop))
        size = self._overhead + len(head)
        if self.size + size > self._budget:
            return False
        sent = self._seal(head, size)
        sent.sender, sent.start, sent.stop, sent.fin = sender, stop, stop, True
        sender._pending_eof = False
        return True

    def _seal(self, frames: bytes, size: int) -> SentFrames:
        number = self._connection._packet_number + len(self.sent)
        short = (number & 0xFFFF).to_bytes(NUMBER, "big")
        body = self._encrypt((self._iv ^ number).to_bytes(12, "big"), frames, self._header + short)
        self._sealed.append((short, body))
        sent = SentFrames(number, self._now, size)
        self.sent.append(sent)
        self.size += size
        return sent

    def protected(self) -> list[bytes]:
        """Each packet's header and the rest of it."""
        masks = self._mask(b"".join([body[2:18] for _, body in self._sealed]))
        first, peer_id = self._first, self._peer_id
        pack = Struct(f"!B{len(peer_id)}sBB").pack
        parts: list[bytes] = []
        place = 0
        for short, body in self._sealed:
            protected = first ^ (masks[place] & 0x1F)
            parts.append(pack(protected, peer_id, short[0] ^ masks[place + 1], short[1] ^ masks[place + 2]))
            parts.append(body)
            place += 16
        return parts
