"""Walking along known answers with a drafter: what a pass commits is what speculation would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.drafts import Answered, chain_of, main, tree_of, walk

from bbquic.draft.drafter import Ask
from bbquic.draft.load import load_drafter
from bbquic.draft.small import ModelDrafter, ModelDrafterOptions
from bbquic.draft.tree import DraftTree
from bbquic.model.directory import ModelDirectory
from bbquic.model.sampling import Sampling
from bbquic.units import Bytes
from tiny_model import make_tiny_llama


class Counts:
    """Guesses that the next tokens count up, as a chain."""

    name = "counts"
    is_instant = True

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [
            DraftTree(
                tuple(range(ask.tokens[-1], ask.tokens[-1] + ask.guesses + 1)),
                (0, *range(ask.guesses)),
                (1.0,) * (ask.guesses + 1),
            )
            for ask in asks
        ]

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None: ...

    def forget(self, key: int) -> None: ...


@pytest.mark.parametrize("chain", [False, True])
def test_a_pass_commits_the_right_guesses_and_one_token_more(chain: bool) -> None:
    rising = Answered((1,), tuple(range(5, 14)))  # 8 behind the first: 4 and 4 with three guesses
    falling = Answered((1,), (9, 8, 7, 6))
    alone = Answered((1,), (9,))  # came with the prompt
    assert walk(Counts(), [rising], 3, chain=chain).per_pass == 4
    assert walk(Counts(), [rising, falling, alone], 3, chain=chain).passes == 2 + 3
    assert walk(Counts(), [rising, falling, alone], 3, chain=chain).committed == 8 + 3
    assert walk(Counts(), [Answered((1,), tuple(range(5, 12)))], 3, chain=chain).committed == 6  # not beyond


@pytest.fixture(scope="module")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> ModelDrafter:
    model = ModelDirectory(make_tiny_llama(tmp_path_factory.mktemp("t") / "t"), "t")
    return load_drafter(model, model, ModelDrafterOptions(), free=Bytes(1 << 30))


def test_a_chain_is_the_likeliest_token_behind_the_likeliest(tiny_drafter: ModelDrafter) -> None:
    asks = [Ask(key, list(range(key, 9 + key)), Sampling(), 3, 3) for key in range(3)]
    for ask, chain in zip(asks, chain_of(tiny_drafter, asks), strict=True):
        assert chain.parents == (0, 0, 1, 2)
        for depth in range(3):
            tokens = [*ask.tokens, *chain.tokens[1 : depth + 1]]
            (tree,) = tree_of(tiny_drafter, [Ask(77, tokens, Sampling(), 4, 1)])
            assert tree.tokens[1] == chain.tokens[depth + 1]


def test_the_bench_runs_with_a_draft_and_keeps_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "t", tied=True)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the {number}"}) + "\n" for number in range(3)))
    command = ["--model", str(model), "--draft", str(model), "--prompts", str(prompts)]
    for _ in range(2):
        assert main([*command, "--cache", str(tmp_path / "c"), "--quick", "--bars"]) == 1
    shown = capsys.readouterr()
    assert "draft chain_3: 3.667 tokens a pass" in shown.out  # all of 11 tokens, its own
    assert "draft_tree_16 - >=1.6 short" in shown.out
    assert shown.err.count("answered 3 of 3") == 1  # kept
