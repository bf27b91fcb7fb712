"""A file as a stream of byte lines: flat memory, whatever the file's or a line's length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 20  # bytes read at a time where a line is only counted or skipped


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, 1-based, without its newline."""

    number: int
    raw: bytes | None  # None: longer than the limit, and not held
    size: int  # bytes it takes in the file, newline included
    sha: str  # first 16 hex digits of the SHA-256 of the raw line
    ended: bool  # False only for a last line that lacks its newline


def split_lines(stream: BinaryIO, limit: int) -> Iterator[Line]:
    """The lines of `stream`; one above `limit` bytes is hashed in passing and never held whole.

    Only `\\n` ends a line, and a newline at the end of the file starts no further one.
    Raises: OSError as the stream does.
    """
    number = 0
    while raw := stream.readline(limit + 1):
        number += 1
        ended = raw.endswith(b"\n")
        if ended or len(raw) <= limit:
            raw = raw.removesuffix(b"\n")
            yield Line(number, raw, len(raw) + ended, short_sha(raw), ended)
        else:
            yield _skip_line(stream, number, raw)


def short_sha(raw: bytes) -> str:
    """What an answer remembers of its line: 64 bits tell an edited line from an untouched one."""
    return hashlib.sha256(raw).hexdigest()[:16]


def count_lines(path: Path) -> int:
    """How many lines `split_lines` would give. Raises: OSError."""
    newlines, last = 0, b"\n"
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            newlines += piece.count(b"\n")
            last = piece[-1:]
    return newlines + (last != b"\n")


def _skip_line(stream: BinaryIO, number: int, start: bytes) -> Line:
    digest = hashlib.sha256(start)
    size, ended = len(start), False
    while not ended and (piece := stream.readline(_PIECE)):
        size += len(piece)
        ended = piece.endswith(b"\n")
        digest.update(piece.removesuffix(b"\n"))
    return Line(number, None, size, digest.hexdigest()[:16], ended)
