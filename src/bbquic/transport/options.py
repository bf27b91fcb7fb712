"""The settings of an endpoint, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bbquic.transport.message import MIB
from bbquic.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Limits and clocks. A receiver that does not read holds at most `receive_window` bytes and
    `inbox_messages` messages a channel; then its sender stops, with `high_watermark` bytes of its own."""

    idle_timeout: Seconds = Seconds(20.0)  # without a byte from the peer; then it is gone
    keep_alive: Seconds = Seconds(5.0)  # a ping this often: four chances before the idle timeout
    handshake_timeout: Seconds = Seconds(10.0)  # for handshake and hello, of who dials us
    high_watermark: Bytes = Bytes(8 * MIB)  # un-acknowledged: beyond the 6.3 MB of 500 Mbit/s at 100 ms
    low_watermark: Bytes = Bytes(4 * MIB)  # where a sender goes on: half, so that it wakes seldom
    outbox_messages: int = 256  # un-acknowledged messages a channel; each costs a stream's bookkeeping
    receive_window: Bytes = Bytes(96 * MIB)  # unread bytes: largest message, one manifest, 8 MiB to spare
    inbox_messages: int = 256  # unread messages: each is a stream the peer may not yet replace
    connections: int = 256  # dialled and accepted together
    connections_per_host: int = 32  # accepted from one IP address; a cluster is a handful of processes
    unfinished_handshakes: int = 64  # accepted and not yet known: all that a stranger can make us hold
    retry_above: int = 8  # unfinished handshakes from which on an address must prove that it is one
    waiting_channels: int = 64  # accepted and not yet taken by `accept()`
    datagram_size: Bytes = Bytes(1200)  # of UDP payload: what any path carries
    loopback_datagram_size: Bytes = Bytes(16_000)  # within one machine; aioquic counts to 16,383
    rate_control: bool = True  # off: aioquic's Reno, which takes the path's random losses for queues
    links: Path | None = None  # where rates of links are kept for later runs; None keeps nothing
    fast_paths: bool = True  # off: every packet by aioquic's own, slower, code
    batched_sockets: bool = True  # off: a system call a datagram, as on systems that are not Linux

    def __post_init__(self) -> None:
        """Raises: ValueError for settings that contradict one another."""
        if not 0 <= self.low_watermark <= self.high_watermark:
            raise ValueError("low_watermark must lie between 0 and high_watermark")
        if self.keep_alive >= self.idle_timeout:
            raise ValueError("keep_alive must be shorter than idle_timeout, or every idle channel dies")
        if not all(1200 <= size < 16384 for size in (self.datagram_size, self.loopback_datagram_size)):
            raise ValueError("datagrams must have 1200 bytes, QUIC's minimum, to 16383, aioquic's maximum")
