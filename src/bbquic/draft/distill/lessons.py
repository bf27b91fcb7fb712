"""What the teacher said, on disk: computed once, a file for each group of passages.

A file is named by all that decides its content, so one that is there is right, more data keeps what was
there before, and what was cut off is done again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bbquic.draft.distill.corpus import Passage, is_held_out
from bbquic.draft.distill.teacher import Lesson, Teacher
from bbquic.errors import ModelError

GROUP = 256  # passages that are answered together: enough for matrices, few enough to lose when cut off
STORED = torch.bfloat16  # hidden states; they only say which tokens are how likely


@dataclass(frozen=True, slots=True)
class LessonOptions:
    """answer: tokens of an answer at most. dtype: in which the target computes."""

    answer: int = 160
    dtype: torch.dtype = torch.float32


def write_lessons(
    folder: Path,
    passages: Sequence[Passage],
    model: str,
    options: LessonOptions,
    teach: Callable[[], Teacher],
    goes_on: Callable[[int, int], bool],
) -> list[Path]:
    """The files of all passages, in their order; those that are missing are written.

    `model` is the target's digest, `teach` loads it where it is needed, `goes_on` gets passages done and
    all of them after each file, and False ends it there.
    Raises: ModelError where a file cannot be written.
    """
    groups = list(_groups(passages))
    files = [folder / f"{_name(group, model, options)}.safetensors" for group in groups]
    teacher: Teacher | None = None
    done = 0
    for file, group in zip(files, groups, strict=True):
        if not file.is_file():
            teacher = teacher or teach()
            most = options.answer if group[0].is_prompt else 0
            _write(file, teacher.lessons([passage.tokens for passage in group], most))
        done += len(group)
        if not goes_on(done, len(passages)):
            break
    return files


class Lessons(Sequence[Lesson]):
    """What files of `write_lessons` hold, one behind the other; hidden states are read when asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises: ModelError where one is damaged."""
        self._places: list[tuple[_File, int]] = []
        for path in files:
            file = _File(path)
            self._places += ((file, number) for number in range(len(file.answers)))
        self.lengths = [file.length(number) for file, number in self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Lesson: ...
    @overload
    def __getitem__(self, place: slice) -> list[Lesson]: ...
    def __getitem__(self, place: int | slice) -> Lesson | list[Lesson]:
        if isinstance(place, slice):
            return [file.lesson(number) for file, number in self._places[place]]
        file, number = self._places[place]
        return file.lesson(number)

    def tokens(self, place: int) -> torch.Tensor:
        """Of a lesson [T] int32, without its hidden states."""
        file, number = self._places[place]
        return file.tokens(number)

    def is_held_out(self, place: int) -> bool:
        """See `corpus.is_held_out`."""
        file, number = self._places[place]
        return is_held_out(file.given(number))


class _File:
    """One file; its hidden states stay on disk."""

    def __init__(self, path: Path) -> None:
        try:
            opened: Any = safe_open(path, framework="pt")
            self._tokens = opened.get_tensor("tokens")
            self._ends = opened.get_tensor("ends").tolist()
            self.answers = opened.get_tensor("answers").tolist()
            self._hidden = opened.get_slice("hidden")
            sound = len(self._tokens) == self._hidden.get_shape()[0] == self._ends[-1]
        except (OSError, SafetensorError, IndexError) as error:
            raise ModelError(f"{path} is damaged: {error}", hint="delete it; it is made again") from error
        if not sound or len(self._ends) != len(self.answers):
            raise ModelError(f"{path} is damaged: its parts differ in length", hint="delete it")

    def _span(self, number: int) -> tuple[int, int]:
        return self._ends[number - 1] if number else 0, self._ends[number]

    def length(self, number: int) -> int:
        start, end = self._span(number)
        return int(end - start)

    def tokens(self, number: int) -> torch.Tensor:
        start, end = self._span(number)
        found: torch.Tensor = self._tokens[start:end]
        return found

    def given(self, number: int) -> list[int]:
        """Tokens of the passage."""
        given: list[int] = self.tokens(number)[: self.answers[number]].tolist()
        return given

    def lesson(self, number: int) -> Lesson:
        start, end = self._span(number)
        return Lesson(self.tokens(number), self._hidden[start:end], self.answers[number])


def _groups(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """Prompts with prompts and text with text, as they come."""
    for is_prompt in (True, False):
        kind = [passage for passage in passages if passage.is_prompt is is_prompt]
        yield from (kind[start : start + GROUP] for start in range(0, len(kind), GROUP))


def _name(group: Sequence[Passage], model: str, options: LessonOptions) -> str:
    decides = (model, options.answer, str(options.dtype), [(one.tokens, one.is_prompt) for one in group])
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:24]


def _write(file: Path, lessons: Sequence[Lesson]) -> None:
    """Whole or not at all."""
    ends = torch.tensor([len(one.tokens) for one in lessons]).cumsum(0)
    tensors = {
        "tokens": torch.cat([one.tokens for one in lessons]),
        "hidden": torch.cat([one.hidden for one in lessons]).to(STORED),
        "ends": ends,
        "answers": torch.tensor([one.answer for one in lessons]),
    }
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, scratch)
        scratch.replace(file)
    except OSError as error:
        raise ModelError(f"cannot write {file}: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
