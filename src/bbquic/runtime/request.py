"""What one record asks for, and what became of it: an answer in tokens and in text, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bbquic.model.sampling import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """A record ready to be generated: its prompt in tokens, never empty, and within the context."""

    line: int  # 1-based line of the job file
    tokens: tuple[int, ...]
    max_tokens: int  # >= 1; prompt and answer together are within the model's context
    sampling: Sampling
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A request's answer. `tokens` excludes the end token; `text` excludes the stop string."""

    line: int
    tokens: tuple[int, ...]
    text: str
    generated: int  # tokens the model produced, the end token included
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """A request that turned out to be impossible: an error record, with its code."""

    line: int
    code: str
    message: str


Outcome = Completion | Unanswerable
