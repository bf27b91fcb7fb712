"""Thousands of handshakes that nobody finishes, beside traffic that goes on."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from contextlib import suppress

import pytest
from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import pull_quic_header
from raw_client import with_pair
from transport_helpers import Pair, text

from bbquic.errors import ConnectionLost
from bbquic.transport.channel import Channel
from bbquic.transport.endpoint import QuicEndpoint
from bbquic.transport.message import MIB
from bbquic.transport.options import EndpointOptions

HALF_OPEN = 10_000
AT_ONCE = 50  # datagrams; more would only fill the socket's buffer
HOSTS = 40  # addresses they come from: more than one host may hold


class Strangers:
    """First datagrams of clients that will never answer: one's ClientHello, sealed anew for each."""

    def __init__(self, address: tuple[str, int]) -> None:
        settings = QuicConfiguration(is_client=True, alpn_protocols=["bbquic"], verify_mode=ssl.CERT_NONE)
        client = QuicConnection(configuration=settings)
        client.connect(address, now=0.0)
        datagram = client.datagrams_to_send(now=0.0)[0][0]
        buffer = Buffer(data=datagram)
        header = pull_quic_header(buffer, host_cid_length=8)
        assert header.version is not None
        self._source = header.source_cid
        opener = CryptoPair()
        opener.setup_initial(header.destination_cid, is_client=False, version=header.version)
        _, hello, _ = opener.decrypt_packet(datagram[: header.packet_length], buffer.tell(), 0)
        self._hello = hello.ljust(1200, b"\0")  # a smaller datagram begins no connection
        self._version = header.version

    def datagram(self) -> bytes:
        """Another client's, with connection id and keys of its own."""
        target = os.urandom(8)
        sealer = CryptoPair()
        sealer.setup_initial(target, is_client=True, version=self._version)
        return sealer.encrypt_packet(self._header(target, 2 + len(self._hello) + 16), self._hello, 0)

    def _header(self, target: bytes, length: int) -> bytes:
        """An Initial packet's, with a packet number of two bytes, which is 0."""
        ids = bytes([len(target)]) + target + bytes([len(self._source)]) + self._source
        return b"\xc1\x00\x00\x00\x01" + ids + b"\x00" + (0x4000 | length).to_bytes(2, "big") + bytes(2)


def resident() -> int:
    """Bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("hosts", [1, HOSTS])
def test_ten_thousand_half_open_handshakes_neither_stop_traffic_nor_fill_memory(hosts: int) -> None:
    async def echo(channel: Channel) -> None:
        with suppress(ConnectionLost):
            while True:
                await channel.send(await channel.receive())

    async def body(pair: Pair) -> None:
        assert isinstance(pair.b, QuicEndpoint)
        there, here = await pair.join()
        answering = asyncio.create_task(echo(here))
        flood = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(hosts)]
        for number, sock in enumerate(flood):
            sock.bind((f"127.0.9.{number + 1}", 0))
        strangers, before, most = Strangers(pair.b.address), resident(), 0
        try:
            for start in range(0, HALF_OPEN, AT_ONCE):
                for number in range(AT_ONCE):
                    flood[number % hosts].sendto(strangers.datagram(), pair.b.address)
                await there.send(text(f"message {start}"))
                assert await there.receive() == text(f"message {start}")
                most = max(most, len(pair.b._dispatcher.channels))
        finally:
            for sock in flood:
                sock.close()
        assert most == 1 + EndpointOptions().retry_above  # from then on, an address has to prove itself first
        assert resident() - before < 16 * MIB
        another, _ = await pair.join()
        assert not another.is_closed
        answering.cancel()

    with_pair(body)
