"""When losses are congestion: not a few at random, but more than a twentieth of a round trip's packets."""

from __future__ import annotations

from bbquic.units import Seconds

CONGESTED = 0.05  # of the packets: radio and overfull peering points lose up to a few percent at random
CLEAN = 0.02
LEAST_PACKETS = 64  # judged at a time, however slow: of fewer, a twentieth is chance
QUEUED, QUEUED_LOST = 0.02, 3  # share and number while a queue stands: an overflow, not chance
LEAST_LOST = 8  # the same for losses: one lost super-packet's worth says little
CUT, DEEP_CUT = 0.9, 0.7  # of the rate, for congestion and for congestion that goes on
PERSISTENT = 3  # congested windows in a row
LEAST_WINDOW = Seconds(0.01)


class LossWatch:
    """Counts in windows of a round trip and at least `LEAST_PACKETS` packets.

    Losses of packets sent before `cut_at` were answered by that cut: the caller leaves them out.
    """

    def __init__(self) -> None:
        self.cut_at = -1.0
        self._began = 0.0
        self._acked = self._lost = 0
        self._congested = 0

    def judge(self, now: float, acked: int, lost: int, round_trip: float, has_queue: bool) -> float | None:
        """The factor for the rate: under 1 to cut, 1 for a clean window, None while that is open."""
        self._acked += acked
        self._lost += lost
        total = self._acked + self._lost
        window = max(round_trip, LEAST_WINDOW)
        heavy = self._lost > 4 * LEAST_LOST and self._lost > CONGESTED * total and now - self.cut_at > window
        if not heavy and (total < LEAST_PACKETS or now - self._began < window):
            return None
        share = self._lost / total
        is_congested = (share > CONGESTED and self._lost >= LEAST_LOST) or (
            has_queue and share > QUEUED and self._lost >= QUEUED_LOST
        )
        self._began, self._acked, self._lost = now, 0, 0
        if not is_congested:
            self._congested = 0
            return 1.0 if share < CLEAN else None
        self._congested += 1
        self.cut_at = now
        cut = DEEP_CUT if self._congested > PERSISTENT else CUT
        return min(cut, 1 - share)  # what arrived is what the path can carry
