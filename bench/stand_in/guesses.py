"""A drafter whose guesses a stand-in finds right as often as it is told to."""

from __future__ import annotations

from collections.abc import Sequence

from bbquic.draft.drafter import Ask
from bbquic.draft.tree import DraftTree, grow

GUESSED, OTHER = 2, 1  # what it guesses, and what a stand-in chooses else


class PlayedDrafter:
    """Chains of GUESSED, at no cost."""

    name = "played"
    is_instant = True

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [grow(ask.tokens[-1], lambda _: [(GUESSED, 1.0)], ask.guesses, ask.depth) for ask in asks]

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        """It has nothing to learn."""

    def forget(self, key: int) -> None:
        """It holds nothing."""
