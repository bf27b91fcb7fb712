"""Receiving, batch by batch: header protection of all datagrams in one call, in-order STREAM frames and
DATAGRAM frames read in place. Whatever is unusual is left to aioquic's own methods, checks and all."""

from __future__ import annotations

from itertools import islice

from aioquic import tls
from aioquic.quic import events
from aioquic.quic.connection import END_STATES, QuicConnection, QuicConnectionError, QuicReceiveContext
from aioquic.quic.recovery import MAX_ACK_RANGES
from cryptography.exceptions import InvalidTag

from bbquic.transport.varint import read_varint

ONE_RTT = tls.Epoch.ONE_RTT
ACK_EVERY = 16  # packets; sooner where one is missing or late, and after aioquic's 1 ms where none follow
ID = slice(1, 9)  # where a short header has the connection id; the number follows it, in two bytes
SAMPLE = slice(13, 29)  # RFC 9001, 5.4.2: four bytes after the number's start
SHORTEST = SAMPLE.stop  # so that a packet has a frame: two bytes and the tag are left, at the least
SPIN = 0x20
STREAM, FIN, LENGTH, OFFSET = 0x08, 0x01, 0x02, 0x04  # frame type and its bits
DATAGRAM, DATAGRAM_WITH_LENGTH = 0x30, 0x31

Packet = tuple[int, int, bytes, int]  # first byte, number, frames, 16 times its place in the batch


class Intake:
    """One connection's, once its handshake is confirmed."""

    def __init__(self, connection: QuicConnection) -> None:
        self._connection = connection
        self._chunks: dict[int, list[bytes]] = {}
        self._data_limit = 0  # what the peer may have sent in all; nothing changes it while a batch is read
        self._place = 0  # of the datagram that is read, as in Packet
        self.ended: list[tuple[int, int]] = []  # streams that the last batch ended, and by which datagram
        self.unanswered = 0  # packets since the last ACK was written that ask for one
        self.packets = 0  # taken here

    def receive(self, datagrams: list[bytes], now: float) -> tuple[list[bytes], bool]:
        """Take datagrams that came from the connection's own path; those that aioquic has to look at, and
        whether every other one was genuine. May close the connection, as aioquic would."""
        self.ended.clear()
        packets, odd, genuine = self._unprotect(datagrams)
        if packets:
            self._take(packets, now)
        return odd, genuine

    def _unprotect(self, datagrams: list[bytes]) -> tuple[list[Packet], list[bytes], bool]:
        connection = self._connection
        keys = connection._cryptos[ONE_RTT].recv
        assert keys.aead is not None
        assert keys.hp is not None
        expected = connection._spaces[ONE_RTT].expected_packet_number
        decrypt, iv = keys.aead._aead.decrypt, keys.aead._iv
        host_id = connection.host_cid
        first_byte = 0x41 | keys.key_phase << 2  # short header, number of two bytes, reserved bits zero
        usual = {first: bytes([first]) + host_id for first in (first_byte, first_byte | SPIN)}
        whole = [data for data in datagrams if len(data) >= SHORTEST]
        masks = keys.hp._encryptor.update(b"".join([data[SAMPLE] for data in whole]))
        packets: list[Packet] = []
        odd: list[bytes] = []
        place = 0
        for data in whole:
            first = data[0] ^ (masks[place] & 0x1F)
            header = usual.get(first)
            if header is not None and data[ID] == host_id:
                cut = (data[9] ^ masks[place + 1]) << 8 | data[10] ^ masks[place + 2]
                number = _nearest(cut, expected)
                try:
                    frames = decrypt(
                        (iv ^ number).to_bytes(12, "big"), data[11:], header + cut.to_bytes(2, "big")
                    )
                except InvalidTag:
                    pass  # forged or damaged: as if it had never come (RFC 9001, 5.5)
                else:
                    packets.append((first, number, frames, place))
            else:
                odd.append(data)
            place += 16
        return packets, odd, len(packets) + len(odd) == len(datagrams)

    def _take(self, packets: list[Packet], now: float) -> None:
        """Read the frames of genuine packets, and note the packets as received."""
        connection = self._connection
        space = connection._spaces[ONE_RTT]
        received = space.received_packets
        eliciting, in_order = 0, True
        first_of_run = end_of_run = -1
        self._data_limit = connection._local_max_data.value
        for first, number, frames, self._place in packets:
            if number in received:
                continue
            self.packets += 1
            if number >= space.expected_packet_number:
                space.expected_packet_number = number + 1
            if number > connection._spin_highest_pn:
                connection._spin_highest_pn = number
                connection._spin_bit = (first & SPIN == 0) is connection._is_client
            is_eliciting = self._read(frames, now)
            if is_eliciting is None:
                break  # the connection closes: what it received matters no longer
            eliciting += is_eliciting
            received.add(number)
            if number != space.largest_received_packet + 1:
                in_order = False
            if number > space.largest_received_packet:
                space.largest_received_packet, space.largest_received_time = number, now
            if number != end_of_run:
                if end_of_run >= 0:
                    space.ack_queue.add(first_of_run, end_of_run)
                first_of_run = number
            end_of_run = number + 1
        if end_of_run >= 0:
            space.ack_queue.add(first_of_run, end_of_run)
            self._note(eliciting, in_order, now)
        self._emit()

    def _note(self, eliciting: int, in_order: bool, now: float) -> None:
        """What any received packet resets, and whether to answer now or later."""
        connection = self._connection
        space = connection._spaces[ONE_RTT]
        while len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        connection._close_at = now + connection._idle_timeout()
        connection._ack_eliciting_sent_since_receipt = False
        if not eliciting:
            return
        self.unanswered += eliciting
        if self.unanswered >= ACK_EVERY or not in_order:
            space.ack_at = now
        elif space.ack_at is None:
            space.ack_at = now + connection._ack_delay

    def _read(self, frames: bytes, now: float) -> bool | None:
        """Whether a packet asks for an acknowledgement; None when it makes the connection close."""
        try:
            read = self._read_in_place(frames)
        except IndexError:  # a frame that ends too soon: aioquic knows what to call it
            read = 0
        if read == len(frames):
            return True
        self._emit()
        connection = self._connection
        reported = len(connection._events)
        context = QuicReceiveContext(
            epoch=ONE_RTT,
            host_cid=connection.host_cid,
            network_path=connection._network_paths[0],
            quic_logger_frames=None,
            time=now,
            version=None,
        )
        try:
            is_eliciting, _ = connection._payload_received(context, frames[read:])
        except QuicConnectionError as error:
            connection.close(error.error_code, error.frame_type, error.reason_phrase)
        for event in islice(connection._events, reported, None):
            if isinstance(event, events.StreamDataReceived) and event.end_stream:
                self.ended.append((event.stream_id, self._place >> 4))
        if connection._state in END_STATES or connection._close_pending:
            return None
        return is_eliciting or read > 0

    def _read_in_place(self, frames: bytes) -> int:
        """Take frames until one is unusual; where that one begins."""
        end, place = len(frames), 0
        while place < end:
            kind = frames[place]
            if kind & 0xF8 == STREAM:
                after = self._read_stream(frames, place, kind)
            elif kind in (DATAGRAM, DATAGRAM_WITH_LENGTH):
                after = self._read_datagram(frames, place, kind)
            else:
                return place
            if after == place:
                return place
            place = after
        return place

    def _read_stream(self, frames: bytes, place: int, kind: int) -> int:
        """Take the STREAM frame at `place`, when it is the next piece of a stream that is known, and within
        all limits; where the next frame is, or `place`."""
        stream_id, at = read_varint(frames, place + 1)
        offset, at = read_varint(frames, at) if kind & OFFSET else (0, at)
        size, at = read_varint(frames, at) if kind & LENGTH else (len(frames) - at, at)
        connection = self._connection
        stream = connection._streams.get(stream_id)
        stop = offset + size
        if stream is None or size <= 0 or at + size > len(frames) or stop > stream.max_stream_data_local:
            return place
        receiver = stream.receiver
        if offset != receiver._buffer_start or receiver._buffer or receiver.is_finished:
            return place  # in the buffer is all that came too early, the end of the stream included
        fresh = stop - receiver.highest_offset
        if fresh > 0:
            limit = connection._local_max_data
            if limit.used + fresh > self._data_limit:
                return place
            limit.used += fresh
            receiver.highest_offset = stop
        receiver._buffer_start = stop
        chunks = self._chunks.get(stream_id)
        if chunks is None:
            chunks = self._chunks[stream_id] = []
        chunks.append(frames[at : at + size])
        if kind & FIN:
            receiver._final_size, receiver.is_finished = stop, True
            del self._chunks[stream_id]
            self.ended.append((stream_id, self._place >> 4))
            self._report(stream_id, chunks, end=True)
        return at + size

    def _read_datagram(self, frames: bytes, place: int, kind: int) -> int:
        """Take the DATAGRAM frame at `place`; where the next frame is, or `place` when it is not allowed."""
        limit = self._connection.configuration.max_datagram_frame_size
        at = place + 1
        size = len(frames) - at
        if kind == DATAGRAM_WITH_LENGTH:
            size, at = read_varint(frames, at)
        if limit is None or at + size > len(frames) or at + size - place > limit:
            return place
        self._connection._events.append(events.DatagramFrameReceived(data=frames[at : at + size]))
        return at + size

    def _emit(self) -> None:
        """Report what came of each stream as one event, before anything else is reported."""
        if self._chunks:
            for stream_id, chunks in self._chunks.items():
                self._report(stream_id, chunks, end=False)
            self._chunks.clear()

    def _report(self, stream_id: int, chunks: list[bytes], *, end: bool) -> None:
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._connection._events.append(
            events.StreamDataReceived(data=data, end_stream=end, stream_id=stream_id)
        )


def _nearest(cut: int, expected: int) -> int:
    """The packet number that ends in two bytes `cut` and is nearest to the one expected (RFC 9000, A.3)."""
    number = expected + ((cut - expected + 0x7FFF) & 0xFFFF) - 0x7FFF
    return number if number >= 0 else number + 0x10000
