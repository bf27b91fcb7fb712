"""The endpoint on its own thread: what crosses between the loops, and what is left when it is closed."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest
from transport_helpers import (
    Net,
    Pair,
    ThreadedNet,
    make_identities,
    make_pair,
    make_peers,
    run,
    text,
    until_blocked,
    with_net,
)

from bbquic.errors import ConfigError, ConnectionLost
from bbquic.transport.channel import Role
from bbquic.transport.crossing import Crossing
from bbquic.transport.message import KIB, Kind, Message
from bbquic.transport.options import EndpointOptions
from bbquic.transport.threaded import SWITCH_INTERVAL, ThreadedEndpoint, open_endpoint


def with_pair(body: Callable[[Pair], Awaitable[None]], options: EndpointOptions | None = None) -> None:
    async def on_net(net: Net) -> None:
        await body(await make_pair(net, options))

    with_net(ThreadedNet, on_net)


def transport_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bbquic transport"]


def test_the_thread_is_there_until_the_endpoint_is_closed() -> None:
    async def body(pair: Pair) -> None:
        assert len(transport_threads()) == 2
        await pair.a.close()
        await pair.a.close()
        assert len(transport_threads()) == 1
        for use in (pair.a.accept(), pair.a.connect(pair.peer_b)):
            with pytest.raises(ConnectionLost, match="the endpoint was closed"):
                await use

    with_pair(body)
    assert transport_threads() == []


def test_the_interpreter_is_asked_to_switch_threads_sooner() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        with_pair(lambda pair: asyncio.sleep(0))
        assert sys.getswitchinterval() == SWITCH_INTERVAL
    finally:
        sys.setswitchinterval(before)


def test_what_goes_wrong_in_opening_is_raised_and_leaves_no_thread() -> None:
    async def body(pair: Pair) -> None:
        host, port = pair.b.address
        with pytest.raises(ConfigError, match=f"cannot listen on {host}, UDP port {port}"):
            await open_endpoint(pair.identities["home-a"], pair.peers, Role.NODE, host=host, port=port)

    with_pair(body)
    assert transport_threads() == []


def test_opening_can_be_given_up() -> None:
    async def main() -> None:
        identities = make_identities("home-a")
        opening = asyncio.ensure_future(
            open_endpoint(identities["home-a"], make_peers(identities), Role.NODE, host="127.0.0.1")
        )
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        for thread in transport_threads():
            await asyncio.to_thread(thread.join)

    run(main)


def test_a_caller_who_gives_up_may_use_its_buffer_again_at_once() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        taken, blocked = await until_blocked(lambda: there.send(text("kept")), 20)
        buffer = bytearray(b"x" * 100)
        given_up = asyncio.ensure_future(there.send(Message(Kind.HIDDEN, b"", memoryview(buffer))))
        await asyncio.sleep(0)
        given_up.cancel()
        buffer[:] = b"y" * 100
        last = asyncio.ensure_future(there.send(text("last")))
        received = [await here.receive() for _ in range(taken + 2)]
        assert [message.header for message in received if message.kind is Kind.HIDDEN] == []
        await asyncio.gather(blocked, last)

    with_pair(body, EndpointOptions(inbox_messages=4, outbox_messages=2))


def test_a_message_given_up_too_late_arrives_as_it_was() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(pair.a, ThreadedEndpoint)
        there, here = await pair.join()
        gate = threading.Event()
        pair.a._thread.loop.call_soon_threadsafe(gate.wait)  # the other loop is busy for now
        buffer = bytearray(b"x" * 100)
        sending = asyncio.ensure_future(there.send(Message(Kind.HIDDEN, b"", memoryview(buffer))))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        buffer[:] = b"y" * 100
        gate.set()
        await there.send(text("last"))
        received = [await here.receive()]
        while received[-1].kind is not Kind.TOKENS:
            received.append(await here.receive())
        assert all(message.body == b"x" * 100 for message in received[:-1])

    with_pair(body)


def test_channels_wait_over_there_until_somebody_accepts() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(pair.b, ThreadedEndpoint)
        for _ in range(3):
            await pair.a.connect(pair.peer_b)
        while len(pair.b._endpoint._waiting) < 3:
            await asyncio.sleep(0)
        await pair.b.accept()
        await pair.b._thread.ask(asyncio.sleep(0))
        assert len(pair.b._endpoint._waiting) == 2

    with_pair(body)


def test_an_accept_given_up_loses_no_channel() -> None:
    async def body(pair: Pair) -> None:
        for _ in range(3):
            waiting = asyncio.ensure_future(pair.b.accept())
            await asyncio.sleep(0)
            waiting.cancel()
        dialled = [await pair.a.connect(pair.peer_b) for _ in range(3)]
        accepted = await asyncio.gather(*(pair.b.accept() for _ in range(3)))
        for number, channel in enumerate(dialled):
            await channel.send(text(str(number)))
        assert {(await channel.receive()).header for channel in accepted} == {b"0", b"1", b"2"}

    with_pair(body)


def test_a_dial_given_up_leaves_no_connection() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(pair.a, ThreadedEndpoint)
        dialling = asyncio.ensure_future(pair.a.connect(pair.peer_b))
        arrived = await pair.b.accept()  # so it came about, and this loop has yet to see that
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)
        if dialling.cancelled():
            await arrived.wait_closed()
        else:
            assert not dialling.result().is_closed

    with_pair(body)


def test_credit_is_given_back_when_a_message_is_read_here() -> None:
    async def body(pair: Pair) -> None:
        there, here = await pair.join()
        message = Message(Kind.HIDDEN, b"", bytes(16 * KIB))
        taken, blocked = await until_blocked(lambda: there.send(message), 100)
        assert taken <= 4 + 5  # what the reader may hold, and what the sender
        for _ in range(taken + 1):
            await here.receive()
        await blocked

    with_pair(body, EndpointOptions(inbox_messages=4, outbox_messages=5))


def test_calls_arrive_in_order_and_one_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        seen: list[int] = []
        crossing = Crossing(asyncio.get_running_loop())

        def call_all() -> None:
            for number in range(100):
                crossing.call(seen.append, number)
                crossing.call(seen.__getitem__, 1000)

        calling = threading.Thread(target=call_all)
        calling.start()
        calling.join()
        assert seen == []  # this loop had no turn yet
        await asyncio.sleep(0)
        assert seen == list(range(100))
        assert len(caplog.records) == 100

    run(main)


def test_calls_into_a_loop_that_is_closed_are_let_go() -> None:
    loop = asyncio.new_event_loop()
    crossing = Crossing(loop)
    loop.close()
    for _ in range(3):
        crossing.call(print, "nobody hears this")
    assert not crossing._calls
