"""A coordinator's first minutes with the nodes: who is there, who holds what, and their word that they do."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from bbquic.errors import PeerRefused, PeerUnreachable, PlanRefused, Stalled, TransportError
from bbquic.runtime.protocol import (
    DescribeHeader,
    DescriptionHeader,
    PingHeader,
    PlanHeader,
    PongHeader,
    ReadyHeader,
    RefusedHeader,
    ReleaseHeader,
    Stage,
)
from bbquic.runtime.tasks import owned_tasks
from bbquic.transport.channel import Channel, Endpoint
from bbquic.transport.identity import Peer
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Seconds

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ClusterDeadlines:
    """How long each wait may take before it is an error that names the node."""

    dial: Seconds = Seconds(20.0)
    describe: Seconds = Seconds(20.0)
    load: Seconds = Seconds(1800.0)  # a node may have to fetch the model first, over a home line
    release: Seconds = Seconds(5.0)
    ask: Seconds = Seconds(10.0)  # while a node loads, it is asked that often how far it is


@dataclass(frozen=True, slots=True)
class StageLink:
    """A stage of the plan and the coordinator's channel to its node."""

    stage: Stage
    channel: Channel


def new_job_id() -> str:
    """16 hex digits, never used before."""
    return secrets.token_hex(8)


@asynccontextmanager
async def dialled(
    endpoint: Endpoint,
    nodes: Sequence[Peer],
    deadlines: ClusterDeadlines,
    without: Report | None = None,
) -> AsyncIterator[tuple[Channel, ...]]:
    """Channels to all nodes, in order; closed at the end.

    With `without`, to those that answer, and it hears of each of the others. Raises: PeerUnreachable,
    PeerRefused; with `without`, only where none answers.
    """
    channels: list[Channel | None] = [None] * len(nodes)
    missing: list[TransportError] = []

    async def dial(place: int, peer: Peer) -> None:
        assert peer.address is not None, "a node without an address is not dialled"
        host, port = peer.address
        try:
            async with asyncio.timeout(deadlines.dial):
                channels[place] = await endpoint.connect(peer)
        except TimeoutError:
            raise PeerUnreachable(
                f"{peer.name} at {host}:{port} did not answer for {deadlines.dial:.0f} s",
                hint="is `bbquic node` running there, and its UDP port open to this machine?",
            ) from None

    async def try_to_dial(place: int, peer: Peer) -> None:
        try:
            await dial(place, peer)
        except (PeerUnreachable, PeerRefused) as error:
            if without is None:
                raise
            missing.append(error)
            without(f"going on without {peer.name}: {error.message}")

    try:
        async with owned_tasks() as tasks:
            for place, peer in enumerate(nodes):
                tasks.create_task(try_to_dial(place, peer))
        if len(missing) == len(nodes) and missing:
            raise missing[0]
        yield tuple(channel for channel in channels if channel is not None)
    finally:
        for channel in channels:
            if channel is not None:
                channel.close("the job ended")


async def describe_all(
    channels: Sequence[Channel], deadlines: ClusterDeadlines
) -> tuple[DescriptionHeader, ...]:
    """What each node says of itself. Raises: Stalled naming a node that does not answer."""

    async def ask(channel: Channel) -> DescriptionHeader:
        await channel.send(Message(Kind.DESCRIBE, encode_header(DescribeHeader())))
        reply = await _reply(channel, (Kind.DESCRIPTION,), deadlines.describe, "to describe itself")
        return decode_header_untrusted(DescriptionHeader, reply.header)

    async with owned_tasks() as tasks:
        asked = [tasks.create_task(ask(channel)) for channel in channels]
    return tuple(task.result() for task in asked)


async def deploy(
    links: Sequence[StageLink], plans: Sequence[PlanHeader], deadlines: ClusterDeadlines, report: Report
) -> tuple[ReadyHeader, ...]:
    """Send each stage its plan and wait until all are ready; `report` hears of each.

    Raises: PlanRefused with the node's own reason; Stalled.
    """

    async def place(link: StageLink, plan: PlanHeader) -> ReadyHeader:
        await link.channel.send(Message(Kind.PLAN, encode_header(plan)))
        report(f"{link.stage}: loading")
        what = f"to load blocks {link.stage.first}-{link.stage.stop - 1}"
        async with owned_tasks() as tasks:
            asking = tasks.create_task(_keep_asking(link.channel, deadlines.ask))
            reply = await _reply(
                link.channel,
                (Kind.READY, Kind.REFUSED),
                deadlines.load,
                what,
                lambda activity: report(f"{link.stage}: {activity}"),
            )
            asking.cancel()
        if reply.kind is Kind.REFUSED:
            refused = decode_header_untrusted(RefusedHeader, reply.header)
            raise PlanRefused(refused.reason, hint=refused.hint)
        ready = decode_header_untrusted(ReadyHeader, reply.header)
        report(f"{link.stage}: ready, {ready.weights / 1e6:.0f} MB of weights, {ready.seconds:.1f} s")
        return ready

    async with owned_tasks() as tasks:
        placed = [tasks.create_task(place(link, plan)) for link, plan in zip(links, plans, strict=True)]
    return tuple(task.result() for task in placed)


async def release(links: Sequence[StageLink], job: str, *, cancel: bool, deadlines: ClusterDeadlines) -> None:
    """Tell every node that the job ended, so that it frees what it holds; a lost node is not waited for."""
    kind = Kind.CANCEL if cancel else Kind.RELEASE
    message = Message(kind, encode_header(ReleaseHeader(job)))

    async def tell(channel: Channel) -> None:
        if not channel.is_closed:
            await channel.send(message)

    with suppress(TimeoutError):
        async with asyncio.timeout(deadlines.release):
            await asyncio.gather(*(tell(link.channel) for link in links), return_exceptions=True)


async def _keep_asking(channel: Channel, interval: Seconds) -> None:
    """Ask a node again and again what it is at."""
    number = 0
    while True:
        await asyncio.sleep(interval)
        number += 1
        await channel.send(Message(Kind.PING, encode_header(PingHeader(number))))


async def _reply(
    channel: Channel,
    kinds: tuple[Kind, ...],
    deadline: Seconds,
    what: str,
    report: Report = lambda _: None,
) -> Message:
    """The next message of one of these kinds; `report` hears what a PONG says the node is at.

    Others are late ones of before and are passed over. Raises: Stalled naming the node and `what`.
    """
    try:
        async with asyncio.timeout(deadline):
            while True:
                message = await channel.receive()
                if message.kind in kinds:
                    return message
                if message.kind is Kind.PONG:
                    report(decode_header_untrusted(PongHeader, message.header).activity)
    except TimeoutError:
        raise Stalled(f"waited {deadline:.0f} s for {channel.peer.name} {what}") from None
