"""Requests and outcomes on their way between a command and a coordinator elsewhere: whole, in order, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote_helpers import JOB, STAGES, TO_COMMANDS, a_request, ended, outcomes, progress

from bbquic.errors import (
    BBQuicError,
    ConfigError,
    ConnectionLost,
    JobError,
    PeerRefused,
    PeerUnreachable,
    PlanRefused,
    RemoteProtocolError,
    StageFailed,
    Stalled,
)
from bbquic.model.manifest import Manifest
from bbquic.model.sampling import MAX_SEED, Sampling
from bbquic.runtime.cluster import StageLink
from bbquic.runtime.coordination import (
    GROUP,
    GROUP_BYTES,
    CoordinateHeader,
    OutcomesHeader,
    RequestsHeader,
    WireCompletion,
    WireError,
    WireRequest,
    grouped,
)
from bbquic.runtime.coordinator import CoordinatorOptions
from bbquic.runtime.hosting import Inbox
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.protocol import PlanHeader
from bbquic.runtime.remote import RemoteCoordinator
from bbquic.runtime.request import Completion, Outcome, Request
from bbquic.runtime.scheduler import SchedulerOptions
from bbquic.transport.identity import Peer, make_identity
from bbquic.transport.local import local_pair
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Seconds

ME = Peer("node-1", ("memory", 1), (make_identity("node-1").fingerprint,))
TOKENS = st.integers(0, 2**31 - 1)
SAMPLING = st.one_of(
    st.just(Sampling()),
    st.builds(
        Sampling, st.floats(0.01, 2), st.floats(0.01, 1), st.integers(0, 2**31 - 1), st.integers(0, MAX_SEED)
    ),
)
REQUESTS = st.builds(
    Request,
    st.integers(1, 2**32),
    st.lists(TOKENS, min_size=1, max_size=40).map(tuple),
    st.integers(1, 2**20),
    SAMPLING,
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), max_size=3).map(
        tuple
    ),
)
COMPLETIONS = st.builds(
    Completion,
    st.integers(1, 2**32),
    st.lists(TOKENS, max_size=40).map(tuple),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(1, 2**20),
    st.sampled_from(["stop", "length"]),
)


@given(st.lists(REQUESTS, min_size=1, max_size=5))
def test_requests_come_out_as_they_went_in(requests: list[Request]) -> None:
    sent = RequestsHeader(JOB, 0, 0, tuple(map(WireRequest.of, requests)))
    read = decode_header_untrusted(RequestsHeader, encode_header(sent))
    assert [one.plain() for one in read.requests] == requests


@given(st.lists(COMPLETIONS, min_size=1, max_size=5))
def test_completions_come_out_as_they_went_in(completions: list[Completion]) -> None:
    sent = OutcomesHeader(JOB, 0, tuple(map(WireCompletion.of, completions)))
    read = decode_header_untrusted(OutcomesHeader, encode_header(sent))
    assert [one.plain() for one in read.completions] == completions


@pytest.mark.parametrize("tokens", [b"", b"\1\0\0", b"\0\0\0\x80", b"\1\0\0\0\xff\xff\xff\xff"])
def test_what_is_no_token_is_refused(tokens: bytes) -> None:
    raw = encode_header(RequestsHeader(JOB, 0, 0, (a_request(1),)))
    good = a_request(1).tokens
    at = raw.index(bytes([0xC4, len(good)]) + good)
    damaged = raw[:at] + bytes([0xC4, len(tokens)]) + tokens + raw[at + 2 + len(good) :]
    with pytest.raises(RemoteProtocolError, match="RequestsHeader"):
        decode_header_untrusted(RequestsHeader, damaged)


@given(st.lists(st.integers(0, GROUP_BYTES * 2), max_size=200))
def test_groups_hold_everything_in_order_and_no_more_than_a_message_does(weights: list[int]) -> None:
    groups = list(grouped(weights, lambda one: one))
    assert [one for group in groups for one in group] == weights
    assert all(1 <= len(group) <= GROUP for group in groups)
    assert all(sum(group) <= GROUP_BYTES or len(group) == 1 for group in groups)
    for group, following in pairwise(groups):
        assert len(group) == GROUP or sum(group) + following[0] > GROUP_BYTES


@given(st.permutations(range(6)), st.booleans())
def test_requests_that_overtake_one_another_wait_for_their_turn(
    order: list[int], last_is_empty: bool
) -> None:
    async def main() -> None:
        inbox = Inbox()
        inbox.open(10)
        groups = [RequestsHeader(JOB, 0, number, (a_request(number + 1),)) for number in range(5)]
        groups.append(RequestsHeader(JOB, 0, 5, () if last_is_empty else (a_request(6),), last=True))
        seen: list[int] = []

        async def read() -> None:
            seen.extend([request.line async for request in inbox.requests()])

        reading = asyncio.create_task(read())
        for number in order:
            inbox.put_untrusted(groups[number])
            await asyncio.sleep(0)
        await reading
        assert seen == list(range(1, 6 if last_is_empty else 7))

    asyncio.run(main())


def test_requests_whose_outcome_was_sent_make_room_for_others() -> None:
    async def main() -> None:
        inbox = Inbox()
        inbox.open(2)
        inbox.put_untrusted(RequestsHeader(JOB, 0, 0, (a_request(1), a_request(2))))
        with pytest.raises(RemoteProtocolError, match="3 requests are open, and 2 may be"):
            inbox.put_untrusted(RequestsHeader(JOB, 0, 1, (a_request(3),)))
        inbox.answered(2)
        inbox.put_untrusted(RequestsHeader(JOB, 0, 2, (a_request(4),)))
        with pytest.raises(RemoteProtocolError, match="group 2 of requests came twice"):
            inbox.put_untrusted(RequestsHeader(JOB, 0, 2, (a_request(4),)))

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        StageFailed("it burnt", node="node-2", code="fire", hint="water"),
        Stalled("waited", hint="why"),
        PlanRefused("no", hint=None),
        ConnectionLost("gone"),
        PeerUnreachable("nobody there"),
        PeerRefused("unpinned"),
        RemoteProtocolError("node-2: nonsense"),
        BBQuicError("x" * 9000, hint="y" * 9000),
    ],
)
def test_an_error_is_raised_again_as_what_it_was(error: BBQuicError) -> None:
    wire = decode_header_untrusted(WireError, encode_header(WireError.of(error)))
    again = wire.error()
    assert type(again) is type(error)
    assert again.message == error.message[:4000]
    assert again.hint == (None if error.hint is None else error.hint[:4000])
    if isinstance(error, StageFailed):
        assert isinstance(again, StageFailed)
        assert (again.node, again.code) == (error.node, error.code)


def test_an_error_of_a_kind_of_its_own_is_an_error_still() -> None:
    assert type(WireError.of(JobError("odd")).error()) is BBQuicError


class Elsewhere:
    """A coordinator's end of a command's channel, played by a test."""

    def __init__(self, *, look_ahead: int = 2, **options: float) -> None:
        plan = PlanHeader(
            JOB, 0, "tiny", "float32", STAGES, (64,), 1, 1, Manifest("tiny", {}, "", {}), coordinator="node-1"
        )
        mine, self.channel = local_pair(ME)
        other, self.other = local_pair(ME)
        links = [StageLink(STAGES[0], mine), StageLink(STAGES[1], other)]
        work = SchedulerOptions(micro_batches=1, slots=2, tiers=(64,), look_ahead=look_ahead)
        how = CoordinatorOptions(**({"heartbeat": Seconds(0.01)} | options))  # type: ignore[arg-type]
        self.loop = RemoteCoordinator(links, plan, work, ends=frozenset({2}), options=how)
        self.kept: list[int] = []

    async def run(self, lines: int) -> None:
        async def requests() -> AsyncIterator[Request]:
            for line in range(1, lines + 1):
                yield Request(line, (1, 2), 8, Sampling())

        await self.loop.run(requests(), self.keep)

    async def keep(self, group: Sequence[Outcome]) -> None:
        self.kept += [one.line for one in group]

    async def next(self, kind: Kind) -> Any:
        while (message := await self.channel.receive()).kind is not kind:
            pass
        return message

    async def say(self, kind: Kind, header: Any) -> None:
        await self.channel.send(Message(kind, encode_header(header)))


def test_more_than_a_node_holds_is_refused_before_it_is_asked() -> None:
    with pytest.raises(ConfigError, match="holds 65536 sequences at most"):
        Elsewhere(look_ahead=70_000)


def test_no_more_requests_leave_than_the_window_holds_without_a_kept_outcome() -> None:
    async def main() -> None:
        elsewhere = Elsewhere()  # a window of 6
        disk = asyncio.Semaphore(0)
        keep = elsewhere.keep

        async def slow_disk(group: Sequence[Outcome]) -> None:
            await disk.acquire()
            await keep(group)

        async def requests() -> RequestsHeader:
            return decode_header_untrusted(RequestsHeader, (await elsewhere.next(Kind.REQUESTS)).header)

        async def only_pings() -> None:
            for _ in range(3):
                assert (await elsewhere.channel.receive()).kind is Kind.PING

        elsewhere.keep = slow_disk  # type: ignore[method-assign]
        running = asyncio.create_task(elsewhere.run(9))
        await elsewhere.next(Kind.COORDINATE)
        await elsewhere.say(Kind.PROGRESS, progress())
        assert [one.line for one in (await requests()).requests] == [1, 2, 3, 4, 5, 6]
        for lines in ((2,), (5, 6)):  # they come, and are not on disk
            await elsewhere.say(Kind.OUTCOMES, outcomes(*lines))
            await only_pings()
        disk.release()  # the first of the two groups
        assert [one.line for one in (await requests()).requests] == [7]
        await only_pings()
        disk.release()
        last = await requests()
        assert ([one.line for one in last.requests], last.number) == ([8, 9], 2)
        if not last.last:
            last = await requests()
        assert last.last
        await elsewhere.say(Kind.ENDED, ended())  # overtakes the outcomes
        await elsewhere.say(Kind.OUTCOMES, outcomes(1, 3, 4, 7, 8, 9))
        disk.release()
        await running
        assert sorted(elsewhere.kept) == list(range(1, 10))
        assert elsewhere.loop.statistics().first_tokens is not None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "header", "words"),
    [
        (Kind.OUTCOMES, outcomes(4), "node-1: it answers line 4, which it was not asked for"),
        (Kind.OUTCOMES, outcomes(1, 1), "node-1: it answers line 1, which it was not asked for"),
        (Kind.TOKENS, progress(), "node-1: TOKENS is not what this stage sends"),
        (Kind.PROGRESS, outcomes(1), "node-1: a header is not a ProgressHeader"),
        (Kind.ENDED, ended(WireError("stalled", "waited 300 s", None)), "waited 300 s"),
    ],
)
def test_what_a_coordinator_may_not_say_ends_the_job(kind: Kind, header: Any, words: str) -> None:
    async def main() -> None:
        elsewhere = Elsewhere()
        running = asyncio.create_task(elsewhere.run(3))
        await elsewhere.say(Kind.PROGRESS, progress())
        await elsewhere.next(Kind.REQUESTS)
        await elsewhere.say(kind, header)
        with pytest.raises(BBQuicError, match=words):
            await running

    asyncio.run(main())


def test_an_outcome_that_came_is_kept_and_another_of_that_line_refused() -> None:
    async def main() -> None:
        elsewhere = Elsewhere()
        running = asyncio.create_task(elsewhere.run(3))
        await elsewhere.say(Kind.PROGRESS, progress())
        await elsewhere.next(Kind.REQUESTS)
        for _ in range(2):
            await elsewhere.say(Kind.OUTCOMES, outcomes(1))
        with pytest.raises(RemoteProtocolError, match="line 1"):
            await running

    asyncio.run(main())


def test_a_loop_that_ends_before_it_had_every_request_is_an_error() -> None:
    async def main() -> None:
        elsewhere = Elsewhere()
        running = asyncio.create_task(elsewhere.run(30))
        await elsewhere.say(Kind.PROGRESS, progress())
        await elsewhere.next(Kind.REQUESTS)
        await elsewhere.say(Kind.ENDED, ended())
        with pytest.raises(RemoteProtocolError, match="before it had every request"):
            await running

    asyncio.run(main())


def test_another_stage_may_say_little_and_its_end_ends_the_job() -> None:
    async def main() -> None:
        for message, words in (
            (Message(Kind.OUTCOMES, encode_header(outcomes(1))), "node-2: OUTCOMES is not what this"),
            (None, "node-1 was closed here"),
        ):
            elsewhere = Elsewhere()
            running = asyncio.create_task(elsewhere.run(3))
            await elsewhere.next(Kind.COORDINATE)
            if message is None:
                elsewhere.other.close()
            else:
                await elsewhere.other.send(message)
            with pytest.raises(BBQuicError, match=words):
                await running

    asyncio.run(main())


def test_a_silent_coordinator_is_named_and_then_given_up() -> None:
    async def main() -> None:
        elsewhere = Elsewhere(slow=0.02, stall=0.1)
        running = asyncio.create_task(elsewhere.run(1))
        await elsewhere.next(Kind.COORDINATE)
        waiting = None
        while waiting is None and not running.done():
            waiting = elsewhere.loop.statistics().waiting_for
            await asyncio.sleep(0)
        assert "node-1, which coordinates job" in (waiting or "")
        with pytest.raises(Stalled, match=f"for node-1, which coordinates job {JOB}; not heard of"):
            await running

    asyncio.run(main())


def test_figures_that_were_overtaken_are_dropped_and_those_of_other_stages_refused() -> None:
    async def main() -> None:
        elsewhere = Elsewhere()
        handle = elsewhere.loop._handle_untrusted
        none = LoopStatistics.none(STAGES)
        for number, tokens in ((2, 20), (1, 10)):
            told = progress(number)
            told = type(told)(JOB, 0, number, LoopStatistics(none.stages, none.sums, generated_tokens=tokens))
            handle(0, Message(Kind.PROGRESS, encode_header(told)))
        assert elsewhere.loop.statistics().generated_tokens == 20
        wrong = type(progress())(JOB, 0, 3, LoopStatistics.none(STAGES[:1]))
        with pytest.raises(RemoteProtocolError, match="other stages than the plan's"):
            handle(0, Message(Kind.PROGRESS, encode_header(wrong)))

    asyncio.run(main())


@given(
    which=st.sampled_from(TO_COMMANDS),
    place=st.integers(0, 2000),
    byte=st.integers(0, 255),
    cut=st.booleans(),
)
def test_damaged_messages_of_a_coordinator_are_refused_and_nothing_worse(
    which: tuple[Kind, bytes], place: int, byte: int, cut: bool
) -> None:
    kind, header = which
    at = place % len(header)
    damaged = header[:at] if cut else header[:at] + bytes([byte]) + header[at + 1 :]

    async def main() -> None:
        elsewhere = Elsewhere()
        elsewhere.loop._awaited |= {1, 2, 3}
        with suppress(BBQuicError):
            elsewhere.loop._handle_untrusted(0, Message(kind, damaged))
        elsewhere.loop.statistics()

    asyncio.run(main())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e300])
def test_sums_that_are_no_numbers_are_refused(bad: float) -> None:
    none = LoopStatistics.none(STAGES)
    with pytest.raises(ValueError, match="not a finite number"):
        LoopStatistics(none.stages, none.sums._replace(measured=bad))


def test_sums_of_other_stages_are_refused() -> None:
    none, one = LoopStatistics.none(STAGES), LoopStatistics.none(STAGES[:1])
    with pytest.raises(ValueError, match="sums of 1 stages are not those of 2"):
        LoopStatistics(none.stages, one.sums)


def test_more_tokens_shared_than_there_were_are_refused() -> None:
    none = LoopStatistics.none(STAGES)
    with pytest.raises(ValueError, match="of 3 prompt tokens 4 cannot be shared"):
        LoopStatistics(none.stages, none.sums, prompt_tokens=3, shared_tokens=4)


@pytest.mark.parametrize("shares", [True, False])
def test_a_coordinator_elsewhere_is_told_how_to_work(shares: bool) -> None:
    plan = PlanHeader(JOB, 0, "tiny", "float32", STAGES, (64, 32), 2, 3, Manifest("tiny", {}, "", {}))
    work = SchedulerOptions(
        2, 5, (64, 32), 17, 9, 3, 1, shares_prefixes=shares, most_guesses=4, kept_guesses=2
    )
    header = CoordinateHeader.of(plan, work, frozenset({2}), CoordinatorOptions(), "n-grams")
    assert decode_header_untrusted(CoordinateHeader, encode_header(header)).work(plan) == work
    assert header.drafter == "n-grams"


def test_a_drafter_that_a_coordinator_elsewhere_does_not_have_is_refused_by_name() -> None:
    plan = PlanHeader(JOB, 0, "tiny", "float32", STAGES, (64, 32), 2, 3, Manifest("tiny", {}, "", {}))
    work = SchedulerOptions(2, 5, (64, 32), most_guesses=4)
    with pytest.raises(ConfigError, match=r"^a-small-model cannot draft for a coordinator on a node"):
        CoordinateHeader.of(plan, work, frozenset({2}), CoordinatorOptions(), "a-small-model")
