"""A node's word on itself and its links: profiles when a coordinator asks, rates to the peers it names."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Executor

import msgspec

from bbquic.errors import BBQuicError, ConnectionLost, PlanRefused
from bbquic.runtime.forecast import Forecast, misjudged
from bbquic.runtime.links import figures_of, known_round_trip, least_round_trip
from bbquic.runtime.measure import Profiler
from bbquic.runtime.profile import WireProfile, shown
from bbquic.runtime.protocol import (
    ASKER,
    LinkFigures,
    LinksHeader,
    MeasureHeader,
    PlanHeader,
    ProfileHeader,
    Stage,
    SurveyHeader,
)
from bbquic.runtime.service import StageService
from bbquic.transport.channel import Channel, Endpoint
from bbquic.transport.identity import Peer
from bbquic.transport.message import Kind, Message, encode_header
from bbquic.units import Bytes, Seconds

logger = logging.getLogger("bbquic.node")

MOST_WAITING = 4  # coordinators that may wait for a measurement of their own
MOST_SURVEYS = 8  # under way at once
DIALS = 16  # at once, when a survey looks at many peers
LOOK_DEADLINE = Seconds(8.0)  # to reach a peer: a round trip of a second, lost twice
PROBE_DEADLINE = Seconds(15.0)  # and to measure the link to it; a probe ends by itself after 3.5 s


class Appraiser:
    """One node's. `activity` says in words what it measures just now."""

    def __init__(
        self, endpoint: Endpoint, me: Peer, peers: Mapping[str, Peer], profiler: Profiler, device: Executor
    ) -> None:
        """`device` is the one thread that computes."""
        self.activity: str | None = None
        self._endpoint = endpoint
        self._me = me
        self._peers = peers
        self._profiler = profiler
        self._device = device
        self._measuring = asyncio.Lock()
        self._waiting = 0
        self._surveys = 0
        self._dialling = asyncio.Semaphore(DIALS)
        self._probing = asyncio.Lock()  # two probes at once would measure each other
        self._known: dict[str, tuple[LinkFigures, float]] = {}  # rates that were measured, and when

    # Profiles.

    async def measure(self, channel: Channel, asked: MeasureHeader, *, held: Bytes, busy: str | None) -> None:
        """Answer a MEASURE by a PROFILE. `busy` says what the node is at, where it cannot measure now."""
        profile: WireProfile | None = None
        trouble: str | None = None
        try:
            profile = await self._profile(channel, asked, held, busy)
        except BBQuicError as error:
            trouble = error.message
        except Exception as error:  # the boundary of the device
            logger.exception("measuring for %s failed", channel.peer.name)
            trouble = f"{type(error).__name__}: {error}"
        if trouble is not None:
            logger.warning("no profile of %s for %s: %s", asked.model, channel.peer.name, trouble)
        header = ProfileHeader(asked.model, asked.dtype, profile, None if trouble is None else trouble[:4000])
        await _answer(channel, Message(Kind.PROFILE, encode_header(header)))

    async def _profile(
        self, channel: Channel, asked: MeasureHeader, held: Bytes, busy: str | None
    ) -> WireProfile:
        known = await asyncio.to_thread(self._profiler.remembered, asked, held)
        if known is not None:
            return WireProfile.of(known)
        if busy is not None:
            raise PlanRefused(f"{self._me.name} is {busy}, and has measured nothing for this model before")
        if self._waiting >= MOST_WAITING:
            raise PlanRefused(f"{self._me.name} is busy measuring for others")
        self._waiting += 1
        try:
            async with self._measuring:
                known = await asyncio.to_thread(self._profiler.remembered, asked, held)  # by now, perhaps
                return WireProfile.of(known) if known else await self._measured(channel, asked, held)
        finally:
            self._waiting -= 1

    async def _measured(self, channel: Channel, asked: MeasureHeader, held: Bytes) -> WireProfile:
        given_up = threading.Event()
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.activity = f"measuring {asked.model} in {asked.dtype}"
        logger.info("%s for %s", self.activity, channel.peer.name)
        try:
            profile = await loop.run_in_executor(
                self._device,
                lambda: self._profiler.measured(asked, held, lambda: given_up.is_set() or channel.is_closed),
            )
        finally:
            given_up.set()
            self.activity = None
        for line in (f"measured in {loop.time() - began:.1f} s", *shown(profile)):
            logger.info("%s: %s", asked.model, line)
        return WireProfile.of(profile)

    # What jobs show.

    async def forecast(self, plan: PlanHeader, stage: Stage) -> Forecast | None:
        """What is believed of a stage, to be held against what it will take; None where nothing is."""
        profile = await asyncio.to_thread(self._profiler.expected, plan.manifest.config, plan.dtype)
        if profile is None:
            return None
        embeds, heads = stage == plan.stages[0], stage == plan.stages[-1]
        return Forecast(profile, len(stage.blocks), embeds, heads)

    def job_ended(self, service: StageService) -> None:
        """Learn from a job: its hop's rate, and whether the profile was right; a wrong one is dropped."""
        if service.following is not None:
            following = service.following
            self._note(figures_of(following, following.peer.name, known_round_trip(following)))
        tally, plan = service.tally, service.plan
        off = misjudged(tally.steps, tally.split.compute, tally.expected)
        if off is not None:
            logger.info(
                "job %s: packs took %.2f times what the profile says; it is measured anew next time",
                plan.job,
                off,
            )
            self._profiler.forget(plan.manifest.config, plan.dtype)

    # Links.

    async def survey(self, channel: Channel, asked: SurveyHeader) -> None:
        """Answer a SURVEY by LINKS."""
        if self._surveys >= MOST_SURVEYS:
            busy = f"{self._me.name} is busy with {self._surveys} surveys"
            links = tuple(LinkFigures(name, trouble=busy) for name in asked.peers)
        else:
            self._surveys += 1
            try:
                looks = [self._look(channel, name, probes=name in asked.probe) for name in asked.peers]
                links = tuple(await asyncio.gather(*looks))
            finally:
                self._surveys -= 1
        await _answer(channel, Message(Kind.LINKS, encode_header(LinksHeader(asked.number, links))))

    async def _look(self, asker: Channel, name: str, *, probes: bool) -> LinkFigures:
        deadline = PROBE_DEADLINE if probes else LOOK_DEADLINE
        try:
            async with self._dialling, asyncio.timeout(deadline):
                if name == ASKER:
                    return await self._figures(asker, name, known_round_trip(asker), probes=probes)
                return await self._dial(name, probes=probes)
        except TimeoutError:
            trouble = f"{name} did not answer {self._me.name} for {deadline:.0f} s"
        except BBQuicError as error:
            trouble = error.message
        return LinkFigures(name, trouble=trouble[:512])

    async def _dial(self, name: str, *, probes: bool) -> LinkFigures:
        peer = self._peers.get(name)
        if peer is None or peer.address is None:
            raise PlanRefused(f"{self._me.name} does not know {name}, or no address for it")
        channel = await self._endpoint.connect(peer)
        try:
            return await self._figures(channel, name, await least_round_trip(channel), probes=probes)
        finally:
            channel.close("the survey ended")

    async def _figures(
        self, channel: Channel, name: str, min_rtt: Seconds | None, *, probes: bool
    ) -> LinkFigures:
        if probes:
            async with self._probing:
                await channel.probe()
        return self._note(figures_of(channel, name, min_rtt))

    def _note(self, figures: LinkFigures) -> LinkFigures:
        """Remember a rate that was measured; of an older one where these have none."""
        now = time.monotonic()
        if figures.rate is not None and figures.age is not None and not figures.is_lower_bound:
            self._known[figures.peer] = figures, now
            return figures
        if figures.peer not in self._known:
            return figures
        before, then = self._known[figures.peer]
        age = (before.age or 0.0) + now - then
        return msgspec.structs.replace(figures, rate=before.rate, is_lower_bound=False, age=age)


async def _answer(channel: Channel, message: Message) -> None:
    """Send, unless whoever asked is gone."""
    if channel.is_closed:
        return
    try:
        await channel.send(message)
    except ConnectionLost:
        logger.info("%s left before it had its answer", channel.peer.name)
