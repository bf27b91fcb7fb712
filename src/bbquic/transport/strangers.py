"""The log of refused strangers: a line for each, and no flood of them can fill a disk."""

from __future__ import annotations

import logging

from bbquic.transport.identity import Fingerprint
from bbquic.units import Seconds

log = logging.getLogger("bbquic.transport")

REMEMBERED = 256  # strangers; the oldest is forgotten first
SAME_AGAIN = Seconds(600.0)  # one who knocks each second is worth one line in ten minutes
WINDOW = Seconds(60.0)
LINES_A_WINDOW = 10  # whoever they are


class StrangerLog:
    def __init__(self) -> None:
        self._seen: dict[tuple[str, Fingerprint | None], float] = {}
        self._window_start = float("-inf")
        self._lines = 0
        self._unlogged = 0

    def refused(self, address: tuple[str, int], fingerprint: Fingerprint | None, now: float) -> None:
        """Warn of a machine cut off because of its key, unless the log had enough. `now` in seconds."""
        host, port = address
        last = self._seen.get((host, fingerprint))
        if last is not None and now - last < SAME_AGAIN:
            return
        if now - self._window_start >= WINDOW:
            self._window_start, self._lines = now, 0
        if self._lines >= LINES_A_WINDOW:
            self._unlogged += 1
            return
        self._lines += 1
        self._seen[host, fingerprint] = now
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        log.warning(
            "cut off %s port %d: its key %s is not pinned in peers.toml%s",
            host,
            port,
            fingerprint or "(it showed none)",
            f" ({self._unlogged} more were not logged)" if self._unlogged else "",
        )
        self._unlogged = 0
