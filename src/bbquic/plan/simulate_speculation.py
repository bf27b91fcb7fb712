"""Micro-batches that guess, simulated over a measured pipeline: what rules for guessing are tried on. Pure.

Each resource serves first in, first out (Lindley's recursion, as `line` has it). Which guesses are right is
drawn; a pass counts for the tokens that it commits on average, so that runs differ by their decisions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import Protocol

from bbquic.plan.acceptance import Outcome
from bbquic.plan.controller import NOTHING, Line, Measured
from bbquic.plan.speculation import Trees, with_trees
from bbquic.units import Seconds

Truth = Callable[[float], Sequence[float]]  # P(right) by rank, when a share of the job is done


class Rule(Protocol):
    """`Speculator`, or what stands in for it."""

    def guesses(self, micro_batch: int, rows: int) -> int: ...

    def saw(self, outcome: Outcome) -> None: ...

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always as many."""

    count: int

    def guesses(self, micro_batch: int, rows: int) -> int:
        return self.count

    def saw(self, outcome: Outcome) -> None:
        """It makes no difference."""

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None:
        """It makes no difference."""


@dataclass(frozen=True, slots=True)
class Played:
    """The job: `tokens` a row, in `count` micro-batches of `rows`. A guess of rank r is right with the
    probability `truth(share done)[r - 1]`, and right only where those of lower rank are: a chain."""

    measured: Measured
    count: int
    rows: int
    tokens: float
    truth: Truth
    drafting: Line = NOTHING


def fixed_time(job: Played, guesses: int, parts: int = 1) -> Seconds:
    """The same for always as many guesses, by the formula; a job whose truth changes at its equal `parts`."""
    times = _times(job, guesses)
    step = max(job.count * max(times), sum(times) + job.measured.latency)
    shares = [1 + sum(job.truth((part + 0.5) / parts)[:guesses]) for part in range(parts)]
    return Seconds(sum(job.tokens / parts / committed * step for committed in shares))


def simulate_guessing(job: Played, rule: Rule, seed: int = 0) -> Seconds:
    """Until all tokens are there, whoever has them: rows that end are replaced."""
    random, times = Random(seed), dict[int, list[float]]()
    free = [0.0] * len(_times(job, 0))
    flying: list[tuple[float, int, int]] = []  # back, micro-batch, guesses
    now, done, whole = 0.0, 0.0, job.tokens * job.count

    def send(number: int) -> None:
        guesses = rule.guesses(number, job.rows)
        if guesses not in times:
            times[guesses] = _times(job, guesses)
        at = now
        for place, service in enumerate(times[guesses]):
            free[place] = at = max(at, free[place]) + service
        heappush(flying, (at + job.measured.latency, number, guesses))

    for number in range(job.count):
        send(number)
    while done < whole:
        now, number, guesses = heappop(flying)
        chances = job.truth(done / whole)[:guesses]
        _tell(rule, random, number, job.rows, chances)
        done += 1 + sum(chances)
        send(number)
    return Seconds(now)


def _times(job: Played, guesses: int) -> list[float]:
    trees = Trees(guesses, guesses, drafting=job.drafting.by(guesses) if guesses else NOTHING)
    pipeline = with_trees(job.measured, trees)
    lanes = [took for stage in pipeline.stages for took in stage.times(job.rows)]
    return [pipeline.drafting(job.rows) if guesses else 0.0, *lanes]


def _tell(rule: Rule, random: Random, number: int, rows: int, chances: Sequence[float]) -> None:
    guesses = len(chances)
    counts = [_right(random, chances) for _ in range(rows)] if guesses else []
    for right in counts:
        rule.saw(Outcome.of_path(guesses, guesses, guesses, range(right + 1)))
    rule.noted(number, rows, guesses, rows + sum(counts))


def _right(random: Random, chances: Sequence[float]) -> int:
    draw = random.random()
    return next((rank for rank, chance in enumerate(chances) if draw >= chance), len(chances))


def chain(rate: float, most: int) -> Sequence[float]:
    """P(right) by rank where each guess is right with the same probability once the one before it is."""
    return tuple(accumulate([rate] * most, lambda before, each: before * each))
