"""Where a pack's time goes: what each stage notes down as the pack passes, and what follows from it.

The parts are those of the paper's tables 6-8. A stage notes moments on its own clock; differences within a
stage are exact, times between two machines are as good as their clocks' offset is known.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from bbquic.units import Bytes, BytesPerSecond, Seconds

Count = Annotated[int, Meta(ge=0, le=2**62)]
Moment = Annotated[int, Meta(ge=0, le=2**40)]  # microseconds
NodeName = Annotated[str, Meta(min_length=1, max_length=63)]
Words = Annotated[str, Meta(max_length=512)]
Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]  # seconds


class Mark(IntEnum):
    """A pack's moments in a stage, in the order in which they come."""

    DELIVERED = 0  # whole, and with the runtime
    DECODE_BEGAN = 1  # the inbound lane took it up
    DECODED = 2
    ON_DEVICE = 3  # the tensor is where it is computed
    COMPUTE_BEGAN = 4
    COMPUTED = 5
    COPY_BEGAN = 6  # the outbound lane took it up
    ON_HOST = 7
    ENCODED = 8
    HANDED = 9  # to the transport


class Parts(NamedTuple):
    """Seconds of one pack in one stage, by the paper's names; `queue` is all waiting between the lanes."""

    from_wire: Seconds  # T_nic→cpu
    decode: Seconds  # T_decodec
    to_device: Seconds  # T_cpu→gpu
    compute: Seconds  # T_compute
    to_host: Seconds  # T_gpu→cpu
    encode: Seconds  # T_codec
    queue: Seconds  # T_queue

    @property
    def total(self) -> Seconds:
        """From the last byte's arrival until the pack was handed to the transport."""
        return Seconds(sum(self))


class StageTiming(Struct, frozen=True, array_like=True):
    """What one stage noted of one pack.

    `arrived` is when its last byte came off the wire, in seconds on the stage's own clock; `marks` are
    microseconds after it. `raw` and `sent` are bytes of the tensor that goes on and of what carries it.
    `to_wire` is T_cpu→nic of the message this stage sent before, since its own is known only once it left:
    seconds from HANDED to the first datagram.
    """

    node: NodeName
    arrived: Finite
    marks: tuple[Moment, Moment, Moment, Moment, Moment, Moment, Moment, Moment, Moment, Moment]
    raw: Count
    sent: Count
    to_wire: Finite

    def __post_init__(self) -> None:
        if any(later < earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)):
            raise ValueError("the moments of a timing are not in order")

    def at(self, mark: Mark) -> Seconds:
        """A moment on the stage's clock."""
        return Seconds(self.arrived + self.marks[mark] / 1e6)

    @property
    def parts(self) -> Parts:
        m = self.marks
        queue = (
            (m[Mark.DECODE_BEGAN] - m[Mark.DELIVERED])
            + (m[Mark.COMPUTE_BEGAN] - m[Mark.ON_DEVICE])
            + (m[Mark.COPY_BEGAN] - m[Mark.COMPUTED])
            + (m[Mark.HANDED] - m[Mark.ENCODED])
        )
        return Parts(
            from_wire=Seconds(m[Mark.DELIVERED] / 1e6),
            decode=Seconds((m[Mark.DECODED] - m[Mark.DECODE_BEGAN]) / 1e6),
            to_device=Seconds((m[Mark.ON_DEVICE] - m[Mark.DECODED]) / 1e6),
            compute=Seconds((m[Mark.COMPUTED] - m[Mark.COMPUTE_BEGAN]) / 1e6),
            to_host=Seconds((m[Mark.ON_HOST] - m[Mark.COPY_BEGAN]) / 1e6),
            encode=Seconds((m[Mark.ENCODED] - m[Mark.ON_HOST]) / 1e6),
            queue=Seconds(queue / 1e6),
        )


class WireLink(Struct, frozen=True, forbid_unknown_fields=True):
    """`transport.link.LinkEstimate` as a node tells it of the hop to its next stage; None is not known."""

    rate: Finite | None  # bytes/s
    is_lower_bound: bool
    rtt: Finite | None  # s, smoothed
    min_rtt: Finite | None
    loss: Finite | None  # share of the packets


class StageReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A stage's work so far: sums over all its packs, from which a reader takes differences."""

    job: str
    first: Count
    stop: Count
    micro_batches: Count
    steps: Count
    parts: tuple[Finite, Finite, Finite, Finite, Finite, Finite, Finite]  # seconds, in the order of Parts
    to_wire: Finite  # seconds
    raw: Count  # bytes
    sent: Count
    queued: tuple[Count, Count, Count, Count]  # packs just now before: decode and copy, compute, copy, send
    following: NodeName | None
    link: WireLink | None
    codec: Words = ""  # how its messages are coded now
    why: Words = ""

    @property
    def summed(self) -> Parts:
        return Parts(*(Seconds(value) for value in self.parts))


class Hop(NamedTuple):
    """One message from one stage to the next, as the clocks of both tell it."""

    to_wire: Seconds  # T_cpu→nic
    flight: Seconds  # T_nic→nic: first datagram out to last byte in
    uncertainty: Seconds  # of flight: how far the two clocks may disagree
    raw: Bytes
    sent: Bytes
    rate: BytesPerSecond | None  # what the sender believes of the link
