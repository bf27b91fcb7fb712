"""When something came off the wire: from the kernel's clock to the one that the program counts by."""

from __future__ import annotations

import time

LONGEST_AGO = 30.0  # s that a datagram waits to be read at most; what seems longer is a clock that was set


def monotonic_time(stamp: int | None) -> float:
    """A kernel's stamp (ns since the epoch) of the recent past in seconds of `time.monotonic()`.

    Now, where there is none, or where it cannot be right.
    """
    now = time.monotonic()
    if stamp is None:
        return now
    ago = time.time() - stamp / 1e9
    return now - ago if 0 <= ago <= LONGEST_AGO else now
