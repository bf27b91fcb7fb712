"""A line's JSON object, taken apart field by field so that none is overlooked.

Whatever is still there when `refuse_rest` runs is a field we do not honour: unless it stands at the
value that changes nothing, the record is refused by name rather than answered as if it were absent.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import NoReturn

from bbquic.errors import RecordError

_SHOWN = 60  # characters of a user's value that a message repeats

# Fields of OpenAI's requests that we do not honour, with the values at which they ask for nothing.
# A null is always neutral for these.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),  # not 0: a completion's `logprobs: 0` asks for the chosen token's
    "metadata": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (False, True),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


def decode_object(raw: bytes) -> dict[str, object]:
    """The JSON object of a line: strict UTF-8, strict JSON, no key twice.

    Raises: RecordError with `invalid_utf8`, `invalid_json` or `wrong_type`.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("invalid_utf8", f"the line is not UTF-8 (byte {error.start + 1})") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        message = f"the line is not JSON: {error.msg} (column {error.colno})"
        raise RecordError("invalid_json", message) from None
    except ValueError:  # an integer of more digits than Python converts
        raise RecordError("invalid_json", "the line holds a number of too many digits") from None
    except RecursionError:
        raise RecordError("invalid_json", "the line's JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise RecordError("wrong_type", f"the line must be a JSON object, not {shown(value)}")
    return value


class Fields:
    """The members of one JSON object; each is taken once, and a null counts as not given.

    `where` is the object's place in the line ("body.", "messages[0]."), for messages.
    Every method raises RecordError: `wrong_type`, `out_of_range`, `invalid_utf8`.
    """

    def __init__(self, members: dict[str, object], where: str = "") -> None:
        self._members = dict(members)
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._members.get(name) is not None

    def take(self, name: str) -> object | None:
        return self._members.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is None:
            return None
        return valid_text(value, f"{self.where}{name}")

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self._wrong_type(name, value, "an integer")
        if not low <= value <= high:
            self._out_of_range(name, value, f"from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, *, open_below: bool = False) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._wrong_type(name, value, "a number")
        if not low <= value <= high or (open_below and value == low):
            bounds = f"above {low} and at most {high}" if open_below else f"from {low} to {high}"
            self._out_of_range(name, value, bounds)
        return float(value)

    def refuse_rest(self) -> None:
        """Raises: RecordError `unsupported_field` for the first field left that asks for something."""
        for name, value in self._members.items():
            if name not in _NEUTRAL:
                raise RecordError("unsupported_field", f"unknown field {shown(self.where + name)}")
            neutral = _NEUTRAL[name]
            if value is not None and not any(_same(value, nothing) for nothing in neutral):
                allowed = " or ".join(json.dumps(nothing) for nothing in (*neutral, None))
                raise RecordError(
                    "unsupported_field", f"{self.where}{name} is not supported (leave it out, or {allowed})"
                )

    def _wrong_type(self, name: str, value: object, wanted: str) -> NoReturn:
        raise RecordError("wrong_type", f"{self.where}{name} must be {wanted}, not {shown(value)}")

    def _out_of_range(self, name: str, value: object, bounds: str) -> NoReturn:
        raise RecordError("out_of_range", f"{self.where}{name} must be {bounds}, not {shown(value)}")


def valid_text(value: object, name: str) -> str:
    """`value` as a string that has a UTF-8 form. Raises: RecordError `wrong_type`, `invalid_utf8`."""
    if not isinstance(value, str):
        raise RecordError("wrong_type", f"{name} must be a string, not {shown(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"{name} holds half of a surrogate pair (character {error.start + 1})"
            raise RecordError("invalid_utf8", message) from None
    return value


def shown(value: object) -> str:
    """A user's value as a message may repeat it: JSON, ASCII and short."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list" if value else "[]"
    if isinstance(value, dict):
        return "an object" if value else "{}"
    if isinstance(value, str):
        value = value[: _SHOWN + 1]
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise RecordError("invalid_json", f"the key {shown(twice)} stands twice in one object")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError("invalid_json", f"{name} is not JSON")


def _same(value: object, nothing: object) -> bool:
    return isinstance(value, bool) == isinstance(nothing, bool) and value == nothing
