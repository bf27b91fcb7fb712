"""Drafts by looking up what was said before."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bbquic.draft.ngram import LONGEST, NEWEST, SHORTEST, NgramConfidence, NgramIndex, draft_ngrams

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def index_of(tokens: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(tokens)
    return index


@given(tokens=TEXT, path=st.lists(st.integers(0, 3), max_size=3))
def test_what_followed_is_what_a_search_of_the_whole_text_finds(tokens: list[int], path: list[int]) -> None:
    found = dict(index_of(tokens).following(tuple(path)))
    assert list(found) == sorted(found, reverse=True)
    recent = (tokens[-LONGEST:] + path)[-LONGEST:]
    for size in range(SHORTEST, LONGEST + 1):
        ends = range(size, len(tokens))
        after = [tokens[end] for end in ends if tokens[end - size : end] == recent[-size:]]
        assert found.get(size, {}) == (Counter(after[-NEWEST:]) if len(recent) >= size else {})


@given(tokens=TEXT, cut=st.integers(0, 60))
def test_tokens_that_come_one_by_one_are_as_those_that_come_at_once(tokens: list[int], cut: int) -> None:
    parts = NgramIndex()
    for part in (tokens[:cut], tokens[cut:]):
        parts.extend(part)
    confidence = NgramConfidence()
    assert draft_ngrams(parts, confidence, 8, 4) == draft_ngrams(index_of(tokens), confidence, 8, 4)


def test_a_text_that_repeats_itself_is_drafted_as_it_was() -> None:
    tree = draft_ngrams(index_of([1, 2, 3, 4, 5, 6, 1, 2, 3]), NgramConfidence(), 3, 8)
    assert tree.tokens == (3, 4, 5, 6)
    assert tree.is_chain


def test_two_ways_it_went_on_are_two_branches() -> None:
    tree = draft_ngrams(index_of([1, 2, 8, 0, 1, 2, 9, 0, 1, 2]), NgramConfidence(), 2, 1)
    assert set(tree.tokens[1:]) == {8, 9}
    assert tree.parents == (0, 0, 0)


def test_nothing_is_drafted_where_nothing_was_seen() -> None:
    assert draft_ngrams(index_of([1, 2, 3]), NgramConfidence(), 8, 4).guesses == 0


def test_guesses_that_fail_are_trusted_less() -> None:
    confidence = NgramConfidence()
    before = confidence(3)
    for _ in range(50):
        confidence.learn(3, was_right=False)
    assert confidence(3) < before / 2
    assert confidence(2) == NgramConfidence()(2)
