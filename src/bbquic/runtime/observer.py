"""What a coordinator notes of its loop as packs leave and tokens come: cheap, bounded, and read by others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bbquic.runtime.accounting import LoopSums, account
from bbquic.runtime.clocks import ClockEstimate
from bbquic.runtime.heartbeat import Pulse
from bbquic.runtime.protocol import PackHeader, PingHeader, PongHeader, TokensHeader
from bbquic.runtime.telemetry import Quantiles
from bbquic.runtime.timing import StageTiming
from bbquic.transport.channel import Sent
from bbquic.units import Bytes, Seconds

_CLOCK_AGE = Seconds(0.2)  # an estimate is carried on that long before it is made anew
_MOST_KEPT = 16_384  # packs on their way, and prompts without a token; more are not timed

_Seat = tuple[int, int, int]  # micro-batch, slot, generation


@dataclass(frozen=True, slots=True)
class Launch:
    """A pack that left."""

    at: Seconds
    rows: int
    tokens: int
    size: Bytes
    first_tokens: tuple[Seconds, ...]  # when the prompts were begun whose first token this pack brings


@dataclass(frozen=True, slots=True)
class Passage:
    """A pack that came around: what a trace is made of. Moments of `launch` and `came` are ours."""

    micro_batch: int
    step: int
    launch: Launch
    timings: tuple[StageTiming, ...]
    came: Seconds
    answers: int  # tokens


class Recorder(Protocol):
    """Something that wants every passage, such as `trace.TraceWriter`."""

    def record(self, passage: Passage, clocks: Sequence[ClockEstimate | None]) -> None: ...


class LoopObserver:
    """A coordinator's notes on one job over stages `nodes`. Time is an argument."""

    def __init__(self, nodes: Sequence[str], recorder: Recorder | None = None) -> None:
        self.pulses = tuple(Pulse() for _ in nodes)
        self.sums = LoopSums.none(len(nodes))
        self.first_tokens = Quantiles()
        self.spent = Seconds(0.0)  # by the coordinator on packs and tokens
        self._recorder = recorder
        self._launches: OrderedDict[tuple[int, int], Launch] = OrderedDict()
        self._sent: dict[tuple[int, int], Sent] = {}  # of launches
        self._begun: OrderedDict[_Seat, Seconds] = OrderedDict()
        self._clocks: tuple[ClockEstimate | None, ...] = (None,) * len(nodes)
        self._clocks_at = Seconds(float("-inf"))

    def launched(self, header: PackHeader, size: Bytes, now: Seconds) -> None:
        """A pack leaves, `size` bytes as a message."""
        launch = Launch(now, len(header.rows), header.token_count, size, self._begin(header, now))
        self._launches[header.micro_batch, header.step] = launch
        while len(self._launches) > _MOST_KEPT:
            self._sent.pop(self._launches.popitem(last=False)[0], None)

    def leaving(self, header: PackHeader, sent: Sent) -> None:
        """Its message is with the transport, and leaves when `sent` says."""
        if (header.micro_batch, header.step) in self._launches:
            self._sent[header.micro_batch, header.step] = sent

    def answered(self, header: TokensHeader, size: Bytes, came: Seconds) -> None:
        """Its tokens came, for the first time. What a lost pack took says nothing."""
        launch = self._launches.pop((header.micro_batch, header.step), None)
        sent = self._sent.pop((header.micro_batch, header.step), None)
        if launch is None or header.lost is not None or len(header.timings) != len(self.pulses):
            return
        for begun in launch.first_tokens:
            self.first_tokens.add(came - begun)
        clocks = self.clocks(came)
        left = launch.at if sent is None or sent.began is None else sent.began
        loop = account(
            launch.at,
            header.timings,
            clocks,
            came,
            rows=launch.size,
            tokens=size,
            to_wire=Seconds(max(0.0, left - launch.at)),
        )
        self.sums = self.sums.plus(loop)
        if self._recorder is not None:
            passage = Passage(
                header.micro_batch, header.step, launch, header.timings, came, len(header.tokens)
            )
            self._recorder.record(passage, clocks)

    def spend(self, duration: Seconds) -> None:
        """The coordinator was busy with a pack or its tokens for so long."""
        self.spent = Seconds(self.spent + duration)

    def ping(self, place: int, now: Seconds) -> PingHeader:
        return self.pulses[place].ping(now)

    def heard(self, place: int, pong: PongHeader, now: Seconds) -> None:
        self.pulses[place].take(pong, now)

    def clocks(self, now: Seconds) -> tuple[ClockEstimate | None, ...]:
        """The stages' clocks; estimates are made a few times a second, not for every pack."""
        if now - self._clocks_at > _CLOCK_AGE or None in self._clocks:
            self._clocks = tuple(pulse.estimate(now) for pulse in self.pulses)
            self._clocks_at = now
        return self._clocks

    def _begin(self, header: PackHeader, now: Seconds) -> tuple[Seconds, ...]:
        """Note which prompts begin with this pack, and give the beginnings of those that it completes."""
        batch, begun = header.micro_batch, self._begun
        for move in header.moves:
            moved = (move.micro_batch, move.slot, move.generation)
            began = now if move.keeps else begun.pop(moved, None)
            if began is not None:
                begun[batch, move.target, move.target_generation] = began
        complete = []
        for row in header.rows:
            seat = (batch, row.slot, row.generation)
            if row.first == 0:
                begun[seat] = now
            if row.wants_token and (began := begun.pop(seat, None)) is not None:
                complete.append(began)
        while len(begun) > _MOST_KEPT:
            begun.popitem(last=False)
        return tuple(complete)
