"""Text from strangers, made fit to show and to send."""

from __future__ import annotations

MAX_REASON = 512  # bytes of UTF-8: a reason phrase must fit a 1200-byte datagram with room to spare


def printable(text: str) -> str:
    """Fit for a terminal and a log: one line, no control characters, bounded."""
    return "".join(char if char.isprintable() else "?" for char in cut(text))


def cut(text: str, limit: int = MAX_REASON) -> str:
    """`text`, at most `limit` bytes long in UTF-8."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
