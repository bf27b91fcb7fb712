"""Text to tokens and back, as the model's own tokenizer.json says."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from bbquic.errors import ModelError, RecordError
from bbquic.model.chat import ChatTemplate

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # sentencepiece's fallback for what its vocabulary lacks


class Tokenizer:
    """The tokenizer of a Hugging Face directory: tokenizer.json, and tokenizer_config.json if there is one.

    Raises: ModelError where tokenizer.json is missing or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{directory} has no tokenizer.json",
                hint="AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes one",
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path} cannot be read: {error}") from error
        self._tokenizer.no_truncation()  # a file may carry its training's settings
        self._tokenizer.no_padding()
        self._directory = directory
        self._settings = _optional_json(directory / "tokenizer_config.json")
        self.special_ids = frozenset(
            token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        )

    @property
    def eos_token_id(self) -> int | None:
        """The token of tokenizer_config.json's eos_token, if it has one."""
        eos = self._named_tokens.get("eos_token")
        return None if eos is None else self._tokenizer.token_to_id(eos)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with those the tokenizer puts around every text (a BOS, say).

        Raises: RecordError on text that UTF-8 cannot hold (half of a surrogate pair).
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation that asks for the next answer; the template writes its own BOS.

        Raises: RecordError where the model has no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise RecordError("no_chat_template", "this model has no chat template; use prompt, not messages")
        return self._encode(self._chat_template.render(messages), add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens that are not special; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def token(self, token: int) -> str | None:
        """A token as the vocabulary writes it, None outside the vocabulary."""
        written: str | None = self._tokenizer.id_to_token(token)
        return written

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text's bytes are its tokens' bytes, end to end. Else each character has whole tokens
        or runs of byte tokens. Raises: ModelError on a decoder that is neither."""
        decoder = json.loads(self._tokenizer.to_str())["decoder"] if self._tokenizer.decoder else None
        kinds = _kinds(decoder)
        if "ByteLevel" in kinds and kinds != ["ByteLevel"]:
            raise ModelError(f"the tokenizer's decoder {kinds} is not supported")
        return kinds == ["ByteLevel"]

    @cached_property
    def plain_token(self) -> int:
        """Some token of ASCII letters alone: what is decoded behind it is not at the start of a text."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=False)
        return min(number for token, number in vocabulary.items() if token.isascii() and token.isalpha())

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:  # TypeError is how the library says the same
            raise RecordError("invalid_utf8", f"the text cannot be encoded: {error}") from error
        return tokens

    @cached_property
    def _named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, … as text; the settings hold some as text, some as objects."""
        named = {}
        for name, value in self._settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                named[name] = text
        return named

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        file = self._directory / "chat_template.jinja"
        template = file.read_text("utf-8") if file.is_file() else self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            by_name = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = by_name.get("default")
        return ChatTemplate(template, self._named_tokens) if isinstance(template, str) else None


class StreamDecoder:
    """Text as tokens arrive: what `push` has returned never changes, and is never half a character.

    The pieces and `finish` joined are `decode` of all the tokens; the cost is linear in their number.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._byte_level = tokenizer.is_byte_level
        self._run: list[int] = []  # byte tokens whose text the next one may still change
        self._at_start = True

    def push(self, token: int) -> str:
        """The text that this token makes final, often its own, sometimes none."""
        written = self._tokenizer.token(token)
        if written is None or token in self._tokenizer.special_ids:
            return ""
        if self._byte_level:
            return self._utf8.decode(_token_bytes(written))
        if BYTE_TOKEN.fullmatch(written):
            self._run.append(token)
            return ""
        return self._end_run() + self._text([token])

    def finish(self) -> str:
        """The rest: characters that never became whole, as U+FFFD."""
        return self._end_run() + self._utf8.decode(b"", final=True)

    def _end_run(self) -> str:
        run, self._run = self._run, []
        return self._text(run) if run else ""

    def _text(self, tokens: list[int]) -> str:
        if self._at_start:  # where sentencepiece drops the space it put there
            self._at_start = False
            return self._tokenizer.decode(tokens)
        before = self._tokenizer.plain_token
        return self._tokenizer.decode([before, *tokens]).removeprefix(self._tokenizer.decode([before]))


def _byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: itself where it prints."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printing)
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_VALUES = _byte_values()
assert _BYTE_VALUES.keys() == set(ByteLevel.alphabet())


def _token_bytes(written: str) -> bytes:
    try:
        return bytes(_BYTE_VALUES[character] for character in written)
    except KeyError:  # an added token, written as it is
        return written.encode()


def _kinds(decoder: Any) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _kinds(part)]
    return [decoder["type"]]


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value
