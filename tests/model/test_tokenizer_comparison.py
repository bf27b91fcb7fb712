"""A draft model's tokens are the target's, or it is refused by the first difference."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.tokenizer_difference import refuse_other_tokenizer, tokenizer_difference
from tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def file(tiny: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((tiny / "tokenizer.json").read_text())
    return read


def special(file: dict[str, Any], token: str, number: int) -> dict[str, Any]:
    """The same with a special token more."""
    changed = copy.deepcopy(file)
    changed["added_tokens"].append(dict(changed["added_tokens"][0], id=number, content=token))
    return changed


def test_a_tokenizer_is_its_own(file: dict[str, Any]) -> None:
    assert tokenizer_difference(file, copy.deepcopy(file)) is None


@given(data=st.data())
def test_two_tokens_that_changed_places_are_named(file: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(file)
    vocabulary = changed["model"]["vocab"]
    plain = sorted(token for token, number in vocabulary.items() if number > 2)
    one, other = data.draw(st.lists(st.sampled_from(plain), min_size=2, max_size=2, unique=True))
    first = min(vocabulary[one], vocabulary[other])
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    assert (tokenizer_difference(changed, file) or "").startswith(f"token {first} is ")


def test_a_token_that_one_of_them_lacks_is_named(file: dict[str, Any]) -> None:
    changed = copy.deepcopy(file)
    token, number = max(changed["model"]["vocab"].items(), key=lambda pair: pair[1])
    del changed["model"]["vocab"][token]
    assert tokenizer_difference(changed, file) == f"token {number} is {token!r}, which is missing there"
    assert tokenizer_difference(file, changed) == f"it has {token!r} (token {number}), which the target lacks"


def test_special_tokens_more_at_either_are_no_difference(file: dict[str, Any]) -> None:
    more = special(file, "<|image|>", 5000)
    assert tokenizer_difference(more, file) is None
    assert tokenizer_difference(file, more) is None


def test_a_special_token_in_another_ones_place_is_a_difference(file: dict[str, Any]) -> None:
    more = special(file, "<|image|>", 7)
    assert tokenizer_difference(more, file) is not None
    assert tokenizer_difference(file, more) is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.update(normalizer={"type": "NFC"}), 'its normalizer is {"type": "NFC"}, not null'),
        (lambda file: file["pre_tokenizer"].update(add_prefix_space=True), "its pre_tokenizer is "),
        (lambda file: file.update(decoder={"type": "Fuse"}), "its decoder is "),
        (lambda file: file["model"].update(type="WordPiece"), "its model's type is 'WordPiece', not 'BPE'"),
        (lambda file: file["model"]["merges"].reverse(), "its merge 0 is "),
        (lambda file: file["model"]["merges"].pop(), "merges, not "),
        (lambda file: file["model"].pop("vocab"), "is not understood"),
        (lambda file: file.update(added_tokens=[5]), "is not understood"),
        (lambda file: file.update(model=None), "is not understood"),
    ],
)
def test_other_rules_are_a_difference(file: dict[str, Any], change: Any, said: str) -> None:
    changed = copy.deepcopy(file)
    change(changed)
    assert said in (tokenizer_difference(changed, file) or "")


def test_merges_as_words_and_as_pairs_are_the_same(file: dict[str, Any]) -> None:
    changed = copy.deepcopy(file)
    changed["model"]["merges"] = [" ".join(pair) for pair in changed["model"]["merges"]]
    assert tokenizer_difference(changed, file) is None


def test_a_draft_model_with_another_tokenizer_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    target = ModelDirectory(tiny, "target")
    refuse_other_tokenizer(ModelDirectory(make_tiny_llama(tmp_path / "same", seed=4), "same"), target)
    other = ModelDirectory(make_tiny_llama(tmp_path / "other", vocab=330), "other")
    with pytest.raises(ModelError, match=r"draft model other has another tokenizer than target: it has "):
        refuse_other_tokenizer(other, target)
