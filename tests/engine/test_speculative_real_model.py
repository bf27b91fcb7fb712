"""Speculation on the real model: tokens are those without it, for each pair of settings."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from engine_helpers import cluster_of, run, serve
from oracle import Oracle
from speculative_helpers import ALL, WARM, References, check, covering, layout, sampling_of, tokens_of

from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

RECORDS: list[dict[str, Any]] = [
    {"prompt": "Say it again: one, two, three, four. One, two, three,", "max_tokens": 12},
    {"prompt": "Question: What is the capital of France?\nAnswer:", "max_tokens": 10},
    {"prompt": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n", "max_tokens": 12},
    {"prompt": "Once", "max_tokens": 7},
]


@pytest.fixture(scope="module")
def real() -> ModelDirectory:
    return fetch_model("smollm2-135m", user_cache(), print)


@pytest.fixture(scope="module")
def references(real: ModelDirectory) -> References:
    """What is answered without speculation, by temperature and line: greedy by transformers, else by us."""
    oracle, sampled = Oracle(real.path), dict[int, list[int]]()
    greedy = {
        line: oracle.generate(oracle.prompt(record), record["max_tokens"])
        for line, record in enumerate(RECORDS, 1)
    }

    async def main() -> None:
        async with cluster_of([real.path]) as cluster:
            how = partial(sampling_of, WARM)
            answers, _ = await serve(cluster, real.path, RECORDS, layout(1, 1, 0.0), sampling=how)
            sampled.update({line: tokens_of(one, min(real.eos)) for line, one in answers.items()})

    run(main)
    return {0.0: greedy, WARM: sampled}


def test_tokens_of_the_real_model_are_those_without_speculation_for_each_pair_of_settings(
    real: ModelDirectory, references: References
) -> None:
    """Settings are put in an order in which nodes seldom load other blocks."""
    chosen = sorted(covering(ALL), key=lambda one: one.nodes)

    async def main() -> None:
        async with cluster_of([real.path] * 3) as cluster:
            assert await check(cluster, real.path, RECORDS, chosen, references) > 50

    run(main)
