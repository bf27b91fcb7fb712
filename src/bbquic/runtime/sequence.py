"""One request on its way: what is computed of it, what it has answered, and when it ends."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import cached_property
from typing import Protocol

from bbquic.draft.tree import DraftTree
from bbquic.runtime.request import Completion, FinishReason, Request


class TextStream(Protocol):
    """Turns tokens into text as they come (`model.tokenizer.StreamDecoder`)."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Sequence:
    """A request and its answer so far. Its next row begins at `computed`.

    It reads while more than its newest token is still to be stored, and decodes afterwards. Its KV can be
    dropped at any time: it then reads prompt and answer again, and goes on where it was.
    """

    def __init__(self, request: Request, *, ends: frozenset[int], text: TextStream) -> None:
        """`ends` is the model's set of end tokens; `text` decodes the answer's tokens."""
        self.request = request
        self.computed = 0  # tokens that are, or are on their way to be, in the KV store
        self.generated: list[int] = []
        self.room = 0  # cells that its slot has beyond what it needs, for drafts; 0: none are made for it
        self.draft: DraftTree | None = None  # behind its newest token, for its next row
        self.losses = 0  # packs with rows of it that a stage lost, by its doing perhaps
        self._carried = 0  # tokens of the prompt that were ever in a row, or shared
        self._ends = ends
        self._stream = text
        self._text = ""
        self._finish: FinishReason | None = None

    @property
    def need(self) -> int:
        """Cells a slot must have for this sequence, whatever it answers and whatever is drafted for it."""
        return len(self.request.tokens) + self.request.max_tokens + self.room

    @property
    def key(self) -> int:
        """Of this sequence alone, as long as the job lasts."""
        return self.request.line

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.tokens) + len(self.generated)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.tokens, *self.generated)

    @property
    def left(self) -> int:
        """Tokens that the answer may still have."""
        return self.request.max_tokens - len(self.generated)

    @cached_property
    def prompt(self) -> bytes:
        """The prompt's tokens as int32: bytes are compared at once."""
        return array("i", self.request.tokens).tobytes()

    @property
    def unread(self) -> int:
        """Tokens that no row has carried since the sequence took its slot; 0: its next one is on its way."""
        return self.length - self.computed

    @property
    def has_read(self) -> bool:
        """Whether all but its newest token are in rows, and that one is part of the answer."""
        return bool(self.generated) and self.unread <= 1

    @property
    def reads(self) -> bool:
        """Whether its next row is, or begins with, what a newcomer to its slot has to read."""
        return self.unread > 0 and not self.has_read

    @property
    def decodes(self) -> bool:
        """Whether its newest token is back and all but that one are stored on every stage."""
        return self.unread == 1 and self.has_read

    def next_row(self, budget: int) -> tuple[tuple[int, ...], int]:
        """The tokens of the next row, `budget` at most, which then count as computed; and how many of them
        are of the prompt and go out for the first time."""
        first, prompt = self.computed, self.request.tokens
        stop = first + min(budget, self.unread)
        row = prompt[first:stop] + tuple(
            self.generated[max(0, first - len(prompt)) : max(0, stop - len(prompt))]
        )
        self.computed = stop
        before, self._carried = self._carried, max(self._carried, min(stop, len(prompt)))
        return row, self._carried - before

    def skip(self, count: int) -> int:
        """Let its first `count` tokens count as computed: another slot has them. How many of them are of the
        prompt and were in no row yet."""
        self.computed = count
        before, self._carried = self._carried, max(self._carried, min(count, len(self.request.tokens)))
        return self._carried - before

    def forget(self) -> None:
        """Its KV is gone: the next row begins with the prompt's first token."""
        self.computed, self.draft = 0, None

    @property
    def has_ended(self) -> bool:
        return self._finish is not None

    def take(self, tokens: Items[int]) -> int:
        """Take what was chosen behind the newest row: a token, or one for each node of a path, all but the
        last of which are stored then. How many of them the answer has: it may end before the others."""
        before = len(self.generated)
        for token in tokens:
            if self.push(token) is not None:
                break
        count = len(self.generated) - before
        self.computed += count - 1
        return count

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
