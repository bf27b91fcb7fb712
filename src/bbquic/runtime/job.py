"""The job: a file of prompts, read as a stream. Every line of it gives exactly one record, good or bad."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from bbquic.errors import JobError
from bbquic.runtime.fields import shown
from bbquic.runtime.ids import UsedIds
from bbquic.runtime.lines import Line, count_lines, split_lines
from bbquic.runtime.record import BadRecord, Defaults, Record, parse_record

MAX_LINE = 8 << 20  # bytes; millions of tokens, beyond any context: a damaged file, never a prompt
_LISTED = 5  # bad lines that a strict refusal names


class JobFile:
    """A prompts file and what its lines default to. Iterating reads it from the start, holding one line.

    Memory grows by some 40 bytes a line, for the ids. Raises: JobError when the file cannot be read.
    """

    def __init__(self, path: Path, defaults: Defaults | None = None, *, max_line: int = MAX_LINE) -> None:
        self.path = path
        self._defaults = defaults or Defaults()
        self._max_line = max_line

    def __iter__(self) -> Iterator[Record | BadRecord]:
        ids = UsedIds()
        try:
            with self.path.open("rb") as stream:
                for line in split_lines(stream, self._max_line):
                    yield self._parse(line, ids)
        except OSError as error:
            raise self._unreadable(error) from error

    def count(self) -> int:
        """How many records iterating gives; one quick pass over the bytes."""
        try:
            return count_lines(self.path)
        except OSError as error:
            raise self._unreadable(error) from error

    def sample(self, most: int) -> list[Record]:
        """The good ones among `most` lines, evenly spread over the file. Ids that come twice are not noticed.

        Raises: JobError when the file cannot be read.
        """
        stride = max(1, -(-self.count() // most))
        records: list[Record] = []
        try:
            with self.path.open("rb") as stream:
                for line in split_lines(stream, self._max_line):
                    if line.number % stride == 0:
                        record = self._parse(line, UsedIds())
                        if isinstance(record, Record):
                            records.append(record)
        except OSError as error:
            raise self._unreadable(error) from error
        return records

    def refuse_bad_lines(self) -> None:
        """Raises: JobError naming the first bad lines, where there is any (`--strict`)."""
        bad: list[BadRecord] = []
        count = 0
        for record in self:
            if isinstance(record, BadRecord):
                count += 1
                if len(bad) < _LISTED:
                    bad.append(record)
        if bad:
            named = "; ".join(f"line {record.line}: {record.message} ({record.code})" for record in bad)
            more = f"; and {count - len(bad)} more" if count > len(bad) else ""
            raise JobError(
                f"{self.path} has {count} bad {'line' if count == 1 else 'lines'}: {named}{more}",
                hint="mend them, or leave out --strict to answer the others",
            )

    def _parse(self, line: Line, ids: UsedIds) -> Record | BadRecord:
        if line.raw is None:
            message = f"the line is longer than {self._max_line} bytes ({line.size})"
            return BadRecord(line.number, None, line.sha, "line_too_long", message)
        raw = line.raw.removeprefix(codecs.BOM_UTF8) if line.number == 1 else line.raw
        record = parse_record(line.number, raw, line.sha, self._defaults)
        if record.id is None:
            return record
        earlier = ids.claim(record.id, line.number)
        if earlier is None:
            return record
        message = f"the id {shown(record.id)} is already used on line {earlier}"
        return BadRecord(line.number, record.id, line.sha, "duplicate_id", message)

    def _unreadable(self, error: OSError) -> JobError:
        return JobError(
            f"cannot read the prompts file {self.path}: {error.strerror or error}",
            hint="give the path of a JSON Lines file, one prompt a line",
        )
