"""Drafts by looking up what was said before."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bbquic.draft.drafter import Ask
from bbquic.draft.ngram import (
    LONGEST,
    NEWEST,
    SHORTEST,
    NgramConfidence,
    NgramDrafter,
    NgramIndex,
    draft_ngrams,
)
from bbquic.model.sampling import Sampling

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


def ask(key: int, tokens: list[int], guesses: int = 6) -> Ask:
    return Ask(key, tokens, Sampling(), guesses, 4)


@given(texts=st.lists(TEXT, min_size=1, max_size=4), grown=st.lists(TEXT, max_size=3))
def test_a_drafter_knows_each_sequence_as_it_is_now(texts: list[list[int]], grown: list[list[int]]) -> None:
    drafter = NgramDrafter()
    for text in texts:  # one key: the next does not go on from the one before
        now = [9, *text]
        for more in ([], *grown):
            now = now + more
            trees = drafter.draft([ask(1, now), ask(2, [7, *now])])
            assert trees == [NgramDrafter().draft([ask(1, one)])[0] for one in (now, [7, *now])]
        drafter.draft([ask(1, [8] * (len(now) + 9))])


def test_what_is_accepted_is_trusted_more_and_for_all_sequences() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    weights = []
    drafter = NgramDrafter()
    for key in range(30):
        (tree,) = drafter.draft([ask(key, text, guesses=3)])
        weights.append(tree.weights[1])
        drafter.learn(key, tree, [0, 1, 2, 3] if key < 15 else [0])
        drafter.forget(key)
        drafter.learn(key, tree, [0])  # of a sequence that is over: nothing
    assert weights[:15] == sorted(set(weights[:15]))
    assert weights[16:] == sorted(set(weights[16:]), reverse=True)
