"""Rates and round trips kept across runs, so that the first burst to a known peer is paced right.

One small JSON file a machine, shared by its processes. It is a convenience: whatever is wrong with it costs
a round trip of measuring, never a run.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from bbquic.transport.identity import Fingerprint
from bbquic.transport.link import LinkEstimate
from bbquic.transport.printable import printable
from bbquic.transport.report import LEAST_RATE, MOST_RATE
from bbquic.units import BytesPerSecond, Seconds

log = logging.getLogger("bbquic.transport")

VERSION = 1
MOST_LINKS = 256  # more peers than a cluster has; the ones seen longest ago go first
MOST_FILE = 1 << 20  # bytes; 256 entries take 50 KB, more is not ours
FRESH = Seconds(3600.0)  # a path is what it was an hour ago
STALE = Seconds(30 * 86400.0)  # a month later the laptop is elsewhere
AGED_RATE = 0.75  # of a rate older than fresh: starting low costs a quarter of one burst, high a full queue
LONGEST_RTT = 10.0  # s; longer is damage

Rate = Annotated[float, Meta(ge=LEAST_RATE, le=MOST_RATE)]
RoundTrip = Annotated[float, Meta(gt=0, le=LONGEST_RTT)]


class _Entry(msgspec.Struct, frozen=True):
    peer: Annotated[str, Meta(max_length=256)]
    key: Annotated[str, Meta(max_length=256)]
    rate: Rate
    min_rtt: RoundTrip
    seen: Annotated[float, Meta(ge=0)]


class _File(msgspec.Struct, frozen=True):
    version: int
    links: list[_Entry]


@dataclass(frozen=True, slots=True)
class Remembered:
    """The link to a peer as an earlier connection left it; an old rate is given lower than it was."""

    rate: BytesPerSecond
    min_rtt: Seconds
    age: Seconds


def default_path(environ: Mapping[str, str], home: Path) -> Path:
    """Where the XDG base directories put it. A relative XDG_STATE_HOME counts for nothing, as they say."""
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else home / ".local" / "state"
    return base / "bbquic" / "links.json"


class LinkMemory:
    """What is known of the links to peers, by name and key: a new key is a new machine.

    Times are wall-clock seconds, as they outlive the process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = _read(path)

    def recall(self, peer: str, key: Fingerprint, now: float) -> Remembered | None:
        """None for a peer not met, or not met for long."""
        entry = self._entries.get((peer, key))
        if entry is None:
            return None
        age = max(0.0, now - entry.seen)
        if age > STALE:
            return None
        rate = entry.rate if age <= FRESH else entry.rate * AGED_RATE
        return Remembered(BytesPerSecond(rate), Seconds(entry.min_rtt), Seconds(age))

    def remember(self, peer: str, key: Fingerprint, estimate: LinkEstimate, now: float) -> None:
        """Note what a connection learnt. A rate nobody measured is not noted."""
        rate, min_rtt = estimate.rate, estimate.min_rtt
        if rate is None or min_rtt is None or not estimate.reports or not 0 < min_rtt <= LONGEST_RTT:
            return
        rate = BytesPerSecond(min(max(rate, LEAST_RATE), MOST_RATE))
        entry = _Entry(peer, key, rate, min_rtt, now)
        self._entries[entry.peer, entry.key] = entry

    def save(self) -> None:
        """Write the file, with what other processes wrote since. A failure is logged."""
        merged = _read(self._path)
        for key, entry in self._entries.items():
            other = merged.get(key)
            if other is None or other.seen <= entry.seen:
                merged[key] = entry
        latest = sorted(merged.values(), key=lambda entry: entry.seen, reverse=True)[:MOST_LINKS]
        self._entries = {(entry.peer, entry.key): entry for entry in latest}
        try:
            _replace(self._path, msgspec.json.format(msgspec.json.encode(_File(VERSION, latest))))
        except OSError as error:
            log.warning("%s cannot be written, link rates will be measured anew: %s", self._path, error)


def _read(path: Path) -> dict[tuple[str, str], _Entry]:
    """The entries of a file; none of one that is missing or damaged, with a note in the second case."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_FILE + 1)
        if len(data) > MOST_FILE:
            raise ValueError(f"over {MOST_FILE} bytes")
        content = msgspec.json.decode(data, type=_File)
        if content.version != VERSION:
            raise ValueError(f"version {content.version}, not {VERSION}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        log.warning("%s is not used, link rates will be measured anew: %s", path, printable(str(error)))
        return {}
    return {(entry.peer, entry.key): entry for entry in content.links[:MOST_LINKS]}


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise
