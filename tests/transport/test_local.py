"""A channel within a process keeps what a channel promises."""

from __future__ import annotations

import asyncio

import pytest

from bbquic.errors import ConnectionLost
from bbquic.transport.channel import Channel, Role
from bbquic.transport.identity import Peer, make_identity
from bbquic.transport.local import MOST_UNREAD, local_pair
from bbquic.transport.message import Kind, Message

ME = Peer("me", None, (make_identity("me").fingerprint,))


def numbered(number: int) -> Message:
    return Message(Kind.PING, bytes([number % 256]))


def test_messages_come_in_order_both_ways_with_the_moment_they_came() -> None:
    async def main() -> None:
        one, other = local_pair(ME)
        ends: tuple[Channel, Channel] = (one, other)
        assert all((end.peer, end.role) == (ME, Role.NODE) for end in ends)
        for here, there in (ends, ends[::-1]):
            for number in range(5):
                sent = await here.send(numbered(number))
                assert sent.began is not None
            for number in range(5):
                message = await there.receive()
                assert message == numbered(number)
                assert message.arrived is not None
            assert here.statistics().messages_sent == there.statistics().messages_received == 5
            assert here.statistics().bytes_sent == 5 * numbered(0).size

    asyncio.run(main())


def test_a_receiver_that_never_reads_stops_the_sender_until_it_reads() -> None:
    async def main() -> None:
        one, other = local_pair(ME)
        for number in range(MOST_UNREAD):
            await one.send(numbered(number))
        late = asyncio.create_task(one.send(numbered(7)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not late.done()
        await other.receive()
        await late

    asyncio.run(main())


def test_an_end_that_closes_ends_both_and_what_was_sent_before_is_still_read() -> None:
    async def main() -> None:
        one, other = local_pair(ME)
        full = asyncio.create_task(other.receive())
        await asyncio.sleep(0)
        await one.send(numbered(1))
        await one.send(numbered(2))
        one.close("enough")
        assert await full == numbered(1)
        assert await other.receive() == numbered(2)
        for end in (one, other):
            assert end.is_closed
            await end.wait_closed()
            for call in (end.receive(), end.send(numbered(3)), end.probe()):
                with pytest.raises(ConnectionLost, match="enough"):
                    await call

    asyncio.run(main())


def test_a_sender_that_waits_for_room_hears_of_the_end() -> None:
    async def main() -> None:
        one, other = local_pair(ME)
        for number in range(MOST_UNREAD):
            await one.send(numbered(number))
        late = asyncio.create_task(one.send(numbered(7)))
        await asyncio.sleep(0)
        other.close("gone")
        with pytest.raises(ConnectionLost, match="gone"):
            await late

    asyncio.run(main())
