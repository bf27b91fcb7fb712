"""Which connection a datagram belongs to, and whether one from a new address may begin a connection."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler

from bbquic.transport.connection import QuicChannel
from bbquic.transport.ending import CloseCode
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import CONNECTION_ID_LENGTH, VERSIONS
from bbquic.transport.trains import Batch, Stamp

log = logging.getLogger("bbquic.transport")

SMALLEST_INITIAL = 1200  # bytes of datagram (RFC 9000, 14.1); smaller ones amplify
FORM_BITS, SHORT_HEADER = 0xC0, 0x40  # of a datagram's first byte
ID = slice(1, 1 + CONNECTION_ID_LENGTH)  # in a short header

Accept = Callable[[Any, bytes, bytes | None], QuicChannel]


class Dispatcher:
    """The table of connection ids of one socket, and the limits on strangers."""

    def __init__(self, options: EndpointOptions, send: Callable[[bytes, Any], None], accept: Accept) -> None:
        """`accept` makes the channel for a new connection, given the address it comes from, and aioquic's
        original destination and retry source connection ids."""
        self._options = options
        self._send = send
        self._accept = accept
        self._loop = asyncio.get_running_loop()
        self._by_id: dict[bytes, QuicChannel] = {}
        self._hosts: dict[QuicChannel, str] = {}  # of accepted channels, by IP address
        self._unfinished: set[QuicChannel] = set()
        self._channels: set[QuicChannel] = set()
        self._retry = QuicRetryTokenHandler()

    @property
    def channels(self) -> list[QuicChannel]:
        return list(self._channels)

    def has_room(self) -> bool:
        return len(self._channels) < self._options.connections

    def add(self, connection_id: bytes, channel: QuicChannel) -> None:
        self._by_id[connection_id] = channel
        self._channels.add(channel)

    def drop(self, connection_id: bytes) -> None:
        self._by_id.pop(connection_id, None)

    def finished(self, channel: QuicChannel) -> None:
        """Its handshake is through, its hello known: it counts no longer as a stranger."""
        self._unfinished.discard(channel)

    def forget(self, channel: QuicChannel) -> None:
        self._by_id = {key: value for key, value in self._by_id.items() if value is not channel}
        self._channels.discard(channel)
        self._unfinished.discard(channel)
        self._hosts.pop(channel, None)

    def receive(self, batch: Batch) -> None:
        """Hand datagrams on, those of one connection that came together in one go; then let each connection
        concerned answer once."""
        touched: dict[QuicChannel, None] = {}
        run = _Run()
        for arrival in batch:
            address = arrival.address
            for data in arrival.datagrams:
                if data and data[0] & FORM_BITS == SHORT_HEADER:
                    channel = self._by_id.get(data[ID])
                else:
                    channel = self._route_untrusted(data, address)
                if channel is not run.channel or address != run.address:
                    run.hand_over(touched)
                    run = _Run(channel, address)
                run.datagrams.append(data)
            if arrival.time is not None and run.channel is not None:
                run.stamps.append((arrival.time, sum(map(len, arrival.datagrams))))
        run.hand_over(touched)
        for channel in touched:
            try:
                channel.flush()
            except Exception:  # a bug of ours costs one connection, not the others in this batch
                log.exception("a connection failed")
                channel.refuse(CloseCode.INTERNAL, "internal error")

    def _route_untrusted(self, data: bytes, address: Any) -> QuicChannel | None:
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CONNECTION_ID_LENGTH)
        except ValueError:
            return None
        channel = self._by_id.get(header.destination_cid)
        if channel is not None:
            return channel
        if len(data) < SMALLEST_INITIAL or header.version is None:
            return None
        if header.packet_type is QuicPacketType.VERSION_NEGOTIATION:
            return None  # an answer to it would be answered, and so on
        if header.version not in VERSIONS:
            reply = encode_quic_version_negotiation(
                source_cid=header.destination_cid,
                destination_cid=header.source_cid,
                supported_versions=list(VERSIONS),
            )
            self._send(reply, address)
            return None
        if header.packet_type is not QuicPacketType.INITIAL:
            return None
        return self._begin_untrusted(header, address)

    def _begin_untrusted(self, header: QuicHeader, address: Any) -> QuicChannel | None:
        """A channel for an Initial packet, unless it has to prove its address first, or there is no room."""
        options, host = self._options, address[0]
        if not self.has_room() or len(self._unfinished) >= options.unfinished_handshakes:
            return None  # it tries again by itself
        if list(self._hosts.values()).count(host) >= options.connections_per_host:
            return None
        original, retried = header.destination_cid, None
        if header.token:
            try:
                original = self._retry.validate_token(
                    address=address,
                    destination_cid=header.destination_cid,
                    token=header.token,
                    now=self._loop.time(),
                )
            except ValueError:
                return None
            retried = header.destination_cid
        elif len(self._unfinished) >= options.retry_above:
            self._ask_for_proof(header, address)
            return None
        channel = self._accept(address, original, retried)
        self.add(header.destination_cid, channel)
        self._hosts[channel] = host
        self._unfinished.add(channel)
        return channel

    def _ask_for_proof(self, header: QuicHeader, address: Any) -> None:
        source = os.urandom(CONNECTION_ID_LENGTH)
        token = self._retry.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source,
            now=self._loop.time(),
        )
        assert header.version is not None
        reply = encode_quic_retry(
            version=header.version,
            source_cid=source,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )
        self._send(reply, address)


class _Run:
    """Datagrams of one connection that follow one another in a batch."""

    def __init__(self, channel: QuicChannel | None = None, address: Any = None) -> None:
        self.channel = channel
        self.address = address
        self.datagrams: list[bytes] = []
        self.stamps: list[Stamp] = []

    def hand_over(self, touched: dict[QuicChannel, None]) -> None:
        if self.channel is not None and self.datagrams:
            self.channel.receive_batch(self.datagrams, self.address, self.stamps)
            touched[self.channel] = None
