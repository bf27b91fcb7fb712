"""What a coordinator tells about its loop: one frozen snapshot, the same here and over the network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct

from bbquic.runtime.accounting import LoopSums
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.protocol import MAX_STAGES, Stage, Text
from bbquic.runtime.tally import wire_link
from bbquic.runtime.telemetry import FirstTokens
from bbquic.runtime.timing import Count, Finite, StageReport, WireLink
from bbquic.transport.channel import ChannelStatistics

MOST_DECISIONS = 16
_MOST = 1e15  # seconds, bytes or a count; no run comes near


class LoopEnd(Struct, frozen=True, forbid_unknown_fields=True):
    """The coordinator's side of a hop: how it reaches the first stage, or how the last one reaches it."""

    rtt: Finite | None = None  # seconds
    traffic: Count = 0  # bytes
    messages: Count = 0
    link: WireLink | None = None

    @classmethod
    def sent(cls, channel: ChannelStatistics) -> LoopEnd:
        return cls(channel.rtt, channel.bytes_sent, channel.messages_sent, _link(channel))

    @classmethod
    def received(cls, channel: ChannelStatistics) -> LoopEnd:
        return cls(channel.rtt, channel.bytes_received, channel.messages_received, _link(channel))


class StageProgress(Struct, frozen=True, forbid_unknown_fields=True):
    """A stage, and what it said of itself last; None before it did."""

    stage: Stage
    report: StageReport | None = None


class LoopStatistics(Struct, frozen=True, forbid_unknown_fields=True):
    """A job's loop so far: sums, from which a reader takes differences.

    Raises: ValueError where sums are not of these stages, or a figure is none.
    """

    stages: Annotated[tuple[StageProgress, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    sums: LoopSums
    prompt_tokens: Count = 0  # of prompts that were read
    shared_tokens: Count = 0  # of these: copied from other slots, in no row
    generated_tokens: Count = 0
    in_flight_sequences: Count = 0
    spent: Finite = 0.0  # seconds, by the coordinator itself on packs and tokens
    first_tokens: FirstTokens | None = None
    waiting_for: Text | None = None  # who keeps a step waiting, and with what
    decisions: Annotated[
        tuple[Text, ...], Meta(max_length=MOST_DECISIONS)
    ] = ()  # about the loop, the newest last
    drafts: Drafts = Drafts()
    to_first: LoopEnd = LoopEnd()
    from_last: LoopEnd = LoopEnd()

    def __post_init__(self) -> None:
        count = len(self.stages)
        if len(self.sums.stages) != count or len(self.sums.hops) != count + 1:
            raise ValueError(f"sums of {len(self.sums.stages)} stages are not those of {count}")
        if self.shared_tokens > self.prompt_tokens:
            raise ValueError(f"of {self.prompt_tokens} prompt tokens {self.shared_tokens} cannot be shared")
        times = () if self.first_tokens is None else (self.first_tokens.median, self.first_tokens.p95)
        values = (*_leaves(self.sums), *times, self.drafts.seconds)
        if not all(math.isfinite(value) and abs(value) <= _MOST for value in values):
            raise ValueError("a sum is not a finite number")

    @classmethod
    def none(cls, stages: tuple[Stage, ...]) -> LoopStatistics:
        """Before anything happened."""
        return cls(tuple(map(StageProgress, stages)), LoopSums.none(len(stages)))


def _link(channel: ChannelStatistics) -> WireLink | None:
    return None if channel.link is None else wire_link(channel)


def _leaves(value: tuple[Any, ...] | float) -> Iterator[float]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
