"""Speculation from drafter to answers, on real stages: no token is another one for it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import cluster_of, run, run_model, serve
from oracle import Oracle
from remote_helpers import at_stage
from speculative_helpers import (
    ALL,
    BATCH,
    FACTORS,
    SLOT,
    WARM,
    References,
    Setting,
    check,
    covering,
    layout,
    sampling_of,
    the_drafter,
    tokens_of,
)

from bbquic.draft.drafter import Ask
from bbquic.draft.tree import DraftTree
from bbquic.model.sampling import Sampling
from bbquic.runtime.generate import deployed
from bbquic.runtime.remote import RemoteCoordinator
from bbquic.runtime.request import Completion, Outcome, Request
from bbquic.runtime.scheduler import SchedulerOptions
from bbquic.units import Seconds

END = 2  # of the tiny model

RECORDS: list[dict[str, Any]] = [
    *({"prompt": f"the of {n}", "max_tokens": 20} for n in range(3)),
    {"prompt": "a b a b a b a b a b a b", "max_tokens": 12},
    {"prompt": "and to in " * 5, "max_tokens": 17},
    {"prompt": "of", "max_tokens": 1},
    {"prompt": "is it as", "max_tokens": 25},
]


@pytest.fixture(scope="module")
def references(model: Path) -> References:
    """What is answered without speculation, by temperature and line: greedy by transformers, else by us."""
    oracle, found = Oracle(model), dict[int, list[int]]()
    for line, record in enumerate(RECORDS, 1):
        found[line] = oracle.generate(oracle.prompt(record), record["max_tokens"])
    sampled: dict[int, list[int]] = {}

    async def main() -> None:
        async with cluster_of([model]) as cluster:
            how = partial(sampling_of, WARM)
            answers, _ = await serve(cluster, model, RECORDS, layout(1, 1, 0.0), sampling=how)
            sampled.update({line: tokens_of(one, END) for line, one in answers.items()})

    run(main)
    assert any(END in one for one in (*found.values(), *sampled.values())), "an answer ends by itself"
    return {0.0: found, WARM: sampled}


def test_tokens_with_speculation_are_those_without_for_each_pair_of_settings(
    model: Path, references: References
) -> None:
    async def main() -> None:
        async with cluster_of([model] * 3) as cluster:
            assert await check(cluster, model, RECORDS, covering(ALL), references) > 100

    run(main)


def test_a_stop_string_within_a_tree_ends_the_answer_there(model: Path, references: References) -> None:
    """The stop strings are of letters from the middle of answers, so that most are completed by a guess."""
    tokenizer = run_model(model).directory.tokenizer
    said = references[0.0]
    texts = {line: tokenizer.decode([token for token in said[line] if token != END]) for line in said}
    stops = {line: text[len(text) // 2 :][:3] for line, text in texts.items() if len(text) > 8}
    assert len(stops) > 3
    records = [record | {"stop": (stops.get(line, "-"),)} for line, record in enumerate(RECORDS, 1)]
    prompts = {line: len(tokenizer.encode(record["prompt"])) for line, record in enumerate(RECORDS, 1)}
    one = Setting("liar", 16, True, 2, 2, 0.0, 0.0)

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            how, drafter = layout(2, 2, 0.0), the_drafter(one, prompts, said)
            alone, _ = await serve(cluster, model, records, how)
            came, _ = await serve(cluster, model, records, how, drafter=drafter, guesses=16, kept_guesses=9)
            assert came == alone
            for line, stop in stops.items():
                assert alone[line].text == texts[line][: texts[line].index(stop)]

    run(main)


class Breaks:
    """A drafter beside the loop that waits for ever, or until it may break."""

    name = "one who breaks"
    is_instant = False

    def __init__(self) -> None:
        self.may = threading.Event()

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        assert self.may.wait(60)
        raise RuntimeError("it broke")

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None: ...
    def forget(self, key: int) -> None: ...


@pytest.mark.parametrize(("breaks", "why"), [(True, "it broke"), (False, "it took longer than 0 s")])
def test_a_drafter_that_breaks_or_hangs_costs_the_job_nothing_but_its_guesses(
    model: Path, references: References, breaks: bool, why: str
) -> None:
    drafter = Breaks()

    async def main() -> None:
        how = layout(2, 2, 0.0)
        if breaks:
            drafter.may.set()
        else:
            how = replace(how, coordinator=replace(how.coordinator, draft=Seconds(0.01)))
        async with cluster_of([model] * 2) as cluster:
            came, scheduler = await serve(cluster, model, RECORDS, how, drafter=drafter, guesses=4)
        assert {line: tokens_of(one, END) for line, one in came.items()} == references[0.0]
        assert f"one who breaks drafts no more: {why}" in scheduler.decisions()

    run(main)
    drafter.may.set()


def test_a_coordinator_on_a_node_drafts_by_n_grams(model: Path, references: References) -> None:
    tokenizer, ends = run_model(model).directory.tokenizer, run_model(model).directory.eos
    outcomes: list[Outcome] = []
    steps: list[int] = []

    async def requests() -> AsyncIterator[Request]:
        for line, record in enumerate(RECORDS, 1):
            tokens = tuple(tokenizer.encode(record["prompt"]))
            yield Request(line, tokens, record["max_tokens"], Sampling())

    async def keep(group: Sequence[Outcome]) -> None:
        outcomes.extend(group)

    async def main(guesses: int) -> None:
        how = at_stage(batch=BATCH, micro_batches=2, kv_tokens=BATCH * 2 * SLOT)
        async with (
            cluster_of([model] * 2) as cluster,
            deployed(cluster.command, cluster.places(), run_model(model), how, lambda _: None) as ready,
        ):
            work = SchedulerOptions(
                2, BATCH, ready.plan.tiers, most_guesses=guesses, kept_guesses=8, always_guesses=True
            )
            loop = RemoteCoordinator(
                ready.links, ready.plan, work, ends=ends, drafter="n-grams" if guesses else ""
            )
            await loop.run(requests(), keep)
            steps.append(loop.statistics().sums.steps)

    for guesses in (0, 16):
        run(partial(main, guesses))
    assert steps[1] < steps[0], "some guesses were right"
    came = {one.line: tokens_of(one, END) for one in outcomes if isinstance(one, Completion)}
    assert came == references[0.0]
    assert len(outcomes) == 2 * len(came)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", FACTORS[0])
@pytest.mark.parametrize("guesses", FACTORS[1])
def test_tokens_with_speculation_are_those_without_for_all_settings(
    model: Path, references: References, drafter: str, guesses: int
) -> None:
    chosen = [one for one in ALL if (one.drafter, one.guesses) == (drafter, guesses)]

    async def main() -> None:
        async with cluster_of([model] * 3) as cluster:
            await check(cluster, model, RECORDS, chosen, references)

    run(main)
