"""What the receiver of a burst tells its sender about it: the RATE message, tabled in docs/wire-format.md.

Losses are not in it: the sender knows them from acknowledgements.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from bbquic.transport.burst import BurstRate
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header

LEAST_RATE = 1_000  # bytes/s: nothing slower is worth a cluster, and a sender must not be told to stop
MOST_RATE = 1_250_000_000  # bytes/s, 10 Gbit/s: several times what Python can fill
MOST_PACKETS = 1_024  # a head has 32
MOST_SPREAD = 1_000  # thousandths: slopes this far apart say nothing, however much farther


class RateReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """RATE's header. Rate in bytes/s; `spread` in thousandths of it."""

    burst: Annotated[int, Meta(ge=1, lt=1 << 32)]
    rate: Annotated[int, Meta(ge=LEAST_RATE, le=MOST_RATE)]
    packets: Annotated[int, Meta(ge=1, le=MOST_PACKETS)]
    spread: Annotated[int, Meta(ge=0, le=MOST_SPREAD)]


def report_message(measured: BurstRate) -> Message:
    """The message that tells a sender of its burst."""
    report = RateReport(
        burst=measured.number,
        rate=int(min(max(measured.rate, LEAST_RATE), MOST_RATE)),
        packets=min(measured.packets, MOST_PACKETS),
        spread=min(int(measured.spread * 1000), MOST_SPREAD),
    )
    return Message(Kind.RATE, encode_header(report))


def decode_report_untrusted(message: Message) -> RateReport:
    """Raises: RemoteProtocolError when a field is missing, extra, of another type or out of range."""
    return decode_header_untrusted(RateReport, message.header)
