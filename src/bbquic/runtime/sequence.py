"""One request on its way: what is computed of it, what it has answered, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bbquic.runtime.request import Completion, FinishReason, Request


class TextStream(Protocol):
    """Turns tokens into text as they come (`model.tokenizer.StreamDecoder`)."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Sequence:
    """A request in a slot. Its next row begins at `computed`; while that is inside the prompt, it reads."""

    def __init__(self, request: Request, *, ends: frozenset[int], text: TextStream) -> None:
        """`ends` is the model's set of end tokens; `text` decodes the answer's tokens."""
        self.request = request
        self.computed = 0  # tokens that are, or are on their way to be, in the KV store
        self.generated: list[int] = []
        self._ends = ends
        self._stream = text
        self._text = ""
        self._finish: FinishReason | None = None

    @property
    def need(self) -> int:
        """Cells a slot must have for this sequence, whatever it answers."""
        return len(self.request.tokens) + self.request.max_tokens

    @property
    def unread(self) -> int:
        """Prompt tokens that no row has carried yet."""
        return max(0, len(self.request.tokens) - self.computed)

    def next_tokens(self, budget: int) -> tuple[int, ...]:
        """Tokens of the next row: up to `budget` of the prompt, or the last generated one."""
        if self.unread:
            return self.request.tokens[self.computed : self.computed + budget]
        return (self.generated[-1],)

    def push(self, token: int) -> FinishReason | None:
        """Take the next token of the answer; says whether, and why, the answer ends with it."""
        self.generated.append(token)
        if token in self._ends:
            self._finish = "stop"
        else:
            self._text += self._stream.push(token)
            if len(self.generated) >= self.request.max_tokens:
                self._finish = "length"
        if self._finish is not None:
            self._text += self._stream.finish()
        if self._cut_at_stop():
            self._finish = "stop"
        return self._finish

    def _cut_at_stop(self) -> bool:
        """Whether a stop string has appeared; the text then ends before the earliest one."""
        places = [place for stop in self.request.stop if (place := self._text.find(stop)) >= 0]
        if places:
            self._text = self._text[: min(places)]
        return bool(places)

    def completion(self) -> Completion:
        """The answer. Only after `push` said that it ended."""
        assert self._finish is not None
        ended = self.generated[-1] in self._ends
        return Completion(
            line=self.request.line,
            tokens=tuple(self.generated[:-1] if ended else self.generated),
            text=self._text,
            generated=len(self.generated),
            finish_reason=self._finish,
        )


TextStreamFactory = Callable[[], TextStream]
