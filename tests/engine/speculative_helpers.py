"""Settings of speculation, and runs in each of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine_helpers import Cluster, options, run_model, serve

from bbquic.draft.drafter import Ask, Drafter
from bbquic.draft.ngram import NgramDrafter
from bbquic.model.sampling import Sampling
from bbquic.runtime.generate import RunOptions
from bbquic.runtime.request import Completion
from random_drafter import RandomDrafter

BATCH, SLOT = 4, 176  # tokens: a record, and three trees of 33 nodes
WARM = 0.9  # a temperature
References = dict[float, dict[int, list[int]]]  # by temperature and line


@dataclass(frozen=True)
class Setting:
    """One cell of the factorial. `guesses` of 0: a chain of 4."""

    drafter: str
    guesses: int
    pruned: bool
    nodes: int
    micro_batches: int
    on_host: float  # α
    temperature: float


FACTORS = (
    ("n-grams", "liar", "liar beside"),
    (0, 4, 16, 32),
    (False, True),
    (1, 2, 3),
    (1, 2, 4),
    (0.0, 0.5),
    (0.0, WARM),
)
ALL = [Setting(*one) for one in itertools.product(*FACTORS)]


def covering(settings: Sequence[Setting]) -> list[Setting]:
    """Some of the settings, in which each pair of levels of two factors is."""
    left = {pair for one in settings for pair in pairs(one)}
    rng, found = random.Random(8), list[Setting]()
    while left:
        best = max(rng.sample(settings, 60), key=lambda one: len(pairs(one) & left))
        found.append(best)
        left -= pairs(best)
    return found


def pairs(one: Setting) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(astuple(one)), 2))


def the_drafter(one: Setting, prompts: dict[int, int], said: dict[int, list[int]]) -> Drafter:
    """n-grams, or one that knows what is `said` behind `prompts` tokens, by line, and lies at random."""
    if one.drafter == "n-grams":
        return NgramDrafter()

    def following(ask: Ask, path: tuple[int, ...]) -> int | None:
        """What the reference says there; nothing behind its end."""
        answer, reference = list(ask.tokens[prompts[ask.key] :]), said[ask.key]
        assert answer == reference[: len(answer)], "what is committed is right"
        place = len(answer) + len(path)
        return reference[place] if place < len(reference) else None

    rng = random.Random(str(one))
    is_instant, is_chain = one.drafter == "liar", one.guesses == 0
    return RandomDrafter(rng, following, range(3, 300), 0.8, is_instant, is_chain)


async def check(
    cluster: Cluster,
    model: Path,
    records: Sequence[dict[str, Any]],
    settings: Sequence[Setting],
    references: References,
) -> int:
    """Every answer of every setting is as expected; how many guesses were accepted."""
    directory, accepted = run_model(model).directory, 0
    prompts = {n: len(directory.tokenizer.encode(one["prompt"])) for n, one in enumerate(records, 1)}
    for one in settings:
        expected = references[one.temperature]
        drafter = the_drafter(one, prompts, expected)
        came, scheduler = await serve(
            cluster,
            model,
            records,
            layout(one.nodes, one.micro_batches, one.on_host),
            drafter=drafter,
            guesses=one.guesses or 4,
            kept_guesses=max(1, one.guesses // 2) if one.pruned else None,
            sampling=partial(sampling_of, one.temperature),
            nodes=one.nodes,
        )
        for line, reference in expected.items():
            said = [token for token in reference if token not in directory.eos]
            assert (list(came[line].tokens), came[line].generated) == (said, len(reference)), (one, line)
        assert not any("drafts no more" in words for words in scheduler.decisions())
        if isinstance(drafter, RandomDrafter):
            accepted += drafter.accepted
    return accepted


def layout(nodes: int, micro_batches: int, on_host: float) -> RunOptions:
    """Slots for the longest record with its trees; more of them than there are records."""
    offloaded = (round(BATCH * on_host),) * nodes
    return options(batch=BATCH, micro_batches=micro_batches, kv_tokens=BATCH * 2 * SLOT, offloaded=offloaded)


def sampling_of(temperature: float, line: int) -> Sampling:
    return Sampling(temperature, 0.95, 50, line) if temperature else Sampling()


def tokens_of(one: Completion, end: int) -> list[int]:
    """An answer's tokens, with `end` where an end token came."""
    return [*one.tokens, *([end] if one.generated > len(one.tokens) else [])]
