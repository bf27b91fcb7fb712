"""What drafting came to, as the loop counts it: sums, from which a reader takes differences."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import astuple

from bbquic.runtime.timing import Count, Finite


class Drafts(Struct, frozen=True, forbid_unknown_fields=True):
    """Of decode rows that came back, with a tree or without."""

    rows: Count = 0
    tokens: Count = 0  # that these rows committed
    guesses: Count = 0  # made for them
    accepted: Count = 0  # of the guesses
    seconds: Finite = 0.0  # that the drafter worked

    def __post_init__(self) -> None:
        """Raises: ValueError where more was accepted than made."""
        if self.accepted > self.guesses:
            raise ValueError(f"of {self.guesses} guesses {self.accepted} cannot be accepted")

    def since(self, before: Drafts) -> Drafts:
        """What was added since an earlier look."""
        return Drafts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def tokens_a_pass(self) -> float | None:
        """Committed by a row in a pass: 1 without drafts; None before anything came back."""
        return self.tokens / self.rows if self.rows else None
