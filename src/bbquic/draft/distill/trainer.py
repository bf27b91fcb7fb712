"""Steps of learning, and going on after an interruption as if there had been none."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bbquic.draft.distill.lessons import Lessons
from bbquic.draft.distill.objective import Batch, Words, common_tokens, loss
from bbquic.draft.distill.student import Student
from bbquic.errors import ConfigError, ModelError

WINDOW = 16  # batches within which lessons are sorted by length, so that little is padded
DECAY = 0.01
BETAS = (0.9, 0.95)
CLIP = 1.0  # the gradient's norm at most
FLOOR = 0.05  # of the rate, at the end
STATE, WEIGHTS = "state.json", "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """epochs: how often each lesson is learnt from. batch: lessons of a step. rate: the learning rate after
    `warm_up` steps, from where it falls as a cosine does. dtype: of matrix products; weights are float32."""

    epochs: int = 6
    batch: int = 8
    rate: float = 6e-4
    warm_up: int = 50
    seed: int = 0
    dtype: torch.dtype = torch.float32


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    identity: str


class Trainer:
    """One step after another. What a step does depends on its number, the lessons and the options alone."""

    def __init__(self, student: Student, lessons: Lessons, options: TrainingOptions, identity: str) -> None:
        """`identity` says what is trained on what: a checkpoint of another one is refused."""
        self.step = 0
        self._student = student
        self._lessons = lessons
        self._options = options
        self._identity = identity
        self._places = [place for place in range(len(lessons)) if not lessons.is_held_out(place)]
        if not self._places:
            raise ConfigError("there is nothing to train on beside what is held out")
        self._common = common_tokens(map(lessons.tokens, self._places), len(student.head))
        self._parameters = student.trained()
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=options.rate, betas=BETAS, weight_decay=DECAY
        )
        self._epoch = (-1, list[list[int]]())

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self._places) / self._options.batch)

    @property
    def steps(self) -> int:
        """In all."""
        return self.steps_per_epoch * self._options.epochs

    def computing(self) -> AbstractContextManager[Any]:
        """Where matrices are multiplied in the options' dtype."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._options.dtype is not torch.float32)

    def advance(self) -> float:
        """One step; its loss in nats a token."""
        assert self.step < self.steps
        batch = Batch.of([self._lessons[place] for place in self._batch(self.step)])
        words = Words.draw(batch.tokens, self._common, len(self._student.head), self._seed(self.step))
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.rate * self._share(self.step)
        with self.computing():
            found = loss(self._student, batch, words)
        self._optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), CLIP)
        self._optimizer.step()
        self.step += 1
        return float(found.detach())

    def save(self, folder: Path) -> None:
        """A checkpoint, whole or not at all: weights and moments, then the step. Raises: ModelError."""
        tensors = {name: parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            tensors |= {f"{key}:{name}": value for key, value in moments.items()}
        name = f"{self.step:08}.{WEIGHTS}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = folder / f".{name}.{os.getpid()}"
            save_file(tensors, scratch)
            scratch.replace(folder / name)
            state = folder / f".{STATE}.{os.getpid()}"
            state.write_bytes(msgspec.json.encode(_State(self.step, self._identity)))
            state.replace(folder / STATE)  # from here on this is the checkpoint
            for old in folder.glob(f"*.{WEIGHTS}"):
                if old.name != name:
                    old.unlink()
        except OSError as error:
            raise ModelError(f"cannot write {folder}: {error.strerror}") from error

    def resume(self, folder: Path) -> bool:
        """Go on from a folder's checkpoint; whether there is one.

        Raises: ConfigError for one of other data or options, ModelError for a damaged one.
        """
        if not (folder / STATE).exists():
            return False
        try:
            state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
            if state.identity != self._identity:
                raise ConfigError(
                    f"{folder} has a checkpoint of other data, options or another target",
                    hint="the same command goes on with it; another --work starts anew",
                )
            held = load_file(folder / f"{state.step:08}.{WEIGHTS}")
            self._student.load_trained({name: held[name] for name in self._parameters})
            for name, parameter in self._parameters.items():
                keys = ("step", "exp_avg", "exp_avg_sq")
                self._optimizer.state[parameter] = {key: held[f"{key}:{name}"] for key in keys}
        except (OSError, SafetensorError, msgspec.MsgspecError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"the checkpoint in {folder} is damaged: {error}", hint="delete it to start anew"
            ) from error
        self.step = state.step
        return True

    def _batch(self, step: int) -> Sequence[int]:
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._order(epoch)
        return self._epoch[1][number]

    def _order(self, epoch: int) -> list[list[int]]:
        """Batches of an epoch, in their order: shuffled, and within a window lessons of like length."""
        generator = torch.Generator().manual_seed(self._seed(-1 - epoch))
        order = torch.randperm(len(self._places), generator=generator).tolist()
        places = [self._places[index] for index in order]
        size = self._options.batch
        batches: list[list[int]] = []
        for start in range(0, len(places), WINDOW * size):
            window = places[start : start + WINDOW * size]
            window.sort(key=lambda place: (self._lessons.lengths[place], place))
            batches += (window[first : first + size] for first in range(0, len(window), size))
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[index] for index in shuffled]

    def _seed(self, number: int) -> int:
        return (self._options.seed * 1_000_003 + number) % (1 << 63)

    def _share(self, step: int) -> float:
        """Of the rate."""
        if step < self._options.warm_up:
            return (step + 1) / self._options.warm_up
        passed = (step - self._options.warm_up) / max(1, self.steps - self._options.warm_up)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * passed))
