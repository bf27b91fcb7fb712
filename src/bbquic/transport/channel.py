"""What the runtime asks of a transport: endpoints, channels, messages. Nothing here knows QUIC."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bbquic.transport.identity import Peer
from bbquic.transport.link import LinkEstimate
from bbquic.transport.message import Message
from bbquic.transport.probe import ProbeResult
from bbquic.units import Bytes, Seconds


class Role(StrEnum):
    """What the process at the other end is. One machine, one key, may run both at once."""

    NODE = "node"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """A snapshot of one channel. `rtt` is the smoothed round trip, None before the first sample."""

    messages_sent: int
    messages_received: int
    bytes_sent: Bytes
    bytes_received: Bytes
    unacknowledged: Bytes
    rtt: Seconds | None
    min_rtt: Seconds | None
    link: LinkEstimate | None = None  # what is known of the link to the peer


@dataclass(slots=True, eq=False)
class Sent:
    """A message that was handed over. `began` is when its first datagram went to the kernel, in seconds of
    `time.monotonic()`: None until then, which may be after `send` returned. Any thread may look."""

    began: float | None = None


class Channel(Protocol):
    """An authenticated connection to one peer process, its hello exchanged. Messages of a channel
    may overtake one another (each has a stream of its own)."""

    @property
    def peer(self) -> Peer: ...

    @property
    def role(self) -> Role: ...

    @property
    def is_closed(self) -> bool: ...

    async def send(self, message: Message) -> Sent:
        """Hand a message over; returns once un-acknowledged bytes are below the high watermark.

        Raises: ConnectionLost when the channel ended. The deadline is the caller's `asyncio.timeout`.
        """

    async def receive(self) -> Message:
        """The next whole message. Raises: ConnectionLost when the channel ended, saying why."""

    def close(self, reason: str = "") -> None:
        """End the channel now; the peer sees `reason`. Messages not yet acknowledged may be lost."""

    async def wait_closed(self) -> None: ...

    def statistics(self) -> ChannelStatistics: ...

    async def probe(self) -> ProbeResult:
        """Measure the link to the peer by a few bursts, 1 MB and 3.5 s at most; statistics then know it too.

        For a link that carries nothing else meanwhile. Raises: ConnectionLost.
        """


class Endpoint(Protocol):
    """One process's place in the cluster: it dials peers, and is dialled by them, on one address."""

    @property
    def address(self) -> tuple[str, int]:
        """Where this endpoint listens: host and UDP port, the real one where 0 was asked for."""

    async def connect(self, peer: Peer) -> Channel:
        """Dial the node process of a peer. The deadline is the caller's `asyncio.timeout`.

        Raises: PeerUnreachable, PeerRefused (its key is not pinned, ours is not, versions differ).
        """

    async def accept(self) -> Channel:
        """The next channel that a pinned peer opened, its hello done. Refused ones never show here."""

    async def close(self) -> None:
        """Close every channel and the socket; waits until peers had a chance to hear of it."""
