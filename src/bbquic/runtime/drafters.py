"""Which drafter a run has: what was asked for, made and timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bbquic.draft.drafter import Ask, Drafter
from bbquic.draft.ngram import NgramDrafter
from bbquic.draft.tree import DraftTree
from bbquic.errors import ConfigError
from bbquic.model.directory import ModelDirectory
from bbquic.runtime.protocol import MAX_TREE
from bbquic.units import Bytes, Seconds

if TYPE_CHECKING:  # the command line reads `DraftOptions` long before it needs torch
    from bbquic.draft.small import ModelDrafterOptions

GUESSES = 8  # of a tree at most, where nobody says
MEMORY_SHARE = 0.5  # of what is free here when the drafter is loaded: nodes may be on this machine, too


class DraftMode(StrEnum):
    """What guesses the next tokens."""

    OFF = "off"
    NGRAM = "ngram"  # looked up in prompt and answer
    AUTO = "auto"  # the draft model where there is one, else n-grams


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """guesses: nodes of a tree at most: as many as pay, or `always` all. model: the draft model, which runs
    where the command does.

    Raises: ConfigError for what contradicts itself.
    """

    mode: DraftMode = DraftMode.OFF
    model: ModelDirectory | None = None
    guesses: int = GUESSES
    of_model: ModelDrafterOptions | None = None
    always: bool = False  # not only where it pays

    def __post_init__(self) -> None:
        if not 1 <= self.guesses < MAX_TREE:
            raise ConfigError(f"a tree has 1 to {MAX_TREE - 1} guesses, not {self.guesses}")
        if self.model is not None and self.mode is not DraftMode.AUTO:
            raise ConfigError(
                f"--draft {self.mode.value} has no use for the draft model {self.model.name}",
                hint="leave out --draft, or --draft-model",
            )

    @property
    def is_on(self) -> bool:
        return self.mode is not DraftMode.OFF

    @property
    def most_guesses(self) -> int:
        """Of a row: what the scheduler leaves room for."""
        return self.guesses if self.is_on else 0


class TimedDrafter:
    """A `Drafter` that knows how long it worked: it is a resource like any other."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name
        self.is_instant = drafter.is_instant
        self.spent = Seconds(0.0)

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """See `Drafter.draft`."""
        began = time.monotonic()
        trees = self._drafter.draft(asks)
        self.spent = Seconds(self.spent + time.monotonic() - began)
        return trees

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        """See `Drafter.learn`."""
        self._drafter.learn(key, tree, path)

    def forget(self, key: int) -> None:
        """See `Drafter.forget`."""
        self._drafter.forget(key)

    def passed(self, key: int, kept: int) -> None:
        """Of the sequence's tree that is learnt next `kept` guesses went on from the first stage. It may be
        said in another thread than the drafter's."""


def ngram_drafter() -> TimedDrafter:
    return TimedDrafter(NgramDrafter())


def make_drafter(options: DraftOptions, target: ModelDirectory, *, free: Bytes) -> TimedDrafter | None:
    """The drafter, None where it is off. Seconds, where a model is loaded.

    Raises: ModelError as `load_drafter`, which may use `MEMORY_SHARE` of the `free` memory.
    """
    if not options.is_on:
        return None
    if options.model is None:
        return ngram_drafter()
    from bbquic.draft.load import load_drafter
    from bbquic.draft.small import ModelDrafterOptions

    chosen = options.of_model or ModelDrafterOptions()
    share = Bytes(int(MEMORY_SHARE * free))
    return TimedDrafter(load_drafter(options.model, target, chosen, free=share))
