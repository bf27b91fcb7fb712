"""Renders messages to the text a chat model was trained on, by the template that comes with the model.

The template is a program from strangers: it runs in jinja2's sandbox, over plain data, with the options
and functions that transformers gives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bbquic.errors import ModelError, RecordError

MAX_TEMPLATE = 1 << 20  # characters; the longest published have some tens of thousands


class ChatTemplate:
    """A compiled template. `tokens` are its variables bos_token, eos_token and so on.

    Raises: ModelError on a template that is not jinja2, or longer than MAX_TEMPLATE.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE:
            raise ModelError(f"the chat template has {len(source)} characters; {MAX_TEMPLATE} are allowed")
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for an answer to `messages`, which are plain JSON data.

        Raises: RecordError where the template refuses these messages (roles that do not alternate, say).
        """
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=given, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RecordError("chat_template", f"the chat template refuses the messages: {error}") from error


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are words as any."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
