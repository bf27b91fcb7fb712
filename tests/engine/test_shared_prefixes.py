"""Prompts that begin alike, over real nodes: tokens equal transformers', and what they share is sent once."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import cluster_of, options, run, serve, until
from oracle import Oracle

from bbquic.runtime.coordinator import Coordinator
from bbquic.runtime.scheduler import Scheduler

SYSTEM = "the of and to in is that it was for on are with as his they be at one have this from or had " * 2
SHOTS = SYSTEM + "some what there we can out other were all your when up use word how said an each she "
RECORDS: list[dict[str, Any]] = [
    {
        "prompt": f"{(SHOTS, SYSTEM, SYSTEM, '')[n % 4]}{chr(97 + n)} {'they ' * (n % 5)}?",
        "max_tokens": 4 + n % 9,
    }
    for n in range(16)
]


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    """What transformers generates for each prompt alone, without the end token."""
    answers = [oracle.generate(oracle.prompt(record), record["max_tokens"]) for record in RECORDS]
    return [[token for token in tokens if token not in oracle.ends] for tokens in answers]


def prompt_tokens(oracle: Oracle, *, shares: bool) -> int:
    """That are to be sent: of each prompt what no earlier one begins with, too, from 32 tokens on."""
    total, earlier = 0, list[list[int]]()
    for prompt in map(oracle.prompt, RECORDS):
        pairs = (zip(prompt, other, strict=False) for other in earlier)
        common = max((next(n for n, (a, b) in enumerate(pair) if a != b) for pair in pairs), default=0)
        total += len(prompt) - (common if shares and common >= 32 else 0)
        earlier.append(prompt)
    return total


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("nodes", "micro_batches", "batch"), [(1, 1, 1), (2, 2, 8), (3, 3, 12)])
def test_shared_beginnings_are_computed_once_and_change_no_token(
    tiny: Path,
    oracle: Oracle,
    expected: list[list[int]],
    nodes: int,
    micro_batches: int,
    batch: int,
    shares: bool,
) -> None:
    async def main() -> None:
        async with cluster_of([tiny] * nodes, order=random.Random(nodes)) as cluster:
            how = options(micro_batches=micro_batches, batch=batch, prefill_tokens=24 if batch == 1 else 256)
            counted: list[Coordinator] = []

            async def note(coordinator: Coordinator, _: Scheduler) -> None:
                counted.append(coordinator)

            answers, scheduler = await serve(cluster, tiny, RECORDS, how, shares_prefixes=shares, during=note)
        assert [list(answers[line].tokens) for line in sorted(answers)] == expected
        counters = counted[0].counters
        assert counters.prompt_tokens == sum(len(oracle.prompt(record)) for record in RECORDS)
        assert counters.shared_tokens == scheduler.shared
        sent = counters.prompt_tokens - counters.shared_tokens
        if batch > 1 or not shares:
            assert sent == prompt_tokens(oracle, shares=shares)
        else:  # a prompt that shares nothing takes the place of the only copy
            assert prompt_tokens(oracle, shares=True) < sent < prompt_tokens(oracle, shares=False)

    run(main)


def has_steps(coordinator: Coordinator, count: int) -> bool:
    return coordinator.observer.sums.steps >= count


def test_a_leader_that_is_dropped_again_and_again_changes_no_token(
    tiny: Path, expected: list[list[int]]
) -> None:
    """In chunks of 8, so that it is dropped while others wait for what it reads."""

    async def disturb(coordinator: Coordinator, scheduler: Scheduler) -> None:
        rng = random.Random(5)
        for _ in range(40):
            await until(partial(has_steps, coordinator, coordinator.observer.sums.steps + 1))
            reading = [one.request.line for _, _, one in scheduler.seats() if one.computed > 0 and one.reads]
            if reading:
                coordinator.preempt(rng.choice(reading))

    async def main() -> None:
        async with cluster_of([tiny] * 2, order=random.Random(9)) as cluster:
            how = options(micro_batches=2, batch=8, prefill_tokens=8)
            answers, scheduler = await serve(cluster, tiny, RECORDS, how, during=disturb)
        assert [list(answers[line].tokens) for line in sorted(answers)] == expected
        assert scheduler.preempted > 0
        assert scheduler.shared > 0

    run(main)
