"""One line of a job: our own form, or a line of an OpenAI batch file, or a reason why it is neither.

    {"id"?, "prompt" | "messages", "max_tokens"?, "temperature"?, "top_p"?, "top_k"?, "seed"?, "stop"?}
    {"custom_id"?, "method"?, "url"?, "body": {...}}

A batch line's `model` and `user` are ignored on purpose: the model is the one that the command was
given, each answer names it, and `user` is a label for the service. Any other field that is not
honoured is refused by name (see `fields`). A missing temperature is the job's default, greedy unless
the command says otherwise, also in a batch line.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bbquic.errors import RecordError
from bbquic.model.sampling import MAX_SEED, Sampling
from bbquic.runtime.fields import Fields, decode_object, shown, valid_text

MAX_NEW_TOKENS = 1 << 20  # far beyond any context; the context itself is checked with the tokens
MAX_TOP_K = (1 << 31) - 1  # above any vocabulary
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters; each is searched for after each token
MAX_ID_LENGTH = 512  # characters; an id is repeated in the answer
_SEED_BITS = 53  # of a seed we draw: a reader that keeps numbers as doubles gets it back unharmed

Role = Literal["system", "user", "assistant"]
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it; chat templates know only the older
    "user": "user",
    "assistant": "assistant",
}
_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, its text parts joined."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """A line that can be answered: exactly one of `prompt` and `messages` is there, and not empty."""

    line: int  # 1-based
    id: str
    input_sha: str  # 16 hex digits, of the raw line
    prompt: str | None
    messages: tuple[Message, ...] | None
    max_tokens: int
    sampling: Sampling
    seed_given: bool  # False for a sampled record: its seed was drawn, and the answer reports it
    stop: tuple[str, ...]

    def refused(self, error: RecordError) -> BadRecord:
        """What becomes of the record when it turns out later that it cannot be answered."""
        return BadRecord(self.line, self.id, self.input_sha, error.code, error.message)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line that cannot be answered. `id` is None where the line gives none that can be read."""

    line: int
    id: str | None
    input_sha: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a line that is silent on a field gets."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draw_seed: Callable[[], int] = lambda: secrets.randbits(_SEED_BITS)


def parse_record(line: int, raw: bytes, input_sha: str, defaults: Defaults) -> Record | BadRecord:
    """The record of a line's bytes. Never raises on account of them: what is wrong is in the BadRecord."""
    id: str | None = None
    try:
        if not raw.strip():
            raise RecordError("empty_line", "the line is empty")
        fields = Fields(decode_object(raw))
        batch = "body" in fields or "custom_id" in fields
        id = _take_id(fields, "custom_id" if batch else "id", line)
        if batch:
            fields = _take_body(fields)
        return _take_record(fields, line, id, input_sha, defaults, batch=batch)
    except RecordError as error:
        return BadRecord(line, id, input_sha, error.code, error.message)


def _take_id(fields: Fields, name: str, line: int) -> str:
    value = fields.take(name)
    if value is None:
        return f"line-{line}"
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    id = valid_text(value, name)
    if not 1 <= len(id) <= MAX_ID_LENGTH:
        raise RecordError("out_of_range", f"{name} must have 1 to {MAX_ID_LENGTH} characters, not {len(id)}")
    return id


def _take_body(envelope: Fields) -> Fields:
    """The request inside a batch line, held to what its url says it is."""
    method, url, body = envelope.text("method"), envelope.text("url"), envelope.take("body")
    envelope.refuse_rest()
    if method not in (None, "POST"):
        raise RecordError("unsupported_field", f'method must be "POST", not {shown(method)}')
    if url is not None and url not in _URLS:
        raise RecordError("unsupported_field", f"url must be {' or '.join(_URLS)}, not {shown(url)}")
    if not isinstance(body, dict):
        raise RecordError("wrong_type", f"body must be an object, not {shown(body)}")
    fields = Fields(body, "body.")
    fields.text("model")
    fields.text("user")
    if url is not None:
        other = "prompt" if _URLS[url] == "messages" else "messages"
        if other in fields:
            raise RecordError("unsupported_field", f"body.{other} does not belong to {url}")
    return fields


def _take_record(
    fields: Fields, line: int, id: str, input_sha: str, defaults: Defaults, *, batch: bool
) -> Record:
    prompt, messages = _take_prompt(fields)
    max_tokens = _take_max_tokens(fields, batch=batch)
    sampling, seed_given = _take_sampling(fields, defaults)
    stop = _take_stop(fields)
    fields.refuse_rest()
    return Record(
        line=line,
        id=id,
        input_sha=input_sha,
        prompt=prompt,
        messages=messages,
        max_tokens=defaults.max_tokens if max_tokens is None else max_tokens,
        sampling=sampling,
        seed_given=seed_given,
        stop=stop,
    )


def _take_prompt(fields: Fields) -> tuple[str | None, tuple[Message, ...] | None]:
    if "prompt" in fields and "messages" in fields:
        raise RecordError("conflicting_fields", f"{fields.where}prompt and messages are both given")
    prompt, turns = fields.text("prompt"), fields.take("messages")
    if prompt is not None:
        if not prompt:
            raise RecordError("empty_prompt", f"{fields.where}prompt is empty")
        return prompt, None
    if turns is None:
        raise RecordError(
            "missing_prompt", f"neither {fields.where}prompt nor {fields.where}messages is given"
        )
    name = f"{fields.where}messages"
    if not isinstance(turns, list):
        raise RecordError("wrong_type", f"{name} must be a list, not {shown(turns)}")
    messages = tuple(_parse_message(turn, f"{name}[{index}]") for index, turn in enumerate(turns))
    if not any(message.content for message in messages):
        raise RecordError("empty_prompt", f"{name} holds no text")
    return None, messages


def _parse_message(turn: object, name: str) -> Message:
    if not isinstance(turn, dict):
        raise RecordError("wrong_type", f"{name} must be an object, not {shown(turn)}")
    fields = Fields(turn, f"{name}.")
    role = fields.text("role")
    if role is None:
        raise RecordError("wrong_type", f"{name}.role is missing")
    if role not in _ROLES:
        raise RecordError("unsupported_field", f"{name}.role {shown(role)} is not supported")
    content = fields.take("content")
    for nothing in ("name", "refusal", "tool_calls", "function_call", "audio"):
        if nothing not in fields:
            fields.take(nothing)  # a null
    fields.refuse_rest()
    if isinstance(content, list):
        text = "".join(_parse_part(part, f"{name}.content[{index}]") for index, part in enumerate(content))
        return Message(_ROLES[role], text)
    return Message(_ROLES[role], valid_text(content, f"{name}.content"))


def _parse_part(part: object, name: str) -> str:
    if not isinstance(part, dict):
        raise RecordError("wrong_type", f"{name} must be an object, not {shown(part)}")
    fields = Fields(part, f"{name}.")
    kind = fields.text("type")
    if kind != "text":
        raise RecordError("unsupported_field", f"{name}.type {shown(kind)} is not supported (only text is)")
    text = valid_text(fields.take("text"), f"{name}.text")
    fields.refuse_rest()
    return text


def _take_max_tokens(fields: Fields, *, batch: bool) -> int | None:
    max_tokens = fields.integer("max_tokens", 1, MAX_NEW_TOKENS)
    if not batch:
        return max_tokens
    newer = fields.integer("max_completion_tokens", 1, MAX_NEW_TOKENS)
    if None not in (max_tokens, newer) and max_tokens != newer:
        message = f"{fields.where}max_tokens and max_completion_tokens differ"
        raise RecordError("conflicting_fields", message)
    return max_tokens if newer is None else newer


def _take_sampling(fields: Fields, defaults: Defaults) -> tuple[Sampling, bool]:
    """How the record is sampled, and whether it gave a seed itself."""
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1, open_below=True)
    top_k = fields.integer("top_k", 0, MAX_TOP_K)
    seed = fields.integer("seed", 0, MAX_SEED)
    if temperature is None:
        temperature = defaults.temperature
    given = seed is not None
    if seed is None:
        seed = defaults.draw_seed() if temperature > 0 else 0
    sampling = Sampling(
        temperature=temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=defaults.top_k if top_k is None else top_k,
        seed=seed,
    )
    return sampling, given


def _take_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    name = f"{fields.where}stop"
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise RecordError("wrong_type", f"{name} must be a string or a list of strings, not {shown(value)}")
    if len(strings) > MAX_STOPS:
        raise RecordError("out_of_range", f"{name} may list {MAX_STOPS} strings, not {len(strings)}")
    stops = tuple(valid_text(string, name) for string in strings)
    if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise RecordError("out_of_range", f"a string of {name} must have 1 to {MAX_STOP_LENGTH} characters")
    return stops
