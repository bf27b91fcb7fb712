"""The answers file, which is also the journal: a line is done when, and only when, its record is in it.

    {"id", "line", "text", "prompt_tokens", "completion_tokens", "finish_reason", "model", "seed"?, "input"}
    {"id", "line", "error": {"code", "message"}, "model", "input"}

`line` is the line of the prompts file, `input` the first 16 hex digits of that line's SHA-256, `seed`
there for a sampled answer. Records are in the order in which they finished.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from bbquic.errors import JobError
from bbquic.runtime.record import BadRecord, Record
from bbquic.runtime.request import Completion, FinishReason
from bbquic.runtime.resume import DoneLines, Resumed, read_answers

# Characters that JSON allows raw in a string, but at which many readers break lines.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a record became. `seed` is None where nothing was sampled."""

    line: int
    id: str
    input_sha: str
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason
    seed: int | None

    @classmethod
    def of(cls, record: Record, prompt_tokens: int, completion: Completion) -> Self:
        return cls(
            line=record.line,
            id=record.id,
            input_sha=record.input_sha,
            text=completion.text,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion.generated,
            finish_reason=completion.finish_reason,
            seed=record.sampling.seed if record.sampling.temperature > 0 else None,
        )


Outcome = Answer | BadRecord


class Answers(Protocol):
    """Where outcomes go. Not for use by two threads at once."""

    @property
    def name(self) -> str:
        """Where the answers are, for messages."""

    def check_line(self, line: int, input_sha: str) -> bool:
        """Whether an earlier run has this line's record already.

        Raises: JobError when that record was made from other input: the prompts file was edited.
        """

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """Keep a group of outcomes; when it returns they are kept. Blocks for as long as a disk does.

        Raises: JobError when they cannot be kept, and from then on always. ValueError when a line
        has its record already.
        """

    def close(self) -> None: ...


def open_answers(path: str, *, model: str) -> AnswersFile | AnswersStream:
    """The answers at `path`, where "-" is standard output. Raises: JobError."""
    return AnswersStream(1, model=model) if path == "-" else AnswersFile.open(Path(path), model=model)


class AnswersFile:
    """Answers in a file that this process alone appends to, held by a lock until it is closed."""

    def __init__(self, path: Path, model: str, fd: int, resumed: Resumed) -> None:
        self.path = path
        self.answered_before = resumed.answered
        self.failed_before = resumed.failed
        self._model = model
        self._fd = fd
        self._done = resumed.done
        self._end = resumed.end
        self._broken = False

    @classmethod
    def open(cls, path: Path, *, model: str) -> Self:
        """Take the file, made when missing, and repair what a crash tore; nothing else is changed.

        `model` names model, revision and dtype, such as "smollm2-135m@1a2b3c4d5e6f/float32".
        Raises: JobError when another run has the file, or it is not this model's answers.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise _cannot_keep(str(path), error) from error
        try:
            _lock(fd, path)
            with os.fdopen(os.dup(fd), "rb") as stream:
                resumed = read_answers(stream, path, model)
            file = cls(path, model, fd, resumed)
            file._repair(lacks_newline=resumed.lacks_newline)
        except OSError as error:
            os.close(fd)
            raise _cannot_keep(str(path), error) from error
        except BaseException:
            os.close(fd)
            raise
        return file

    @property
    def name(self) -> str:
        return str(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file up to other runs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def check_line(self, line: int, input_sha: str) -> bool:
        if line not in self._done:
            return False
        if not self._done.matches(line, input_sha):
            raise JobError(
                f"line {line} of the prompts was changed since {self.path} answered it",
                hint="give another file with -o, or put the line back",
            )
        return True

    def check_end(self, lines: int) -> None:
        """Raises: JobError when a record answers a line beyond the `lines` that the prompts file has."""
        if self._done.last > lines:
            raise JobError(
                f"{self.path} answers line {self._done.last}, and the prompts file ends at line {lines}",
                hint="give another file with -o, or put the missing lines back",
            )

    def append(self, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        data = _encode_group(outcomes, self._model, self._done)
        if self._broken:
            raise JobError(f"an earlier write to {self.path} failed")
        self._check_untouched()
        try:
            _write_at(self._fd, data, self._end)
            os.fdatasync(self._fd)
        except OSError as error:
            self._broken = True
            with contextlib.suppress(OSError):  # the next run repairs what cannot be taken back now
                os.ftruncate(self._fd, self._end)
            raise _cannot_keep(self.name, error) from error
        self._end += len(data)
        for outcome in outcomes:
            self._done.add(outcome.line, outcome.input_sha)

    def _repair(self, *, lacks_newline: bool) -> None:
        """Cut the file to its whole records, and see to it that what is there is on the disk."""
        if os.fstat(self._fd).st_size != self._end:
            os.ftruncate(self._fd, self._end)
        if lacks_newline:
            _write_at(self._fd, b"\n", self._end)
            self._end += 1
        os.fsync(self._fd)
        _sync_folder(self.path)

    def _check_untouched(self) -> None:
        """Raises: JobError when the path is no longer our file, or someone else wrote to it."""
        try:
            there = self.path.stat()
        except OSError as error:
            self._broken = True
            raise _cannot_keep(self.name, error) from error
        ours = os.fstat(self._fd)
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            happened = "was replaced by another file"
        elif ours.st_size != self._end:
            happened = "was changed by another program"
        else:
            return
        self._broken = True
        raise JobError(
            f"{self.path} {happened} while it was being written",
            hint="what was reported as done may be gone; run again to answer what is missing",
        )


class AnswersStream:
    """Answers to a pipe or terminal: nothing is read back, so nothing can be resumed."""

    def __init__(self, fd: int, *, model: str, name: str = "standard output") -> None:
        self.name = name
        self._fd = fd
        self._model = model
        self._done = DoneLines()

    def check_line(self, line: int, input_sha: str) -> bool:
        return False

    def append(self, outcomes: Sequence[Outcome]) -> None:
        data = memoryview(_encode_group(outcomes, self._model, self._done))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise _cannot_keep(self.name, error) from error
        for outcome in outcomes:
            self._done.add(outcome.line, outcome.input_sha)

    def close(self) -> None:
        """Leaves the descriptor open: it is the process's, not ours."""


def encode_outcome(outcome: Outcome, model: str) -> bytes:
    """The record's line, newline included: valid UTF-8 whatever the text, and no raw line break in it."""
    record: dict[str, object] = {"id": outcome.id, "line": outcome.line}
    if isinstance(outcome, Answer):
        record["text"] = outcome.text
        record["prompt_tokens"] = outcome.prompt_tokens
        record["completion_tokens"] = outcome.completion_tokens
        record["finish_reason"] = outcome.finish_reason
    else:
        record["error"] = {"code": outcome.code, "message": outcome.message}
    record["model"] = model
    if isinstance(outcome, Answer) and outcome.seed is not None:
        record["seed"] = outcome.seed
    record["input"] = outcome.input_sha
    text = json.dumps(record, ensure_ascii=False).translate(_LINE_BREAKS) + "\n"
    # Half a surrogate pair has no UTF-8 form and becomes U+FFFD; two halves become their character.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")


def _encode_group(outcomes: Sequence[Outcome], model: str, done: DoneLines) -> bytes:
    lines = [outcome.line for outcome in outcomes]
    twice = next((line for line in lines if line in done), None)
    if twice is not None or len(set(lines)) < len(lines):
        raise ValueError(f"a line would have two records, among {lines[:20]}")
    return b"".join(encode_outcome(outcome, model) for outcome in outcomes)


def _lock(fd: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise JobError(f"{path} is not a file", hint="give a file with -o, or - for standard output")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JobError(
            f"another run is writing its answers to {path}",
            hint="wait for it to end, or give another file with -o",
        ) from None


def _write_at(fd: int, data: bytes, offset: int) -> None:
    """One write for the whole group, and more only where the system takes it in parts."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _sync_folder(path: Path) -> None:
    """So that a new file is still there after a power cut."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(fd)


def _cannot_keep(name: str, error: OSError) -> JobError:
    hints = {
        errno.ENOSPC: "make room, then run again: it goes on where this one ended",
        errno.EDQUOT: "make room, then run again: it goes on where this one ended",
        errno.ENOENT: "make the folder first, and leave the file alone during a run",
        errno.EPIPE: "the reader went away",
    }
    hint = hints.get(error.errno or 0, "give another file with -o")
    return JobError(f"cannot keep the answers in {name}: {error.strerror or error}", hint=hint)
