"""What passes between a coordinator and its stages, with the time: a channel before the real one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bbquic.runtime.protocol import PackHeader, TokensHeader
from bbquic.runtime.timing import StageTiming
from bbquic.transport.channel import Channel, ChannelStatistics, Role, Sent
from bbquic.transport.identity import Peer
from bbquic.transport.message import Kind, Message, decode_header_untrusted
from bbquic.transport.probe import ProbeResult


@dataclass(slots=True)
class Passed:
    """One pass of a micro-batch: when its rows left the coordinator, and when its tokens were back."""

    micro_batch: int
    step: int
    sent: float  # time.monotonic, as all hosts of an emulated network share it
    received: float = 0.0
    tokens: int = 0
    timings: tuple[StageTiming, ...] = ()
    size: int = 0  # bytes of the message with the rows


@dataclass(slots=True)
class Log:
    """All passes of a run, in the order in which their tokens came."""

    done: list[Passed] = field(default_factory=list)
    _on_their_way: dict[tuple[int, int], Passed] = field(default_factory=dict)

    def left(self, pack: PackHeader, size: int, at: float) -> None:
        key = (pack.micro_batch, pack.step)
        self._on_their_way[key] = Passed(*key, sent=at, size=size)

    def came(self, tokens: TokensHeader, at: float) -> None:
        passed = self._on_their_way.pop((tokens.micro_batch, tokens.step), None)
        if passed is not None:
            passed.received, passed.tokens, passed.timings = at, len(tokens.tokens), tokens.timings
            self.done.append(passed)


class ObservedChannel:
    """A channel that notes rows as they leave and tokens as they come, and changes nothing."""

    def __init__(self, channel: Channel, log: Log) -> None:
        self._channel = channel
        self._log = log

    @property
    def peer(self) -> Peer:
        return self._channel.peer

    @property
    def role(self) -> Role:
        return self._channel.role

    @property
    def is_closed(self) -> bool:
        return self._channel.is_closed

    async def send(self, message: Message) -> Sent:
        if message.kind is Kind.ROWS:
            pack = decode_header_untrusted(PackHeader, message.header)
            self._log.left(pack, message.size, time.monotonic())
        return await self._channel.send(message)

    async def receive(self) -> Message:
        message = await self._channel.receive()
        if message.kind is Kind.TOKENS:
            at = time.monotonic()
            self._log.came(decode_header_untrusted(TokensHeader, message.header), at)
        return message

    def close(self, reason: str = "") -> None:
        self._channel.close(reason)

    async def wait_closed(self) -> None:
        await self._channel.wait_closed()

    def statistics(self) -> ChannelStatistics:
        return self._channel.statistics()

    async def probe(self) -> ProbeResult:
        return await self._channel.probe()
