"""What a draft is trained on: lines with prompts, which the target answers, or with ordinary text.

    {"prompt": "Name three fruits."} | {"messages": [{"role": "user", "content": "…"}]} | {"text": "…"}

Other fields of a line are not looked at, so a job's file is one of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bbquic.errors import ConfigError, RecordError
from bbquic.model.tokenizer import Tokenizer

HELD_OUT_EVERY = 32  # lines: one of so many is never trained on


class _Message(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[_Message] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens of a prompt that is to be answered, or of text that is read as it is."""

    tokens: tuple[int, ...]
    is_prompt: bool


def is_held_out(tokens: Sequence[int]) -> bool:
    """Whether a passage measures and never trains: by its tokens alone, whatever else there is."""
    digest = hashlib.sha256(b"held out" + repr(list(tokens)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


def read_corpus(path: Path, tokenizer: Tokenizer, *, prompt_tokens: int, text_tokens: int) -> list[Passage]:
    """Each line's passages: of a longer text several of `text_tokens`, of a longer prompt the newest
    `prompt_tokens`. The same tokens are taken once.

    Raises: ConfigError naming the line that is not as above, or a file without any.
    """
    found: dict[Passage, None] = {}
    for number, raw in _lines(path):
        try:
            line = msgspec.json.decode(raw, type=_Line)
            found |= dict.fromkeys(_passages(line, tokenizer, prompt_tokens, text_tokens))
        except (msgspec.MsgspecError, RecordError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ConfigError(f"{path} has nothing to train on")
    return list(found)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from ((number, raw) for number, raw in enumerate(file, 1) if raw.strip())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _passages(line: _Line, tokenizer: Tokenizer, prompt_tokens: int, text_tokens: int) -> Iterator[Passage]:
    given = [value for value in (line.prompt, line.messages, line.text) if value is not None]
    if len(given) != 1:
        raise ValueError("a line has one of prompt, messages and text")
    if line.text is not None:
        for piece in _pieces(tokenizer.encode(line.text), text_tokens):
            yield Passage(tuple(piece), is_prompt=False)
        return
    if line.messages is not None:
        tokens = tokenizer.encode_chat([msgspec.structs.asdict(message) for message in line.messages])
    else:
        tokens = tokenizer.encode(line.prompt or "")
    if not tokens:
        raise ValueError("the prompt has no tokens")
    yield Passage(tuple(tokens[-prompt_tokens:]), is_prompt=True)


def _pieces(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        if len(piece) > 1:  # one token alone has nothing before it to tell from
            yield piece
