"""Whole runs over nodes in this process: tokens equal transformers', whatever the layout."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import answer, cluster_of, options, read_answers, run, serve, until, write_prompts
from oracle import Oracle

from bbquic.runtime.coordinator import Coordinator
from bbquic.runtime.scheduler import Scheduler
from paces import FixedPace, RandomPace
from tiny_model import make_tiny_llama

BLOCKS = 4
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "a", "max_tokens": 20},
    {"prompt": "the and of to in is that it was for on are with as his they", "max_tokens": 12},
    {"prompt": "some what there we can " * 14, "max_tokens": 30},
    {"messages": [{"role": "user", "content": "which one?"}], "max_tokens": 9},
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how"}]},
    {"prompt": "日本語 и русский 🙂", "max_tokens": 1},
    *({"prompt": f"word {'the of ' * (n % 7)}{n}", "max_tokens": 5 + 3 * (n % 11)} for n in range(14)),
]
SAMPLED: list[dict[str, Any]] = [
    {
        "prompt": f"all {n} were when",
        "max_tokens": 16,
        "temperature": 0.3 + n / 5,
        "top_p": 1 - n / 40,
        "top_k": 5 * (n % 4),
        "seed": 2**60 + n,
    }
    for n in range(8)
]


SHORT = [line for line, record in enumerate(PROMPTS, 1) if "max_tokens" in record][:12]  # 1-based


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", blocks=BLOCKS)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> dict[int, str]:
    """By line, what transformers generates for each prompt alone."""
    texts = {}
    for line, record in enumerate(PROMPTS, 1):
        tokens = oracle.generate(oracle.prompt(record), record.get("max_tokens", 256))
        texts[line] = oracle.tokenizer.decode(tokens, skip_special_tokens=True)
    return texts


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_greedy_answers_equal_transformers_over_a_network_that_reorders(
    model: Path, expected: dict[int, str], tmp_path: Path, nodes: int, micro_batches: int
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        order = random.Random(nodes * 10 + micro_batches)
        async with cluster_of([model] * nodes, order=order) as cluster:
            statistics = await answer(
                cluster, model, prompts, tmp_path / "out.jsonl", options(micro_batches=micro_batches)
            )
        assert statistics.done == len(PROMPTS)
        assert statistics.finished

    run(main)
    answers = read_answers(tmp_path / "out.jsonl")
    assert {line: record["text"] for line, record in answers.items()} == expected


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"split": (1, 3), "micro_batches": 2}, id="uneven split"),
        pytest.param({"kv_tokens": 640, "micro_batches": 2}, id="little memory"),
        pytest.param({"kv_tokens": 480, "micro_batches": 4}, id="one sequence takes the whole arena"),
        pytest.param({"prefill_tokens": 1, "micro_batches": 3}, id="prompts a token at a time"),
        pytest.param({"prefill_tokens": 4096, "batch": 20}, id="everything at once"),
        pytest.param({"batch": 1}, id="one at a time"),
    ],
)
def test_greedy_answers_do_not_depend_on_the_layout(
    model: Path, expected: dict[int, str], tmp_path: Path, layout: dict[str, Any]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        async with cluster_of([model] * 2, order=random.Random(7)) as cluster:
            await answer(cluster, model, prompts, tmp_path / "out.jsonl", options(**layout))

    run(main)
    answers = read_answers(tmp_path / "out.jsonl")
    too_long = {
        line for line, record in answers.items() if record.get("error", {}).get("code") == "does_not_fit"
    }
    assert len(too_long) <= 1  # a sequence that is larger than the arena has an error record of its own
    assert {line: record.get("text") for line, record in answers.items() if line not in too_long} == {
        line: text for line, text in expected.items() if line not in too_long
    }


def test_sampled_answers_depend_on_the_seed_alone(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", SAMPLED + PROMPTS[:3])
    texts: list[dict[int, str]] = []

    async def main() -> None:
        for nodes in (1, 2, 3):
            for micro_batches in (1, 2, 4):
                output = tmp_path / f"{nodes}-{micro_batches}.jsonl"
                async with cluster_of([model] * nodes, order=random.Random(nodes)) as cluster:
                    await answer(cluster, model, prompts, output, options(micro_batches=micro_batches))
                answers = read_answers(output)
                assert all(answers[line]["seed"] == 2**60 + line - 1 for line in range(1, 9))
                texts.append({line: record["text"] for line, record in answers.items()})

    run(main)
    assert all(one == texts[0] for one in texts)
    assert len(set(texts[0].values())) > 5, "the samples are samples"


def test_greedy_answers_equal_transformers_over_quic(
    model: Path, expected: dict[int, str], tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    async def main() -> None:
        async with cluster_of([model] * 3, quic=True) as cluster:
            statistics = await answer(
                cluster, model, prompts, tmp_path / "out.jsonl", options(micro_batches=3)
            )
        assert len(statistics.hops) == 4
        assert all(hop.bytes_sent > 0 for hop in statistics.hops)
        assert [(one.first_block, one.last_block) for one in statistics.stages] == [(0, 1), (2, 2), (3, 3)]

    run(main)
    answers = read_answers(tmp_path / "out.jsonl")
    assert {line: record["text"] for line, record in answers.items()} == expected


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("chunk", [3, 24, 512])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_answers_do_not_depend_on_chunks_packs_in_flight_or_the_order_of_arrival(
    model: Path, expected: dict[int, str], micro_batches: int, chunk: int, depth: int
) -> None:
    """Whatever a pace decides: sizes of packs, how many there are, and who moves into which micro-batch."""
    records = [PROMPTS[line - 1] for line in SHORT]

    async def main() -> None:
        order = random.Random(100 * micro_batches + chunk + depth)
        # room for all in any micro-batch, so that moves are possible from the first token on
        room = {"batch": 12 * micro_batches, "kv_tokens": 12 * 256 * micro_batches}
        how = options(micro_batches=micro_batches, prefill_tokens=chunk, depth=depth, **room)
        async with cluster_of([model] * 2, order=order) as cluster:
            answers, scheduler = await serve(
                cluster, model, records, how, pace=lambda given: RandomPace(order, given, 1.0)
            )
        assert [answers[line].text for line in sorted(answers)] == [expected[line] for line in SHORT]
        assert (scheduler.moved > 0) == (micro_batches > 1)

    run(main)


def has_generated(scheduler: Scheduler, tokens: int) -> bool:
    return scheduler.generated >= tokens


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_sequences_that_are_dropped_in_mid_run_answer_as_if_they_were_not(
    model: Path, expected: dict[int, str], micro_batches: int
) -> None:
    order = random.Random(micro_batches)

    async def drop(coordinator: Coordinator, scheduler: Scheduler) -> None:
        for goal in itertools.count(10, 10):
            await until(functools.partial(has_generated, scheduler, goal))
            _, _, sequence = order.choice(list(scheduler.seats()))
            assert coordinator.preempt(sequence.request.line)

    async def main() -> None:
        how = options(micro_batches=micro_batches)
        async with cluster_of([model] * 2, order=order) as cluster:
            answers, scheduler = await serve(
                cluster,
                model,
                PROMPTS,
                how,
                pace=lambda given: RandomPace(order, given),
                during=drop,
            )
        assert {line: one.text for line, one in answers.items()} == expected
        assert scheduler.preempted > 5

    run(main)


@pytest.mark.parametrize("kv_tokens", [8 * 288, 40 * 288])
def test_answers_do_not_change_while_the_number_of_micro_batches_does(
    model: Path, expected: dict[int, str], kv_tokens: int
) -> None:
    """1, then 4, then 2 in mid-run: with an arena that is full to the last slot, and with room for copies."""
    records = [PROMPTS[line - 1] for line in SHORT]
    pace = FixedPace(window=4, chunk=24, count=1)
    seen: list[int] = []

    async def change(coordinator: Coordinator, scheduler: Scheduler) -> None:
        for count in (4, 2):
            enough = scheduler.generated + 30
            await until(functools.partial(has_generated, scheduler, enough))
            seen.append(scheduler.micro_batches)
            pace.count = count
            await until(lambda count=count: scheduler.micro_batches == count)  # type: ignore[misc]
        seen.append(scheduler.micro_batches)

    async def main() -> None:
        order = random.Random(kv_tokens)
        how = options(micro_batches=4, kv_tokens=kv_tokens)
        async with cluster_of([model] * 2, order=order) as cluster:
            answers, scheduler = await serve(
                cluster, model, records, how, pace=lambda _: pace, start=1, during=change
            )
        assert [answers[line].text for line in sorted(answers)] == [expected[line] for line in SHORT]
        assert scheduler.moved > 0
        assert seen == [1, 4, 2]

    run(main)
