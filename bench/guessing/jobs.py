"""Jobs on real nodes: prompts whose answers are new text, and prompts whose answers quote them; by what pays
against without guesses, at 125 Mbit/s and 100 ms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from bbquic.model.directory import ModelDirectory
from bench.common import ROOT, median
from bench.guessing.home import Mode, Told, Work
from bench.guessing.nodes import RealNodes

Kind = Literal["ordinary", "quoting"]
RATE, ROUND_TRIP, BATCH = 125.0, 100.0, 4  # Mbit/s, ms, rows
ANSWER = 96  # tokens at most
PROMPTS = 8  # of a job
QUICK, QUICK_ROUND_TRIP = 2, 5.0  # prompts, ms: so that it is over soon


@cache
def prompts(directory: ModelDirectory, kind: Kind) -> tuple[tuple[int, ...], ...]:
    """`bench/data/KIND_prompts.jsonl` in tokens, each as a chat of one message."""
    lines = (ROOT / "data" / f"{kind}_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(directory.tokenizer.encode_chat(json.loads(line)["messages"])) for line in lines)


def job(directory: ModelDirectory, kind: Kind, mode: Mode, *, quick: bool) -> Work:
    """The gain's. Micro-batches are as many as pay, with and without guesses."""
    chosen = prompts(directory, kind)[: QUICK if quick else PROMPTS]
    return Work(chosen, 3 if quick else ANSWER, len(chosen) if quick else BATCH, mode)


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens/s by what pays over those without guesses, round by round; the last round's decisions."""

    ratios: tuple[float, ...]
    off: tuple[float, ...]  # tokens/s
    committed: float  # tokens a row and pass of the last round
    decisions: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def sureness(self) -> float:
        """That the true median lies between the least and the largest ratio: each is on either side of it
        with probability ½."""
        return 1 - 2.0 ** (1 - len(self.ratios))

    def __str__(self) -> str:
        return (
            f"x{self.ratio:.3f} ({min(self.ratios):.3f} to {max(self.ratios):.3f} with {self.sureness:.1%}) "
            f"of {median(self.off):.1f} tok/s without, {self.committed:.2f} tokens a pass"
        )


def gain(nodes: RealNodes, directory: ModelDirectory, kind: Kind, rounds: int, *, quick: bool) -> Gain:
    """Rounds of both, the first of each round in turn. Raises: AssertionError where a token differs."""
    nodes.at(RATE, QUICK_ROUND_TRIP if quick else ROUND_TRIP)
    found: dict[Mode, list[Told]] = {"off": [], "auto": []}
    for number in range(rounds):
        modes: Sequence[Mode] = ("off", "auto") if number % 2 == 0 else ("auto", "off")
        for mode in modes:
            found[mode].append(nodes.run(job(directory, kind, mode, quick=quick)))
        check_same_job(found["off"][-1], found["auto"][-1])
    ratios = tuple(auto.rate / off.rate for off, auto in zip(found["off"], found["auto"], strict=True))
    last = found["auto"][-1]
    committed = last.drafts.tokens_a_pass or 1.0
    return Gain(ratios, tuple(off.rate for off in found["off"]), committed, last.decisions)


def check_equal(one: Told, other: Told) -> None:
    """Answers are the same as far as both go. Raises: AssertionError naming the first line that is not."""
    for number, (line, same) in enumerate(zip(one.lines, other.lines, strict=True), 1):
        common = min(len(line.tokens), len(same.tokens))
        assert line.tokens[:common] == same.tokens[:common], f"line {number}: guesses change a token"


def check_same_job(one: Told, other: Told) -> None:
    """Raises: AssertionError where answers differ, or one of them is longer."""
    check_equal(one, other)
    for number, (line, same) in enumerate(zip(one.lines, other.lines, strict=True), 1):
        assert len(line.tokens) == len(same.tokens), f"line {number}: guesses change where an answer ends"
