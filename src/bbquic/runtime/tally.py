"""A stage's sums: where the time of all its packs went, for who asks now and then."""

from __future__ import annotations

from collections import deque

from bbquic.runtime.timing import Parts, StageTiming, WireLink
from bbquic.transport.channel import ChannelStatistics, Sent
from bbquic.units import Seconds

NOTHING = Seconds(0.0)
MOST_LEAVING = 256  # messages that wait for their first datagram: a channel takes no more at once


class Tally:
    """Adds up what a stage handed on, and when it left."""

    def __init__(self) -> None:
        self._parts = [0.0] * len(Parts._fields)
        self._leaving: deque[tuple[float, Sent]] = deque(maxlen=MOST_LEAVING)
        self._to_wire = self._last_to_wire = 0.0
        self.steps = self.raw = self.sent = 0
        self.expected = 0.0  # seconds of computing, by the node's profile; 0 where it has none

    @property
    def parts(self) -> tuple[float, float, float, float, float, float, float]:
        """Seconds, in the order of `Parts`."""
        return tuple(self._parts)  # type: ignore[return-value]  # as many as there are

    @property
    def to_wire(self) -> Seconds:
        """T_cpu→nic of all that has left."""
        self._look()
        return Seconds(self._to_wire)

    @property
    def last_to_wire(self) -> Seconds:
        """T_cpu→nic of the message that left last; 0 before the first."""
        self._look()
        return Seconds(self._last_to_wire)

    @property
    def split(self) -> Parts:
        """The same by their names."""
        return Parts(*(Seconds(value) for value in self._parts))

    def add(self, timing: StageTiming, expected: Seconds = NOTHING) -> None:
        """A pack was handed on, of which `expected` was to be computed."""
        self.expected += expected
        for place, seconds in enumerate(timing.parts):
            self._parts[place] += seconds
        self.steps += 1
        self.raw += timing.raw
        self.sent += timing.sent

    def leave(self, handed: float, sent: Sent) -> None:
        """Its message was handed to the transport at `handed`, and leaves when `sent` says."""
        self._leaving.append((handed, sent))

    def _look(self) -> None:
        """Count the messages that have begun to leave; a busy link holds others back."""
        for _ in range(len(self._leaving)):
            handed, sent = self._leaving.popleft()
            if sent.began is None:
                self._leaving.append((handed, sent))
            else:
                self._last_to_wire = max(0.0, sent.began - handed)
                self._to_wire += self._last_to_wire


def wire_link(statistics: ChannelStatistics) -> WireLink:
    """What a channel knows of its link, to be told to others."""
    link = statistics.link
    return WireLink(
        rate=link.rate if link else None,
        is_lower_bound=link.is_lower_bound if link else False,
        rtt=statistics.rtt,
        min_rtt=(link.min_rtt if link else None) or statistics.min_rtt,
        loss=link.loss if link else None,
    )
