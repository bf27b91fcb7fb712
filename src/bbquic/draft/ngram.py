"""Drafts without a model: what followed the newest tokens when they were seen before, in prompt or answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bbquic.draft.tree import DraftTree, grow

LONGEST = 4  # tokens that are looked up: longer ones are found by their last four
SHORTEST = 2  # one token alone is followed by nearly anything
NEWEST = 8  # places that are looked at, the newest first: what was said last is repeated first
PRIOR = {4: 0.7, 3: 0.5, 2: 0.3}  # that what followed n tokens follows them again, before anything is known
WEIGHT = 20.0  # guesses that the prior counts as


@dataclass(slots=True)
class _Record:
    right: float = 0.0
    made: float = 0.0


class NgramIndex:
    """A sequence's tokens, by the few before each: grows with the answer, and never forgets."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by n-gram: where it was followed

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for size in range(SHORTEST, LONGEST + 1):
                if len(self._tokens) >= size:
                    self._places[tuple(self._tokens[-size:])].append(len(self._tokens))
            self._tokens.append(token)

    def following(self, path: Sequence[int]) -> Iterator[tuple[int, dict[int, int]]]:
        """What followed the tokens and `path` before: for each n whose n-gram was seen, the longest first,
        how often each token did."""
        recent = (*self._tokens[max(0, len(self._tokens) - LONGEST) :], *path)
        for size in range(min(LONGEST, len(recent)), SHORTEST - 1, -1):
            places = self._places.get(tuple(recent[-size:]))
            if places:
                counts: dict[int, int] = {}
                for place in reversed(places[-NEWEST:]):
                    token = self._tokens[place]
                    counts[token] = counts.get(token, 0) + 1
                yield size, counts


class NgramConfidence:
    """How often what followed n tokens followed them again: learnt over a job, from a prior."""

    def __init__(self) -> None:
        self._seen = {size: _Record() for size in range(SHORTEST, LONGEST + 1)}

    def __call__(self, size: int) -> float:
        record = self._seen[size]
        return (record.right + WEIGHT * PRIOR[size]) / (record.made + WEIGHT)

    def learn(self, size: int, *, was_right: bool) -> None:
        """Of the likeliest guess behind an n-gram of that size."""
        record = self._seen[size]
        record.made += 1
        record.right += was_right


def draft_ngrams(index: NgramIndex, confidence: NgramConfidence, guesses: int, depth: int) -> DraftTree:
    """The likeliest `guesses` nodes behind a sequence that has a token at least.

    What the longest n-gram leaves of the probability goes to what followed the shorter ones alone.
    """

    def guess(path: tuple[int, ...]) -> list[tuple[int, float]]:
        found: dict[int, float] = {}
        left = 1.0
        for size, counts in index.following(path):
            new = {token: count for token, count in counts.items() if token not in found}
            if new:
                share = left * confidence(size)
                left -= share
                found |= {token: share * count / sum(new.values()) for token, count in new.items()}
        return list(found.items())

    return grow(index.tokens[-1], guess, guesses, depth)
