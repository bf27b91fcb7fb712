"""What every endpoint promises, on each kind of network."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from transport_helpers import (
    MemoryNet,
    Net,
    PlainNet,
    QuicNet,
    ThreadedNet,
    make_identities,
    make_pair,
    make_peers,
    text,
    until_blocked,
    with_net,
)

from bbquic.errors import ConnectionLost, PeerRefused, PeerUnreachable
from bbquic.transport.channel import Role
from bbquic.transport.identity import make_identity
from bbquic.transport.message import KIB, MIB, Kind, Message
from bbquic.transport.options import EndpointOptions
from bbquic.units import Bytes, Seconds

Run = Callable[[Callable[[Net], Awaitable[None]]], None]


@pytest.fixture(params=[MemoryNet, QuicNet, PlainNet, ThreadedNet])
def on_net(request: pytest.FixtureRequest) -> Run:
    return lambda body: with_net(request.param, body)


def test_a_message_arrives_whole(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        sent = Message(Kind.HIDDEN, b"header", memoryview(bytes(range(256))))
        await there.send(sent)
        assert await here.receive() == sent

    on_net(body)


def test_both_ends_may_send(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        await there.send(text("ping", Kind.PING))
        await here.send(text("pong", Kind.PONG))
        assert await there.receive() == text("pong", Kind.PONG)
        assert await here.receive() == text("ping", Kind.PING)

    on_net(body)


def test_each_end_knows_who_the_other_is_and_in_which_role(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        there, here = await pair.join()
        assert (there.peer, there.role) == (pair.peer_b, Role.NODE)
        assert (here.peer, here.role) == (pair.peers["home-a"], Role.COMMAND)

    on_net(body)


def test_every_one_of_many_small_messages_arrives(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        received: set[bytes] = set()

        async def read() -> None:
            while len(received) < 1000:
                received.add((await here.receive()).header)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            for number in range(1000):
                await there.send(text(str(number)))
        assert received == {str(number).encode() for number in range(1000)}

    on_net(body)


def test_a_message_of_20_megabytes_arrives(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        content = bytes(range(256)) * (20_000_000 // 256)
        async with asyncio.TaskGroup() as group:
            group.create_task(there.send(Message(Kind.HIDDEN, b"", content)))
            message = await here.receive()
        assert message.body == content

    on_net(body)


def test_buffers_are_the_senders_again_once_send_returns(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        buffer = bytearray(b"hidden states")
        await there.send(Message(Kind.HIDDEN, b"", memoryview(buffer)))
        buffer[:] = bytes(len(buffer))
        assert (await here.receive()).body == b"hidden states"

    on_net(body)


def test_a_receiver_that_never_reads_stops_its_sender(on_net: Run) -> None:
    async def body(net: Net) -> None:
        options = EndpointOptions(
            receive_window=Bytes(MIB), high_watermark=Bytes(512 * KIB), low_watermark=Bytes(256 * KIB)
        )
        there, _ = await (await make_pair(net, options)).join()
        message = Message(Kind.HIDDEN, b"", bytes(64 * KIB))
        taken, blocked = await until_blocked(lambda: there.send(message), 100)
        assert taken * message.size <= MIB + 512 * KIB + 256 * KIB  # its window, our watermark, one chunk
        blocked.cancel()

    on_net(body)


def test_a_receiver_that_never_reads_stops_a_sender_of_tiny_messages(on_net: Run) -> None:
    async def body(net: Net) -> None:
        options = EndpointOptions(inbox_messages=10, outbox_messages=5)
        there, _ = await (await make_pair(net, options)).join()
        taken, blocked = await until_blocked(lambda: there.send(text("tiny")), 100)
        assert taken <= 10 + 5
        blocked.cancel()

    on_net(body)


def test_a_stopped_sender_goes_on_when_the_receiver_reads(on_net: Run) -> None:
    async def body(net: Net) -> None:
        options = EndpointOptions(
            receive_window=Bytes(MIB), high_watermark=Bytes(512 * KIB), low_watermark=Bytes(256 * KIB)
        )
        there, here = await (await make_pair(net, options)).join()
        message = Message(Kind.HIDDEN, b"", bytes(64 * KIB))
        taken, blocked = await until_blocked(lambda: there.send(message), 100)
        for _ in range(taken + 1):
            assert await here.receive() == message
        await blocked
        for _ in range(50):  # several windows more
            await there.send(message)
            assert await here.receive() == message

    on_net(body)


def test_a_send_given_up_while_it_waits_never_arrives(on_net: Run) -> None:
    async def body(net: Net) -> None:
        options = EndpointOptions(inbox_messages=4, outbox_messages=2)
        there, here = await (await make_pair(net, options)).join()
        taken, blocked = await until_blocked(lambda: there.send(text("kept")), 20)
        given_up = asyncio.ensure_future(there.send(text("given up")))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        last = asyncio.ensure_future(there.send(text("last")))
        received = [(await here.receive()).header for _ in range(taken + 2)]
        await asyncio.gather(blocked, last)
        assert sorted(received) == [b"kept"] * (taken + 1) + [b"last"]

    on_net(body)


def test_a_key_that_is_not_pinned_is_refused_and_logged_once(
    on_net: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        stranger = make_identity("stranger")
        with caplog.at_level(logging.WARNING, "bbquic.transport"):
            endpoint = await net.open(stranger, {**pair.peers, **make_peers({"stranger": stranger})})
            for _ in range(3):
                with pytest.raises(PeerRefused, match="home-b does not know this machine's key") as caught:
                    await endpoint.connect(pair.peer_b)
                assert caught.value.hint is not None
                assert "[[peer]]" in caught.value.hint
        lines = [record.getMessage() for record in caplog.records if "not pinned" in record.getMessage()]
        assert len(lines) == 1
        assert stranger.fingerprint in lines[0]
        assert endpoint.address[0] in lines[0]
        assert "not pinned in peers.toml" in lines[0]
        there, here = await pair.join()  # the stranger never showed, and friends still may come
        assert here.peer.name == "home-a"
        assert not there.is_closed

    on_net(body)


def test_a_machine_that_answers_with_another_key_is_refused(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        other = make_identity("other")
        with pytest.raises(PeerRefused, match="home-b answered with a key that is not pinned for it"):
            await pair.a.connect(replace(pair.peer_b, keys=(other.fingerprint,)))

    on_net(body)


def test_a_machine_that_answers_with_a_third_ones_pinned_key_is_refused(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        as_if = replace(pair.peers["home-a"], name="home-b", address=pair.b.address)
        with pytest.raises(PeerRefused, match="home-b answered with a key that is not pinned for it"):
            await pair.a.connect(as_if)

    on_net(body)


def test_a_machine_may_show_either_of_its_two_keys(on_net: Run) -> None:
    async def body(net: Net) -> None:
        identities = make_identities("home-a", "home-b", "home-b-next")
        peers = make_peers({name: identities[name] for name in ("home-a", "home-b")})
        both = (identities["home-b"].fingerprint, identities["home-b-next"].fingerprint)
        peers["home-b"] = replace(peers["home-b"], keys=both)
        a = await net.open(identities["home-a"], peers)
        for name in ("home-b", "home-b-next"):
            b = await net.open(identities[name], peers)
            await b.connect(replace(peers["home-a"], address=a.address))
            assert (await a.accept()).peer.name == "home-b"
            assert (await a.connect(replace(peers["home-b"], address=b.address))).peer.name == "home-b"

    on_net(body)


def test_engines_of_another_minor_version_are_refused_naming_both(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net, engine_b="0.2.0")
        with pytest.raises(PeerRefused) as caught:
            await pair.a.connect(pair.peer_b)
        for part in ("home-a runs", "home-b runs", "0.1.0 (wire 1)", "0.2.0 (wire 1)"):
            assert part in str(caught.value).replace("bbquic ", "")

    on_net(body)


def test_engines_that_differ_in_the_patch_version_work_together(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, _ = await (await make_pair(net, engine_b="0.1.9")).join()
        assert not there.is_closed

    on_net(body)


def test_two_machines_may_dial_each_other_at_once(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        from_a, from_b = await asyncio.gather(pair.a.connect(pair.peer_b), pair.b.connect(pair.peer_a))
        at_b, at_a = await pair.b.accept(), await pair.a.accept()
        await from_a.send(text("from a"))
        await from_b.send(text("from b"))
        assert await at_b.receive() == text("from a")
        assert await at_a.receive() == text("from b")

    on_net(body)


def test_closing_tells_the_peer_why(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        there.close("the job is done")
        with pytest.raises(ConnectionLost, match="home-a closed the connection: the job is done"):
            await here.receive()
        await here.wait_closed()
        await there.wait_closed()
        assert here.is_closed
        with pytest.raises(ConnectionLost, match="home-a closed the connection: the job is done"):
            await here.send(text("too late"))
        with pytest.raises(ConnectionLost, match="to home-b was closed here"):
            await there.receive()

    on_net(body)


def test_a_send_that_waits_hears_of_the_end(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (
            await make_pair(net, EndpointOptions(inbox_messages=2, outbox_messages=2))
        ).join()
        _, blocked = await until_blocked(lambda: there.send(text("x")), 10)
        here.close("no more")
        with pytest.raises(ConnectionLost, match="home-b closed the connection: no more"):
            await blocked

    on_net(body)


def test_what_arrived_before_the_end_is_read_first(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        await there.send(text("first"))
        await there.send(text("second"))
        assert await here.receive() == text("first")
        while here.statistics().messages_received < 2:
            await asyncio.sleep(0)
        there.close()
        await here.wait_closed()
        assert await here.receive() == text("second")
        with pytest.raises(ConnectionLost):
            await here.receive()

    on_net(body)


def test_a_closed_connection_can_be_made_anew(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        for number in range(3):
            there, here = await pair.join()
            await there.send(text(str(number)))
            assert await here.receive() == text(str(number))
            there.close()
            await here.wait_closed()

    on_net(body)


def test_a_peer_that_dies_is_noticed_and_named(on_net: Run) -> None:
    async def body(net: Net) -> None:
        options = EndpointOptions(idle_timeout=Seconds(0.4), keep_alive=Seconds(0.1))
        pair = await make_pair(net, options)
        there, _ = await pair.join()
        await net.vanish(pair.b)
        with pytest.raises(ConnectionLost, match=r"nothing was heard from home-b for 0\.4 s"):
            await there.receive()

    on_net(body)


def test_an_address_where_nobody_listens_is_unreachable(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net, EndpointOptions(idle_timeout=Seconds(0.4), keep_alive=Seconds(0.1)))
        peer = pair.peer_b
        await pair.b.close()
        with pytest.raises(PeerUnreachable, match="home-b"):
            await pair.a.connect(peer)

    on_net(body)


def test_a_peer_without_an_address_is_unreachable(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        with pytest.raises(PeerUnreachable, match="home-b"):
            await pair.a.connect(pair.peers["home-b"])

    on_net(body)


def test_who_does_not_accept_turns_further_machines_away(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net, EndpointOptions(waiting_channels=1))
        await pair.a.connect(pair.peer_b)
        with pytest.raises((PeerRefused, ConnectionLost), match="home-b has too many connections"):
            await (await pair.a.connect(pair.peer_b)).receive()

    on_net(body)


def test_closing_an_endpoint_ends_its_channels_and_those_who_wait(on_net: Run) -> None:
    async def body(net: Net) -> None:
        pair = await make_pair(net)
        there, here = await pair.join()
        accepting = asyncio.ensure_future(pair.b.accept())
        receiving = asyncio.ensure_future(here.receive())
        await asyncio.sleep(0)
        await pair.b.close()
        for waiting in (accepting, receiving):
            with pytest.raises(ConnectionLost):
                await waiting
        with pytest.raises(ConnectionLost, match="home-b closed the connection"):
            await there.receive()

    on_net(body)


def test_statistics_count_messages_and_bytes_both_ways(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        message = text("counted")
        for _ in range(3):
            await there.send(message)
        for _ in range(3):
            await here.receive()
        await here.send(message)
        await there.receive()
        sent, received = there.statistics(), here.statistics()
        assert (sent.messages_sent, sent.bytes_sent) == (3, 3 * message.size)
        assert (received.messages_received, received.bytes_received) == (3, 3 * message.size)
        assert (sent.messages_received, received.messages_sent) == (1, 1)

    on_net(body)


def test_a_message_tells_when_it_began_to_leave_and_when_it_was_there(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        for size in (0, 100, 300 * KIB):
            before = time.monotonic()
            sent = await there.send(Message(Kind.HIDDEN, b"", bytes(size)))
            received = await here.receive()
            after = time.monotonic()
            assert sent.began is not None
            assert received.arrived is not None
            # the kernel's clock is another one than the program's: they are compared to a millisecond
            assert before <= sent.began <= received.arrived + 0.001
            assert received.arrived <= after

    on_net(body)


def test_what_leaves_after_send_returned_is_told_all_the_same(on_net: Run) -> None:
    async def body(net: Net) -> None:
        there, here = await (await make_pair(net)).join()
        sent = await asyncio.gather(*(there.send(text(str(number))) for number in range(50)))
        for _ in sent:
            await here.receive()
        assert all(one.began is not None for one in sent)

    on_net(body)
