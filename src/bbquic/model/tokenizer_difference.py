"""Whether two models' tokens are the same: else one cannot guess what the other will say."""

from __future__ import annotations

import json
from typing import Any

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory, read_json

HINT = "a draft model is of the target's own family, with its tokenizer"
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_OF_MODEL = ("type", "unk_token", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")


def refuse_other_tokenizer(draft: ModelDirectory, target: ModelDirectory) -> None:
    """Raises: ModelError naming the first difference that the target's tokens could show."""
    difference = tokenizer_difference(
        read_json(draft.path / "tokenizer.json"), read_json(target.path / "tokenizer.json")
    )
    if difference is not None:
        raise ModelError(
            f"the draft model {draft.name} has another tokenizer than {target.name}: {difference}", hint=HINT
        )


def tokenizer_difference(draft: dict[str, Any], target: dict[str, Any]) -> str | None:
    """How two tokenizer.json differ; None where each token of the target is the draft's, by the same rules.

    Special tokens more or less are no difference as long as none of their ids is another token's: a target
    writes them, if ever, as its last one.
    """
    try:
        ours, theirs = (_ids(one) for one in (draft, target))
        return _of_tokens(ours, theirs, _special(draft) | _special(target)) or _of_rules(draft, target)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"one of their tokenizer.json is not understood ({type(error).__name__}: {error})"


def _of_tokens(draft: dict[str, int], target: dict[str, int], special: set[str]) -> str | None:
    by_id = {number: token for token, number in draft.items()}
    for token, number in sorted(target.items(), key=lambda pair: pair[1]):
        other = by_id.get(number)
        if other != token and not (other is None and token in special):
            said = "missing" if token not in draft else f"token {draft[token]}"
            return f"token {number} is {token!r}, which is {said} there"
    more = {token: number for token, number in draft.items() if token not in target and token not in special}
    if more:
        token, number = min(more.items(), key=lambda pair: pair[1])
        return f"it has {token!r} (token {number}), which the target lacks"
    return None


def _of_rules(draft: dict[str, Any], target: dict[str, Any]) -> str | None:
    for part in _PARTS:
        if _plain(draft.get(part)) != _plain(target.get(part)):
            return f"its {part} is {_short(draft.get(part))}, not {_short(target.get(part))}"
    for field in _OF_MODEL:
        ours, theirs = draft["model"].get(field), target["model"].get(field)
        if (ours or None) != (theirs or None):
            return f"its model's {field} is {ours!r}, not {theirs!r}"
    merges = [[_merge(one) for one in of["model"].get("merges", [])] for of in (draft, target)]
    for place, (ours, theirs) in enumerate(zip(*merges, strict=False)):
        if ours != theirs:
            return f"its merge {place} is {' + '.join(ours)}, not {' + '.join(theirs)}"
    if len(merges[0]) != len(merges[1]):
        return f"it has {len(merges[0])} merges, not {len(merges[1])}"
    return None


def _ids(file: dict[str, Any]) -> dict[str, int]:
    """Token to id, added ones included. A unigram model lists its tokens with their scores."""
    vocabulary = file["model"]["vocab"]
    if isinstance(vocabulary, list):
        ids = {str(entry[0]): place for place, entry in enumerate(vocabulary)}
    else:
        ids = {str(token): int(number) for token, number in vocabulary.items()}
    return ids | {str(added["content"]): int(added["id"]) for added in file.get("added_tokens") or []}


def _special(file: dict[str, Any]) -> set[str]:
    return {str(added["content"]) for added in file.get("added_tokens") or [] if added.get("special")}


def _merge(one: Any) -> tuple[str, ...]:
    """Written as a pair, or by older versions as two words."""
    return tuple(one.split(" ", 1)) if isinstance(one, str) else tuple(one)


def _plain(part: Any) -> str:
    return json.dumps(part, sort_keys=True)


def _short(part: Any) -> str:
    text = _plain(part)
    return text if len(text) <= 80 else f"{text[:77]}..."
