"""What an answers file holds already: read once at the start, kept in 8 bytes a line."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from bbquic.errors import JobError
from bbquic.runtime.lines import Line, split_lines

MAX_RECORD = 64 << 20  # bytes; eight times the longest prompt line, so a longer one is not an answer
_BEGINNING = b'{"id":'  # of every record: a torn line that begins otherwise is not ours to cut
_PAGE = 1 << 10  # lines a page; jobs are answered roughly in order, so that pages fill


class DoneLines:
    """Which lines have their record, each with the first 64 bits of its input's hash."""

    def __init__(self) -> None:
        self._pages: dict[int, array[int]] = {}
        self._count = 0
        self.last = 0  # the highest line that is done

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        return self._stored(line) != 0

    def matches(self, line: int, input_sha: str) -> bool:
        """Whether the line's record was made from this input."""
        return self._stored(line) == _compact(input_sha)

    def add(self, line: int, input_sha: str) -> None:
        """Raises: ValueError when the line has its record already."""
        if line in self:
            raise ValueError(f"line {line} already has its record")
        page = self._pages.get(line // _PAGE)
        if page is None:
            page = self._pages[line // _PAGE] = array("Q", bytes(8 * _PAGE))
        page[line % _PAGE] = _compact(input_sha)
        self._count += 1
        self.last = max(self.last, line)

    def _stored(self, line: int) -> int:
        page = self._pages.get(line // _PAGE)
        return 0 if page is None else page[line % _PAGE]


@dataclass(frozen=True, slots=True)
class Resumed:
    """An answers file as it was found. Only `end` bytes of it are whole records."""

    done: DoneLines
    answered: int
    failed: int
    end: int
    lacks_newline: bool  # the last whole record was cut off just before its newline


def read_answers(stream: BinaryIO, path: Path, model: str) -> Resumed:
    """The records of an answers file, of which a crash may have torn the last. Changes nothing.

    Raises: JobError naming the line that is no answer of ours, is another model's, or comes twice.
    OSError as the stream does.
    """
    done = DoneLines()
    answered = end = 0
    lacks_newline = False
    for line in split_lines(stream, MAX_RECORD):
        raw = line.raw
        if raw is not None and not line.ended:
            raw = raw.rstrip(b"\0")  # a power cut can leave a length without its bytes
        record = None if raw is None else _parse(raw)
        if record is None:
            if _is_torn(line):
                break
            raise JobError(
                f"line {line.number} of {path} is not an answer of bbquic's",
                hint="nothing was changed; give another file with -o",
            )
        _check(record, line.number, path, model, done)
        done.add(record.line, record.input)
        answered += record.error is None
        end += line.size if line.ended else len(raw or b"")
        lacks_newline = not line.ended
    return Resumed(done, answered, len(done) - answered, end, lacks_newline)


class _Error(msgspec.Struct):
    code: str
    message: str


class _Stored(msgspec.Struct):
    """Of a record, what a later run must know; either `text` or `error` is there."""

    id: str | None
    line: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    model: str
    input: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    text: str | None = None
    error: _Error | None = None


_DECODER = msgspec.json.Decoder(_Stored)


def _parse(raw: bytes) -> _Stored | None:
    try:
        record = _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return record if (record.text is None) != (record.error is None) else None


def _is_torn(line: Line) -> bool:
    """Whether a line that is no record is what a crash leaves of the last one."""
    if line.ended or line.raw is None:
        return False
    rest = line.raw.rstrip(b"\0")
    return rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)


def _check(record: _Stored, number: int, path: Path, model: str, done: DoneLines) -> None:
    if record.model != model:
        raise JobError(
            f"{path} holds answers of {record.model} (line {number}), and this run is {model}",
            hint="give another file with -o, or run the model and dtype that it began with",
        )
    if record.line in done:
        raise JobError(
            f"{path} answers line {record.line} of the prompts twice (again on its line {number})",
            hint="nothing was changed; remove one of the two, or give another file with -o",
        )


def _compact(input_sha: str) -> int:
    return int(input_sha, 16) | 1  # never 0, which marks a line that is not done
