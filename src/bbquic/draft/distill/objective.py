"""What is learnt: to say what the target would, with the same probabilities; and how well it is learnt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from bbquic.draft.distill.student import Student
from bbquic.draft.distill.teacher import Lesson

COMMON = 4096  # tokens of the vocabulary that each step looks at, the most frequent ones
DRAWN = 2048  # of the others, drawn anew for each step
OF_GIVEN = 0.3  # what a token of a prompt or a text counts beside one that the target said


@dataclass(frozen=True, slots=True)
class Batch:
    """Lessons side by side: tokens [B, T], hidden [B, T, D], weights [B, T], 0 where a row has ended."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, lessons: Sequence[Lesson]) -> Batch:
        longest = max(len(one.tokens) for one in lessons)
        tokens = torch.zeros(len(lessons), longest, dtype=torch.int64)
        hidden = torch.zeros(len(lessons), longest, lessons[0].hidden.shape[1])
        weights = torch.zeros(len(lessons), longest)
        for row, one in enumerate(lessons):
            count = len(one.tokens)
            tokens[row, :count] = one.tokens
            hidden[row, :count] = one.hidden
            weights[row, :count] = OF_GIVEN
            if one.answer < count:
                weights[row, one.answer - 1 : count] = 1.0
        return cls(tokens, hidden, weights)


@dataclass(frozen=True, slots=True)
class Words:
    """Tokens [K] that a step's probabilities are of, and what is added to their logits [K].

    Of those that were drawn each stands for all that were not: log(not drawn before / drawn) is added, which
    makes the sum of exponentials right on the average (as a sampled softmax does).
    """

    ids: torch.Tensor
    extra: torch.Tensor

    @classmethod
    def draw(cls, tokens: torch.Tensor, common: torch.Tensor, count: int, seed: int) -> Words:
        """Those of a batch's `tokens`, the `common` ones and `DRAWN` of the rest of `count` tokens."""
        always = torch.unique(torch.cat([tokens.flatten(), common]))
        rest = torch.ones(count, dtype=torch.bool)
        rest[always] = False
        others = rest.nonzero()[:, 0]
        if not len(others):
            return cls(always, torch.zeros(len(always)))
        generator = torch.Generator().manual_seed(seed)
        drawn = others[torch.randperm(len(others), generator=generator)[:DRAWN]]
        extra = torch.zeros(len(always) + len(drawn))
        extra[len(always) :] = torch.log(torch.tensor(len(others) / len(drawn)))
        return cls(torch.cat([always, drawn]), extra)


def loss(student: Student, batch: Batch, words: Words) -> torch.Tensor:
    """KL(target ‖ draft) in nats a token, over `words`, weighted by the batch's weights."""
    kept = batch.weights > 0
    head = student.head[words.ids]  # [K, D]
    with torch.no_grad():
        known = torch.nn.functional.linear(student.target_norm(batch.hidden[kept]), head)
        target = torch.log_softmax(known.float() + words.extra, -1)  # [S, K]
    said = torch.nn.functional.linear(student(batch.tokens)[kept], head)
    draft = torch.log_softmax(said.float() + words.extra, -1)
    each = (target.exp() * (target - draft)).sum(-1)
    weights = batch.weights[kept]
    return (each * weights).sum() / weights.sum()


def common_tokens(texts: Iterable[torch.Tensor], vocabulary: int) -> torch.Tensor:
    """The `COMMON` most frequent tokens of texts [T], of equal ones the lower."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for one in texts:
        counts += torch.bincount(one.long(), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:COMMON]


@dataclass(frozen=True, slots=True)
class Score:
    """How often a draft has the target's next token first, and among its first four; and tokens per pass of
    a chain of three guesses, counted along the target's answers."""

    first: float
    first_four: float
    chain_of_three: float
    tokens: int


@torch.no_grad()
def score(student: Student, lessons: Sequence[Lesson]) -> Score | None:
    """Over the answers of some lessons; None where none has one."""
    firsts, fours, tokens, passes = 0, 0, 0, 0
    for one in lessons:
        said = one.tokens[one.answer :].long()
        if not len(said):
            continue
        hidden = student(one.tokens.long()[None])[0, one.answer - 1 : -1]
        best = torch.nn.functional.linear(hidden, student.head).topk(4).indices
        right = best == said[:, None]
        firsts += int(right[:, 0].sum())
        fours += int(right.any(-1).sum())
        tokens += len(said)
        passes += chain_passes(right[:, 0].tolist(), 3)
    return Score(firsts / tokens, fours / tokens, tokens / passes, tokens) if tokens else None


def chain_passes(right: Sequence[bool], guesses: int) -> int:
    """Passes that an answer takes with chains of guesses, `right` saying of each token whether the draft has
    it first."""
    place, passes = 0, 0
    while place < len(right):
        ahead = 0
        while ahead < guesses and place + ahead < len(right) and right[place + ahead]:
            ahead += 1
        place += ahead + 1
        passes += 1
    return passes
