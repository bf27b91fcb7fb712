"""Runs whose first stage prunes trees by a pruner: no token is another one for it, whatever it thinks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_helpers import cluster_of, options, run, run_model, serve
from safetensors.torch import save
from speculative_helpers import Setting, layout, sampling_of, the_drafter, tokens_of

from bbquic.draft.pruner_file import NAME
from bbquic.errors import PlanRefused
from bbquic.runtime.cluster import StageLink, deploy, describe_all, new_job_id
from bbquic.runtime.layout import for_stage, make_plan
from bbquic.runtime.protocol import WirePruner
from bbquic.runtime.pruner_choice import PruneOptions
from bbquic.runtime.scheduler import Scheduler
from pruners import random_file, random_tensors

END = 2  # of the tiny model
RECORDS: list[dict[str, Any]] = [
    *({"prompt": f"the of {n}", "max_tokens": 18} for n in range(3)),
    {"prompt": "a b a b a b a b a b a b", "max_tokens": 12},
    {"prompt": "of", "max_tokens": 1},
]


def dropped(scheduler: Scheduler) -> float:
    """The share of its guesses that went no further than the first stage."""
    words = [one for one in scheduler.decisions() if "the first stage dropped" in one]
    return float(words[0].split()[-1].rstrip("%")) / 100 if words else 0.0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_with_a_pruner_are_those_without_whatever_the_threshold(
    model: Path, tmp_path: Path, temperature: float
) -> None:
    manifest = run_model(model).manifest
    random_file(tmp_path / NAME, manifest, range(1, 4))
    how, tokenizer = partial(sampling_of, temperature), run_model(model).directory.tokenizer
    prompts = {line: len(tokenizer.encode(one["prompt"])) for line, one in enumerate(RECORDS, 1)}
    shares: list[float] = []

    async def main() -> None:
        async with cluster_of([model] * 3) as cluster:
            alone, _ = await serve(cluster, model, RECORDS, layout(1, 1, 0.0), sampling=how, nodes=1)
            said = {line: tokens_of(one, END) for line, one in alone.items()}
            for nodes, micro_batches, threshold, kept in (
                (2, 2, 0.0, None),
                (3, 1, 0.2, 9),
                (2, 4, 0.7, None),
            ):
                one = Setting("liar", 12, kept is not None, nodes, micro_batches, 0.0, temperature)
                pruning = PruneOptions(tmp_path / NAME, threshold)
                came, scheduler = await serve(
                    cluster,
                    model,
                    RECORDS,
                    replace(layout(nodes, micro_batches, 0.0), pruning=pruning),
                    drafter=the_drafter(one, prompts, said),
                    guesses=12,
                    kept_guesses=kept,
                    sampling=how,
                    nodes=nodes,
                )
                assert came == alone, one
                assert not any("drafts no more" in words for words in scheduler.decisions())
                shares.append(dropped(scheduler))

    run(main)
    assert shares[0] == 0, "every score is at least 0"
    assert shares[0] < shares[1] < shares[2] < 1, shares


def test_a_node_refuses_a_pruner_that_is_none_or_anothers_and_serves_the_next_plan(model: Path) -> None:
    held, how = run_model(model), options()
    embedding = held.manifest.tensors["model.embed_tokens.weight"].sha256
    good = save(random_tensors(1))
    cases = (
        (WirePruner(b"no tensors at all", embedding, 0.5), "is not safetensors"),
        (WirePruner(good, "0" * 64, 0.5), "is not of tiny"),
        (WirePruner(good, embedding, 0.5), None),
    )

    async def main() -> None:
        async with cluster_of([model] * 2) as cluster:
            channels = [await cluster.command.connect(peer) for peer in cluster.places()]
            nodes = await describe_all(channels, how.deadlines)
            for pruner, why in cases:
                plan = make_plan(new_job_id(), held.directory, held.manifest, nodes, how.layout)
                plan = msgspec.structs.replace(plan, pruner=pruner)
                links = [StageLink(*pair) for pair in zip(plan.stages, channels, strict=True)]
                plans = [for_stage(plan, stage, held.directory) for stage in plan.stages]
                with pytest.raises(PlanRefused, match=why) if why else nullcontext():
                    await deploy(links, plans, how.deadlines, lambda _: None)

    run(main)
