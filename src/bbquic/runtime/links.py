"""What a channel shows of its link, as nodes and the command tell one another."""

from __future__ import annotations

import time

from bbquic.runtime.protocol import LinkFigures, PingHeader, PongHeader
from bbquic.transport.channel import Channel
from bbquic.transport.link import LinkEstimate
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import BytesPerSecond, Seconds

PINGS = 4  # the least of so many: a loop that was busy once does not make a link longer
_FIRST = 1 << 33  # numbers that no other PING on the channel has
LONGEST = 1e3  # s; what LinkFigures can say
FASTEST = 1e12  # bytes/s


async def least_round_trip(channel: Channel) -> Seconds:
    """By a few PINGs and by the transport's own count; for a channel that nobody else reads just now.

    Raises: ConnectionLost, RemoteProtocolError. The deadline is the caller's.
    """
    least = LONGEST
    for number in range(_FIRST, _FIRST + PINGS):
        began = time.monotonic()
        await channel.send(Message(Kind.PING, encode_header(PingHeader(number))))
        while (pong := _pong(await channel.receive())) is None or pong.number != number:
            pass
        inside = max(0.0, pong.replied - pong.received)  # of the peer's own time
        least = min(least, max(0.0, time.monotonic() - began - inside))
    known = known_round_trip(channel)
    return Seconds(least if known is None else min(least, known))


def _pong(message: Message) -> PongHeader | None:
    return decode_header_untrusted(PongHeader, message.header) if message.kind is Kind.PONG else None


def known_round_trip(channel: Channel) -> Seconds | None:
    """The least round trip that the transport saw; None where it counts none."""
    statistics = channel.statistics()
    link = statistics.link
    known = [one for one in (statistics.min_rtt, link.min_rtt if link else None) if one is not None]
    return Seconds(min(known)) if known else None


def figures_of(channel: Channel, peer: str, min_rtt: Seconds | None) -> LinkFigures:
    """What is known of the link to `peer` on this side of the channel."""
    link = channel.statistics().link
    if link is None:
        return LinkFigures(peer, min_rtt=min_rtt)
    rate = link.rate if link.rate is not None and link.rate > 0 else None
    return LinkFigures(
        peer,
        rate=None if rate is None else min(rate, FASTEST),
        is_lower_bound=link.is_lower_bound,
        min_rtt=None if min_rtt is None else min(min_rtt, LONGEST),
        loss=None if link.loss is None else min(max(link.loss, 0.0), 1.0),
        age=None if link.age is None else max(0.0, link.age),
    )


def estimate_of(figures: LinkFigures) -> LinkEstimate:
    """The same as the transport has it, for who decides whether to probe."""
    return LinkEstimate(
        rate=None if figures.rate is None else BytesPerSecond(figures.rate),
        is_lower_bound=figures.is_lower_bound,
        min_rtt=None if figures.min_rtt is None else Seconds(figures.min_rtt),
        rtt_variation=None,
        loss=figures.loss,
        reports=0,
        rtt_samples=0,
        packets=0,
        age=None if figures.age is None else Seconds(figures.age),
    )
