"""The QUIC endpoint's own affairs: its socket, strangers at its door, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from bad_path import BadPath
from raw_client import with_pair
from transport_helpers import (
    Pair,
    make_identities,
    make_peers,
    run,
    text,
)

from bbquic.errors import ConfigError, ConnectionLost, PeerRefused, PeerUnreachable, RemoteProtocolError
from bbquic.transport.channel import Role
from bbquic.transport.endpoint import QuicEndpoint, open_endpoint_here
from bbquic.transport.message import KIB, Kind, Message
from bbquic.transport.options import EndpointOptions
from bbquic.units import Bytes, Seconds


def test_a_message_larger_than_the_window_is_refused_in_place_of_waited_for() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        sending = asyncio.ensure_future(there.send(Message(Kind.HIDDEN, b"", bytes(100 * KIB))))
        with pytest.raises(RemoteProtocolError, match=r"home-a broke the protocol: .* over 65536"):
            await here.receive()
        await there.wait_closed()
        await asyncio.gather(sending, return_exceptions=True)
        with pytest.raises(ConnectionLost, match="home-b rejected a message from here"):
            await there.receive()

    with_pair(body, EndpointOptions(receive_window=Bytes(64 * KIB)))


def test_datagrams_that_are_no_quic_change_nothing() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise:
            for size in (0, 1, 7, 20, 1200, 1500):
                noise.sendto(os.urandom(size), pair.b.address)
                noise.sendto(b"\xc0" + bytes(size), pair.b.address)  # a long header
                noise.sendto(b"\x40" + os.urandom(size), pair.b.address)  # a short one
        await there.send(text("still here"))
        assert await here.receive() == text("still here")

    with_pair(body)


@pytest.mark.parametrize(("size", "answered"), [(1200, True), (100, False)])
def test_another_quic_version_is_answered_with_ours_unless_that_would_amplify(
    size: int, answered: bool
) -> None:
    async def body(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.bind(("127.0.0.1", 0))
            unknown = b"\xc0" + bytes.fromhex("0a0a0a0a") + b"\x08" + b"d" * 8 + b"\x08" + b"s" * 8
            await loop.sock_sendto(client, unknown + bytes(size - len(unknown)), pair.b.address)
            there, _ = await pair.join()  # by then an answer would be here
            there.close()
            if answered:
                reply = await loop.sock_recv(client, 2000)
                assert reply[1:5] == bytes(4)  # a version negotiation packet
                assert reply.endswith(bytes.fromhex("00000001"))
            else:
                with pytest.raises(BlockingIOError):
                    client.recv(2000)

    with_pair(body)


def test_a_dialler_that_has_to_prove_its_address_still_connects() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        await there.send(text("proven"))
        assert await here.receive() == text("proven")

    with_pair(body, EndpointOptions(retry_above=0))


def test_half_open_handshakes_are_bounded_and_make_room_in_time() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(pair.b, QuicEndpoint)
        settings = QuicConfiguration(is_client=True, alpn_protocols=["bbquic"], verify_mode=ssl.CERT_NONE)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
            for _ in range(20):
                half = QuicConnection(configuration=settings)
                half.connect(pair.b.address, now=0.0)
                flood.sendto(half.datagrams_to_send(now=0.0)[0][0], pair.b.address)
            there, _ = await pair.join()  # its first attempts are ignored, a later one is not
        assert not there.is_closed
        assert len(pair.b._dispatcher.channels) <= 4

    with_pair(body, EndpointOptions(unfinished_handshakes=3, handshake_timeout=Seconds(0.5)))


def test_one_address_may_not_hold_all_connections() -> None:
    async def body(pair: Pair) -> None:
        for _ in range(2):
            await pair.join()
        dialling = asyncio.ensure_future(pair.a.connect(pair.peer_b))
        with pytest.raises(PeerUnreachable, match="home-b"):
            await dialling

    with_pair(
        body, EndpointOptions(connections_per_host=2, idle_timeout=Seconds(0.6), keep_alive=Seconds(0.1))
    )


def test_dialling_can_be_given_up_and_tried_again() -> None:
    async def body(pair: Pair) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
            deaf.bind(("127.0.0.1", 0))
            peer = pair.peer_b
            nobody = type(peer)(peer.name, deaf.getsockname(), peer.keys)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await pair.a.connect(nobody)
        there, _ = await pair.join()
        assert not there.is_closed

    with_pair(body)


def test_a_host_that_has_no_address_is_unreachable() -> None:
    async def body(pair: Pair) -> None:
        peer = pair.peer_b
        with pytest.raises(PeerUnreachable, match=r"home-b: .* is no address"):
            await pair.a.connect(type(peer)(peer.name, ("256.256.256.256", 1), peer.keys))

    with_pair(body)


def test_a_taken_port_is_named() -> None:
    async def body(pair: Pair) -> None:
        host, port = pair.b.address
        with pytest.raises(ConfigError, match=f"cannot listen on {host}, UDP port {port}"):
            await open_endpoint_here(pair.identities["home-a"], pair.peers, Role.NODE, host=host, port=port)

    with_pair(body)


def test_an_endpoint_takes_over_a_bound_socket_and_closes_it() -> None:
    async def main() -> None:
        identities = make_identities("home-a")
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        name = sock.getsockname()
        endpoint = await open_endpoint_here(
            identities["home-a"], make_peers(identities), Role.NODE, sock=sock
        )
        assert endpoint.address == name
        await endpoint.close()
        assert sock.fileno() == -1

    run(main)


def test_all_addresses_of_a_machine_include_ipv4() -> None:
    async def main() -> None:
        identities = make_identities("home-a", "home-b")
        peers = make_peers(identities)
        b = await open_endpoint_here(identities["home-b"], peers, Role.NODE)
        a = await open_endpoint_here(identities["home-a"], peers, Role.COMMAND)
        try:
            peer = peers["home-b"]
            channel = await a.connect(type(peer)(peer.name, ("127.0.0.1", b.address[1]), peer.keys))
            assert channel.peer.name == "home-b"
        finally:
            await a.close()
            await b.close()

    run(main)


def test_what_ends_one_connection_leaves_no_trace_of_it() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(pair.a, QuicEndpoint)
        assert isinstance(pair.b, QuicEndpoint)
        there, here = await pair.join()
        there.close()
        await here.wait_closed()
        while pair.a._dispatcher.channels or pair.b._dispatcher.channels:
            await asyncio.sleep(0)
        assert pair.a._dispatcher._by_id == pair.b._dispatcher._by_id == {}

    with_pair(body)


def test_a_refused_dialler_gets_one_answer_even_when_it_has_sent_already() -> None:
    async def body(pair: Pair) -> None:
        stranger = make_identities("stranger")
        endpoint = await pair.net.open(stranger["stranger"], {**pair.peers, **make_peers(stranger)})
        with pytest.raises(PeerRefused):
            await endpoint.connect(pair.peer_b)
        assert isinstance(pair.b, QuicEndpoint)
        assert len(pair.b._waiting) == 0

    with_pair(body)


@pytest.mark.parametrize("seed", range(3))
def test_every_message_arrives_once_over_a_path_that_loses_and_swaps(seed: int) -> None:
    async def body(pair: Pair) -> None:
        path = await BadPath.open(pair.b.address, seed=seed, loss=0.05, swap=0.1)
        try:
            peer = pair.peer_b
            there = await pair.a.connect(type(peer)(peer.name, path.address, peer.keys))
            here = await pair.b.accept()
            sent = [Message(Kind.HIDDEN, str(size).encode(), bytes(size)) for size in range(0, 60_000, 997)]
            async with asyncio.TaskGroup() as group:
                for message in sent:
                    group.create_task(there.send(message))
                received = [await here.receive() for _ in sent]
            assert sorted(received, key=lambda message: message.body_size) == sent
            assert path.lost > 0
        finally:
            path.close()

    with_pair(body)
