"""Drafts without a model: what followed the newest tokens when they were seen before, in prompt or answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bbquic.draft.drafter import Ask
from bbquic.draft.tree import DraftTree, grow

LONGEST = 4  # tokens that are looked up: longer ones are found by their last four
SHORTEST = 2  # one token alone is followed by nearly anything
NEWEST = 8  # places that are looked at, the newest first: what was said last is repeated first
PRIOR = {4: 0.7, 3: 0.5, 2: 0.3}  # that what followed n tokens follows them again, before anything is known
SEEN = 8  # tokens that are compared with those that are indexed: the rest is taken to be as it was
WEIGHT = 20.0  # guesses that the prior counts as


@dataclass(slots=True)
class _Record:
    right: float = 0.0
    made: float = 0.0


class NgramIndex:
    """A sequence's tokens, by the few before each: grows with the answer, and never forgets."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._recent: tuple[int, ...] = ()  # the newest of them
        self._followed: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by n-gram

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def extend(self, tokens: Sequence[int]) -> None:
        before, followed = self._recent, self._followed
        for token in tokens:
            for size in range(SHORTEST, len(before) + 1):
                followed[before[-size:]].append(token)
            before = (*before[1 - LONGEST :], token)
        self._tokens += tokens
        self._recent = before

    def following(self, path: tuple[int, ...]) -> Iterator[tuple[int, dict[int, int]]]:
        """What followed the tokens and `path` before: for each n whose n-gram was seen, the longest first,
        how often each token did, the newest first."""
        recent = (self._recent + path)[-LONGEST:]
        for size in range(len(recent), SHORTEST - 1, -1):
            found = self._followed.get(recent[-size:])
            if found:
                counts: dict[int, int] = {}
                for token in found[: -NEWEST - 1 : -1]:
                    counts[token] = counts.get(token, 0) + 1
                yield size, counts


class NgramConfidence:
    """How often what followed n tokens followed them again: learnt over a job, from a prior."""

    def __init__(self) -> None:
        self._seen = {size: _Record() for size in range(SHORTEST, LONGEST + 1)}
        self._now = dict(PRIOR)

    def __call__(self, size: int) -> float:
        return self._now[size]

    def learn(self, size: int, *, was_right: bool) -> None:
        """Of the likeliest guess behind an n-gram of that size."""
        record = self._seen[size]
        record.made += 1
        record.right += was_right
        self._now[size] = (record.right + WEIGHT * PRIOR[size]) / (record.made + WEIGHT)


def draft_ngrams(index: NgramIndex, confidence: NgramConfidence, guesses: int, depth: int) -> DraftTree:
    """The likeliest `guesses` nodes behind a sequence that has a token at least.

    What the longest n-gram leaves of the probability goes to what followed the shorter ones alone.
    """

    def guess(path: tuple[int, ...]) -> list[tuple[int, float]]:
        found: dict[int, float] = {}
        left = 1.0
        for size, counts in index.following(path):
            if found:
                counts = {token: count for token, count in counts.items() if token not in found}
            if counts:
                share = left * confidence(size)
                left -= share
                each = share / sum(counts.values())
                for token, count in counts.items():
                    found[token] = each * count
        return list(found.items())

    return grow(index.tokens[-1], guess, guesses, depth)


class NgramDrafter:
    """A `Drafter` that looks up a sequence's own tokens; what it learns of n-grams counts for all."""

    name = "n-grams"
    is_instant = True

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}
        self._confidence = NgramConfidence()

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """See `Drafter.draft`."""
        return [draft_ngrams(self._index(ask), self._confidence, ask.guesses, ask.depth) for ask in asks]

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        """See `Drafter.learn`; before the sequence is asked about again."""
        index = self._indices.get(key)
        if index is None or index.tokens[-1] != tree.tokens[0]:
            return
        children = {
            (p, t): node for node, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True)) if node
        }
        accepted, said = set(path), list[int]()
        for node in path:
            said += [tree.tokens[node]] if node else []
            found = next(index.following(tuple(said)), None)
            if found is not None:
                likeliest = children.get((node, max(found[1], key=found[1].__getitem__)))
                if likeliest is not None:
                    self._confidence.learn(found[0], was_right=likeliest in accepted)

    def forget(self, key: int) -> None:
        """See `Drafter.forget`."""
        self._indices.pop(key, None)

    def _index(self, ask: Ask) -> NgramIndex:
        """The sequence's, with all its tokens; made anew where they do not go on from those before."""
        index = self._indices.get(ask.key)
        known = 0 if index is None else len(index.tokens)
        if index is None or list(ask.tokens[max(0, known - SEEN) : known]) != list(index.tokens[-SEEN:]):
            index = self._indices[ask.key] = NgramIndex()
            known = 0
        index.extend(ask.tokens[known:])
        return index
