"""Thousands of handshakes that nobody finishes, beside traffic that goes on."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tracemalloc

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from raw_client import with_pair
from transport_helpers import Pair, text

from bbquic.transport.channel import Channel
from bbquic.transport.endpoint import QuicEndpoint
from bbquic.transport.message import MIB
from bbquic.transport.options import EndpointOptions

HALF_OPEN = 10_000
AT_ONCE = 50  # datagrams; more would only fill the socket's buffer
HOSTS = 40  # addresses they come from: more than one host may hold


def first_datagrams(address: tuple[str, int], count: int) -> list[bytes]:
    """What so many clients would send first, each with keys and connection ids of its own."""
    settings = QuicConfiguration(is_client=True, alpn_protocols=["bbquic"], verify_mode=ssl.CERT_NONE)
    datagrams = []
    for _ in range(count):
        client = QuicConnection(configuration=settings)
        client.connect(address, now=0.0)
        datagrams.append(client.datagrams_to_send(now=0.0)[0][0])
    return datagrams


@pytest.mark.parametrize("hosts", [1, HOSTS])
def test_ten_thousand_half_open_handshakes_neither_stop_traffic_nor_fill_memory(hosts: int) -> None:
    async def echo(channel: Channel) -> None:
        while True:
            await channel.send(await channel.receive())

    async def body(pair: Pair) -> None:
        assert isinstance(pair.b, QuicEndpoint)
        there, here = await pair.join()
        answering = asyncio.create_task(echo(here))
        flood = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(hosts)]
        for number, sock in enumerate(flood):
            sock.bind((f"127.0.9.{number + 1}", 0))
        options, most = EndpointOptions(), 0
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for start in range(0, HALF_OPEN, AT_ONCE):
                for number, datagram in enumerate(first_datagrams(pair.b.address, AT_ONCE)):
                    flood[number % hosts].sendto(datagram, pair.b.address)
                await there.send(text(f"message {start}"))
                assert await there.receive() == text(f"message {start}")
                most = max(most, len(pair.b._dispatcher.channels))
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
            for sock in flood:
                sock.close()
        assert most <= 1 + options.retry_above  # from then on, an address has to prove itself first
        assert grown < 16 * MIB
        another, _ = await pair.join()
        assert not another.is_closed
        answering.cancel()

    with_pair(body)
