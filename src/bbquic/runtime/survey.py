"""What a planner is to know of a cluster, asked of its nodes: a profile of each, and every link between them.

Only what a node says is believed of it, and whoever does not answer is left out, with a note that says why.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from bbquic.errors import BBQuicError, PlanRefused, Stalled
from bbquic.model.manifest import Manifest
from bbquic.plan.cluster import COMMAND, Cluster, LinkProfile, NodeProfile
from bbquic.runtime.links import estimate_of, figures_of, known_round_trip, least_round_trip
from bbquic.runtime.protocol import (
    ASKER,
    LinkFigures,
    LinksHeader,
    MeasureHeader,
    PingHeader,
    PongHeader,
    ProfileHeader,
    RefusedHeader,
    SurveyHeader,
)
from bbquic.runtime.tasks import owned_tasks
from bbquic.transport.channel import Channel
from bbquic.transport.identity import Peer
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.transport.probe import Link, needs_probe, plan_probes
from bbquic.units import BytesPerSecond, Seconds

FLOOR = BytesPerSecond(12.5e6)  # of a link that nothing was seen to limit: 100 Mbit/s
SHORTEST = Seconds(50e-6)  # one way; a kernel's own time between two processes
LOOPBACK = LinkProfile(BytesPerSecond(250e6), Seconds(200e-6))  # what two cores carry between two processes

T = TypeVar("T")

Report = Callable[[str], None]
Links = dict[tuple[str, str], LinkFigures]


@dataclass(frozen=True, slots=True)
class SurveyOptions:
    """How long each wait may take, and how old a rate may be to be believed without measuring."""

    profile: Seconds = Seconds(60.0)  # of one node: 20 s of measuring, once others on its machine are done
    look: Seconds = Seconds(45.0)
    probe: Seconds = Seconds(20.0)  # a round of probes
    ask: Seconds = Seconds(2.0)  # a node that measures is asked that often what it is at
    oldest: Seconds = Seconds(600.0)
    fresh: bool = False  # whether what was measured before counts for nothing


@dataclass(frozen=True, slots=True)
class Survey:
    """The cluster as far as it is known; `notes` say in words what is not, or not for sure."""

    cluster: Cluster
    notes: tuple[str, ...]


async def survey(
    channels: Sequence[Channel],
    nodes: Sequence[Peer],
    manifest: Manifest,
    dtype: str,
    *,
    prices: Mapping[str, float] | None = None,
    hosts: Mapping[str, str] | None = None,
    report: Report = lambda _: None,
    options: SurveyOptions | None = None,
) -> Survey:
    """Ask `nodes`, by `channels` in the same order, for what a plan of this model is made from.

    Nobody else may read the channels meanwhile. `prices` are dollars an hour by name. `hosts` says on which
    machine a node, or COMMAND, is; addresses in peers.toml say it where it does not. A node that fails is
    left out, and noted; nothing of that is raised.
    """
    asking = _Asking(
        {peer.name: channel for peer, channel in zip(nodes, channels, strict=True)},
        {**hosts_of(nodes), **(hosts or {})},
        report,
        options or SurveyOptions(),
    )
    profiles = await asking.profiles(manifest, dtype, prices or {})
    links = await asking.links([profile.name for profile in profiles])
    return Survey(Cluster(tuple(profiles), links), tuple(asking.notes))


def hosts_of(nodes: Sequence[Peer]) -> dict[str, str]:
    """The host of each node, by its address; of the command, theirs where they are all on loopback."""
    hosts = {peer.name: peer.address[0] if peer.address else peer.name for peer in nodes}
    local = {host for host in hosts.values() if _is_loopback(host)}
    return {**hosts, COMMAND: local.pop() if len(local) == 1 and len(set(hosts.values())) == 1 else ""}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass
class _Asking:
    channels: dict[str, Channel]
    hosts: dict[str, str]
    report: Report
    options: SurveyOptions
    notes: list[str] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=lambda: count(1))

    # Profiles.

    async def profiles(
        self, manifest: Manifest, dtype: str, prices: Mapping[str, float]
    ) -> list[NodeProfile]:
        """In the order of the nodes; those on one machine measure one after the other."""
        asked = MeasureHeader(manifest.model, manifest.config, dtype, self.options.fresh)
        turns = {host: asyncio.Lock() for host in self.hosts.values()}

        async def one(name: str) -> NodeProfile | None:
            try:
                async with turns[self.hosts[name]]:
                    answer = await self._measure(name, asked)
            except BBQuicError as error:
                self._leave_out(name, error.message)
                return None
            if answer.profile is None:
                self._leave_out(name, answer.trouble or "it does not say why")
                return None
            return answer.profile.plain(name, prices.get(name))

        async with owned_tasks() as tasks:
            asking = [tasks.create_task(one(name)) for name in self.channels]
        return [profile for task in asking if (profile := task.result()) is not None]

    async def _measure(self, name: str, asked: MeasureHeader) -> ProfileHeader:
        self.report(f"{name}: measuring")

        def is_it(message: Message) -> ProfileHeader | None:
            if message.kind is not Kind.PROFILE:
                return None
            profile = decode_header_untrusted(ProfileHeader, message.header)
            return profile if (profile.model, profile.dtype) == (asked.model, asked.dtype) else None

        request = Message(Kind.MEASURE, encode_header(asked))
        answer = await self._ask(name, request, is_it, self.options.profile, "to measure itself")
        self.report(f"{name}: measured" if answer.profile else f"{name}: no profile")
        return answer

    def _leave_out(self, name: str, why: str) -> None:
        self.notes.append(f"{name} is left out: {why}")

    # Links.

    async def links(self, names: Sequence[str]) -> dict[tuple[str, str], LinkProfile]:
        """Of all pairs of these nodes and the command, both ways, as far as they are known."""
        found = await self._look(names)
        oldest = Seconds(0.0) if self.options.fresh else self.options.oldest
        due = [
            Link(*pair)
            for pair, figures in found.items()
            if figures.trouble is None and needs_probe(estimate_of(figures), oldest)
        ]
        rounds = plan_probes(due, {name: self.hosts[name] for name in (*names, COMMAND)})
        for number, pairs in enumerate(rounds, 1):
            self.report(f"links: round {number} of {len(rounds)}, {len(pairs)} measured at once")
            async with owned_tasks() as tasks:
                for pair in pairs:
                    tasks.create_task(self._probe(pair, found))
        return {pair: profile for pair in found if (profile := self._profile(pair, found)) is not None}

    async def _look(self, names: Sequence[str]) -> Links:
        """What every node, and the command itself, knows of its links by now."""
        found: Links = {}

        async def from_node(name: str) -> None:
            others = tuple(
                ASKER if other == COMMAND else other for other in (*names, COMMAND) if other != name
            )
            channel = self.channels[name]
            try:
                async with asyncio.timeout(self.options.look):
                    round_trip = await least_round_trip(channel)
            except (TimeoutError, BBQuicError) as error:
                trouble = error.message if isinstance(error, BBQuicError) else f"{name} does not answer"
                found[COMMAND, name] = LinkFigures(name, trouble=trouble[:512])
            else:
                found[COMMAND, name] = figures_of(channel, name, round_trip)
            for figures in await self._survey(name, others, (), self.options.look):
                found[name, figures.peer] = figures

        self.report("links: who reaches whom")
        async with owned_tasks() as tasks:
            for name in names:
                tasks.create_task(from_node(name))
        return dict(sorted(found.items()))

    async def _probe(self, pair: Link, found: Links) -> None:
        if pair.sender == COMMAND:
            channel = self.channels[pair.receiver]
            try:
                async with asyncio.timeout(self.options.probe):
                    await channel.probe()
            except (TimeoutError, BBQuicError):
                return  # what is known of it is said in the end
            found[pair] = figures_of(channel, pair.receiver, known_round_trip(channel) or _rtt(found[pair]))
            return
        names = (pair.receiver,)
        for figures in await self._survey(pair.sender, names, names, self.options.probe):
            found[pair] = figures

    async def _survey(
        self, name: str, peers: tuple[str, ...], probe: tuple[str, ...], deadline: Seconds
    ) -> tuple[LinkFigures, ...]:
        """A node's figures of its links to `peers`; where it has none, why."""
        if not peers:
            return ()
        number = next(self._numbers)

        def is_it(message: Message) -> LinksHeader | None:
            if message.kind is not Kind.LINKS:
                return None
            links = decode_header_untrusted(LinksHeader, message.header)
            return links if links.number == number else None

        request = Message(Kind.SURVEY, encode_header(SurveyHeader(number, peers, probe)))
        what = f"to measure its link to {', '.join(probe)}" if probe else "to look at its links"
        try:
            answer = await self._ask(name, request, is_it, deadline, what)
        except BBQuicError as error:
            return tuple(LinkFigures(peer, trouble=error.message[:512]) for peer in peers)
        told = {figures.peer: figures for figures in answer.links}
        return tuple(
            told.get(peer, LinkFigures(peer, trouble=f"{name} says nothing of it")) for peer in peers
        )

    def _profile(self, pair: tuple[str, str], found: Links) -> LinkProfile | None:
        """A link's figures for the planner, and a note where they are not what was measured."""
        sender, receiver = pair
        figures = found[pair]
        if figures.trouble is not None:
            self.notes.append(f"{sender} cannot send to {receiver}: {figures.trouble}")
            return None
        back = found.get((receiver, sender))
        round_trips = [rtt for one in (figures, back) if one is not None and (rtt := _rtt(one)) is not None]
        if self.hosts[sender] == self.hosts[receiver]:
            return LOOPBACK
        if not round_trips:
            self.notes.append(f"{sender} cannot send to {receiver}: nobody knows how far it is")
            return None
        rate = figures.rate
        if rate is None or figures.is_lower_bound:
            rate = max(rate or 0.0, FLOOR)
            self.notes.append(
                f"nothing was seen to limit the link from {sender} to {receiver}: "
                f"taken as {rate * 8 / 1e6:.0f} Mbit/s"
            )
        delay = Seconds(max(min(round_trips) / 2, SHORTEST))
        return LinkProfile(BytesPerSecond(rate), delay, figures.loss or 0.0)

    # One question to one node.

    async def _ask(
        self, name: str, request: Message, is_it: Callable[[Message], T | None], deadline: Seconds, what: str
    ) -> T:
        """The answer to a request; what the node says it is at meanwhile is reported.

        Raises: Stalled, ConnectionLost, PlanRefused with the node's reason, RemoteProtocolError.
        """
        channel = self.channels[name]
        try:
            async with asyncio.timeout(deadline), owned_tasks() as tasks:
                await channel.send(request)
                asking = tasks.create_task(self._keep_asking(channel))
                answer = await self._hear(channel, name, is_it)
                asking.cancel()
                return answer
        except TimeoutError:
            raise Stalled(f"waited {deadline:.0f} s for {name} {what}") from None

    async def _hear(self, channel: Channel, name: str, is_it: Callable[[Message], T | None]) -> T:
        said = ""
        while True:
            message = await channel.receive()
            if (answer := is_it(message)) is not None:
                return answer
            if message.kind is Kind.REFUSED:
                refused = decode_header_untrusted(RefusedHeader, message.header)
                raise PlanRefused(refused.reason, hint=refused.hint)
            if message.kind is Kind.PONG:
                activity = decode_header_untrusted(PongHeader, message.header).activity
                if activity not in (said, "idle"):
                    self.report(f"{name}: {activity}")
                said = activity

    async def _keep_asking(self, channel: Channel) -> None:
        while True:
            await asyncio.sleep(self.options.ask)
            await channel.send(Message(Kind.PING, encode_header(PingHeader(next(self._numbers)))))


def _rtt(figures: LinkFigures) -> Seconds | None:
    return None if figures.min_rtt is None else Seconds(figures.min_rtt)
