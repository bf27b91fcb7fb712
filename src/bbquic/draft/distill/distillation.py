"""From a target and a file of prompts to a draft model in a directory, going on where it was interrupted."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from bbquic.draft.distill.corpus import read_corpus
from bbquic.draft.distill.lessons import LessonOptions, Lessons, write_lessons
from bbquic.draft.distill.objective import Score, score
from bbquic.draft.distill.student import Student
from bbquic.draft.distill.teacher import Lesson, Teacher
from bbquic.draft.distill.trainer import Trainer, TrainingOptions
from bbquic.draft.distilled import describe, write_distilled
from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import manifest_of
from bbquic.units import Seconds

SMOOTH = 0.95  # of the loss that is shown, what it was before
HELD_OUT = 48  # lessons that a score is taken over at most: a few thousand tokens


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """blocks: of the target, with which the draft begins; none: `default_blocks`. prompt_tokens, text_tokens:
    of a passage at most. save_every: between checkpoints, each with a score. threads: of torch."""

    blocks: tuple[int, ...] = ()
    prompt_tokens: int = 128
    text_tokens: int = 128
    save_every: Seconds = Seconds(180.0)
    threads: int = 1
    lessons: LessonOptions = field(default_factory=LessonOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot. While the target is asked, `done` of `total` are passages, then steps of training.

    rate: of those a second in this run. loss: KL in nats a token, smoothed. score: of the newest checkpoint.
    """

    trains: bool = False
    done: int = 0
    total: int = 0
    rate: float = 0.0
    loss: float | None = None
    score: Score | None = None

    @property
    def left(self) -> Seconds | None:
        """Of the present part, at its rate; None before that is known."""
        return Seconds((self.total - self.done) / self.rate) if self.rate > 0 else None

    @property
    def is_done(self) -> bool:
        """Whether the draft is what it is going to be."""
        return self.trains and self.done == self.total


def default_blocks(count: int) -> tuple[int, ...]:
    """Of a target with `count`: its first three, which make features of tokens, and its last one."""
    return tuple(sorted({*range(min(3, count)), count - 1}))


class Distillation:
    """One run. `run` is for a thread of its own; `progress` and `stop` are for others."""

    def __init__(
        self, target: ModelDirectory, data: Path, folder: Path, work: Path, options: DistillOptions
    ) -> None:
        """`folder` gets the draft, `work` lessons and checkpoint, which nobody needs once it is done."""
        self.progress = Progress()
        self._target = target
        self._data = data
        self._folder = folder
        self._work = work
        self._options = options
        self._blocks = options.blocks or default_blocks(target.blocks)
        self._stopping = threading.Event()
        self._since = time.monotonic(), 0  # when the present part began in this run, and at what count

    def stop(self) -> None:
        """End `run` soon: behind the present step, or the present group of passages."""
        self._stopping.set()

    def run(self) -> Progress:
        """Until the draft is done, or `stop`.

        Raises: ConfigError naming what is wrong with data or options; ModelError for damaged files, full
        disks, and a target that cannot be loaded.
        """
        torch.set_num_threads(self._options.threads)  # of the thread that calls
        digest = manifest_of(self._target).digest
        files = self._ask(digest)
        if not self._stopping.is_set():
            settings = (digest, self._blocks, asdict(self._options.training), [file.name for file in files])
            identity = hashlib.sha256(repr(settings).encode()).hexdigest()
            self._train(Lessons(files), identity)
        return self.progress

    def _ask(self, digest: str) -> list[Path]:
        """Files with what the target says; not all of them are there where it was stopped."""
        options = self._options
        passages = read_corpus(
            self._data,
            self._target.tokenizer,
            prompt_tokens=options.prompt_tokens,
            text_tokens=options.text_tokens,
        )
        self.progress = Progress(total=len(passages))
        return write_lessons(
            self._work / "lessons",
            passages,
            digest,
            options.lessons,
            lambda: Teacher(self._target, options.lessons.dtype),
            self._goes_on,
        )

    def _train(self, lessons: Lessons, identity: str) -> None:
        student = Student(self._target, self._blocks)
        trainer = Trainer(student, lessons, self._options.training, identity)
        trainer.resume(self._work)
        held_out = [place for place in range(len(lessons)) if lessons.is_held_out(place)][:HELD_OUT]
        measured = [lessons[place] for place in held_out]
        self._since = time.monotonic(), trainer.step
        self.progress = Progress(trains=True, done=trainer.step, total=trainer.steps)
        self._keep(trainer, student, measured)
        kept = time.monotonic()
        while trainer.step < trainer.steps:
            found, before = trainer.advance(), self.progress.loss
            mean = found if before is None else SMOOTH * before + (1 - SMOOTH) * found
            self.progress = replace(self.progress, loss=mean)
            goes_on = self._goes_on(trainer.step, trainer.steps)
            if not goes_on or time.monotonic() - kept > self._options.save_every:
                self._keep(trainer, student, measured)
                kept = time.monotonic()
            if not goes_on:
                return
        self._keep(trainer, student, measured)

    def _goes_on(self, done: int, total: int) -> bool:
        """Note how far it is; False once it is to stop."""
        began, first = self._since
        passed = time.monotonic() - began
        rate = (done - first) / passed if passed > 0 else 0.0
        self.progress = replace(self.progress, done=done, total=total, rate=rate)
        return not self._stopping.is_set()

    def _keep(self, trainer: Trainer, student: Student, held_out: Sequence[Lesson]) -> None:
        """A checkpoint, a score, and the draft as it is by now, with a line in the work folder's log."""
        trainer.save(self._work)
        with trainer.computing():
            found = score(student, held_out)
        self.progress = replace(self.progress, score=found)
        scored = None if found is None else asdict(found)
        made = {"step": trainer.step, "steps": trainer.steps, "held_out": scored}
        names = student.shared_names
        write_distilled(
            self._folder, self._target, describe(self._target, names, self._blocks, made), student.trained()
        )
        try:
            with (self._work / "log.jsonl").open("ab") as file:
                file.write(msgspec.json.encode({**made, "loss": self.progress.loss}) + b"\n")
        except OSError as error:
            raise ModelError(f"cannot write {self._work}: {error.strerror}") from error
