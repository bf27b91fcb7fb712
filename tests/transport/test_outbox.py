"""The outbox: what goes first, and where it stops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from transport_helpers import run, text

from bbquic.errors import ConnectionLost
from bbquic.transport.ending import closed_here
from bbquic.transport.message import KIB, Kind, Message
from bbquic.transport.options import EndpointOptions
from bbquic.transport.outbox import CHUNK, Outbox
from bbquic.units import Bytes


@dataclass
class Pipe:
    """Streams that keep what is written until `acknowledge`."""

    written: list[tuple[int, int, bool]] = field(default_factory=list)  # stream, bytes, end
    resets: list[int] = field(default_factory=list)
    opened: int = 0
    held: int = 0
    open_count: int = 0
    begun: set[int] = field(default_factory=set)  # streams of which a datagram has left

    def open_stream(self, priority: int) -> int:
        self.opened += 1
        self.open_count += 1
        return self.opened

    def write_stream(self, stream_id: int, data: memoryview, *, end: bool) -> None:
        self.written.append((stream_id, len(data), end))
        self.held += len(data)

    def reset_stream(self, stream_id: int, error_code: int) -> None:
        self.resets.append(stream_id)

    def unacknowledged(self) -> tuple[int, int]:
        return self.held, self.open_count

    def has_begun(self, stream_id: int) -> bool:
        return stream_id in self.begun

    def acknowledge(self, size: int) -> None:
        self.held -= size

    @property
    def order(self) -> list[int]:
        """Streams in the order they were written to, repeats removed."""
        ids = [stream_id for stream_id, _, _ in self.written]
        return [one for place, one in enumerate(ids) if place == 0 or ids[place - 1] != one]


def outbox(pipe: Pipe, *, high: int = 512 * KIB, low: int = 256 * KIB, messages: int = 100) -> Outbox:
    options = EndpointOptions(high_watermark=Bytes(high), low_watermark=Bytes(low), outbox_messages=messages)
    return Outbox(options, pipe, lambda: None)


def big(size: int, kind: Kind = Kind.HIDDEN) -> Message:
    return Message(kind, b"", bytes(size)) if kind is Kind.HIDDEN else Message(kind, bytes(size))


def test_a_sender_stops_at_the_high_watermark_and_goes_on_below_the_low_one() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe)
        sending = asyncio.ensure_future(out.send(big(2048 * KIB)))
        await asyncio.sleep(0)
        at_rest = pipe.held
        assert 512 * KIB <= at_rest < 512 * KIB + CHUNK
        pipe.acknowledge(at_rest - 256 * KIB)
        assert not out.pump()  # at the low watermark, not below
        pipe.acknowledge(1)
        assert out.pump()
        while not sending.done():
            pipe.acknowledge(pipe.held)
            out.pump()
            await asyncio.sleep(0)
        assert pipe.written[-1][2]
        assert sum(size for _, size, _ in pipe.written) == big(2048 * KIB).size

    run(main)


def test_an_urgent_message_steps_in_between_the_chunks_of_a_bulky_one() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe)
        out.post(big(2048 * KIB, Kind.PLAN))
        out.post(text("control", Kind.READY))
        out.post(text("urgent", Kind.ROWS))
        for _ in range(20):
            pipe.acknowledge(pipe.held)
            out.pump()
        assert pipe.order == [1, 2, 3, 1]

    run(main)


def test_of_equal_messages_the_older_is_written_whole_first() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe)
        for _ in range(3):
            out.post(big(1024 * KIB))
        for _ in range(30):
            pipe.acknowledge(pipe.held)
            out.pump()
        assert pipe.order == [1, 2, 3]

    run(main)


def test_no_more_streams_are_opened_than_may_be_unacknowledged() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe, messages=2)
        for _ in range(5):
            out.post(text("x"))
        assert pipe.opened == 2
        pipe.open_count -= 1
        out.pump()
        assert pipe.opened == 3

    run(main)


def test_a_send_cancelled_half_way_resets_its_stream() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe)
        sending = asyncio.ensure_future(out.send(big(2048 * KIB)))
        await asyncio.sleep(0)
        sending.cancel()
        out.pump()  # in the same turn, before the cancelled task runs
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert pipe.resets == [1]
        pipe.acknowledge(pipe.held)
        assert not out.pump()

    run(main)


def test_a_send_cancelled_before_it_began_opens_no_stream() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe, messages=1)
        out.post(text("first"))
        sending = asyncio.ensure_future(out.send(text("second")))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        pipe.open_count = 0
        assert not out.pump()
        assert (pipe.opened, pipe.resets) == (1, [])

    run(main)


def test_the_end_is_told_to_every_sender_that_waits() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe, messages=1)
        out.post(text("first"))
        waiting = [asyncio.ensure_future(out.send(text("more"))) for _ in range(3)]
        await asyncio.sleep(0)
        out.end(closed_here("home-b", ""))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLost] * 3

    run(main)


def test_rows_in_the_background_let_other_rows_pass_and_go_before_control() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe, messages=0)
        out.post(text("control", Kind.READY))
        out.post(Message(Kind.HIDDEN, b"prefill", b"", background=True))
        out.post(Message(Kind.HIDDEN, b"decode", b""))
        out.post(Message(Kind.PLAN, b"bulk", background=True))
        order = [posting.priority for posting in sorted(out._heap)]
        assert order == [0, 1, 2, 3]
        assert [bytes(one.buffers[0][16:]) for one in sorted(out._heap)] == [
            b"decode",
            b"prefill",
            b"control",
            b"bulk",
        ]

    run(main)


def test_a_message_has_begun_when_its_first_datagram_leaves() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe, messages=2)
        sent = [out.post(text("x")).sent for _ in range(3)]
        out.note_begun(1.0)
        assert [one.began for one in sent] == [None, None, None]
        pipe.begun.add(2)
        out.note_begun(2.0)
        pipe.begun.add(1)
        out.note_begun(3.0)
        out.note_begun(4.0)
        assert [one.began for one in sent] == [3.0, 2.0, None]

    run(main)


def test_a_message_given_up_half_way_never_begins() -> None:
    async def main() -> None:
        pipe = Pipe()
        out = outbox(pipe)
        posting = out.post(big(2048 * KIB))
        out.withdraw(posting)
        pipe.begun.add(1)
        out.note_begun(1.0)
        assert posting.sent.began is None
        assert not out._to_begin

    run(main)
