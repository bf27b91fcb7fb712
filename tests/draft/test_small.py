"""A small model as drafter, against transformers' own and against itself without memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from bbquic.draft.drafter import Ask
from bbquic.draft.load import load_drafter
from bbquic.draft.small import ModelDrafter, ModelDrafterOptions
from bbquic.draft.tree import DraftTree, grow
from bbquic.draft.verify import verify
from bbquic.errors import ModelError
from bbquic.kv.slab import bytes_per_cell
from bbquic.model.directory import ModelDirectory
from bbquic.model.sampling import Sampling, choose
from bbquic.units import Bytes
from tiny_model import first_blocks, make_tiny_llama

VOCABULARY = 320
FREE = Bytes(1 << 30)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, top_p=0.95, top_k=20, seed=5)
PROMPTS = ([5, 9, 40, 41, 7], [1, 2, 3], list(range(20, 60)), [8] * 21)


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """A drafter takes one; whoever comes after has what there was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tiny: Path) -> ModelDirectory:
    return ModelDirectory(tiny, "tiny")


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def drafter_of(model: ModelDirectory, **options: int) -> ModelDrafter:
    chosen = ModelDrafterOptions(**{name: Bytes(value) for name, value in options.items()})
    return load_drafter(model, model, chosen, free=FREE)


def ask(
    key: int, tokens: Sequence[int], sampling: Sampling = GREEDY, guesses: int = 7, depth: int = 3
) -> Ask:
    return Ask(key, tokens, sampling, guesses, depth)


def assert_same(one: Sequence[DraftTree], other: Sequence[DraftTree]) -> None:
    for left, right in zip(one, other, strict=True):
        assert (left.tokens, left.parents) == (right.tokens, right.parents)
        assert left.weights == pytest.approx(right.weights, rel=1e-4)


@torch.inference_mode()
def logits_of(oracle: Any, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([list(tokens)])).logits[0, -1]
    return logits


def test_a_greedy_tree_is_of_the_paths_that_transformers_finds_the_most_probable(
    model: ModelDirectory, oracle: Any
) -> None:
    drafter = drafter_of(model, pack_tokens=16)
    trees = drafter.draft([ask(key, prompt) for key, prompt in enumerate(PROMPTS)])
    for prompt, tree in zip(PROMPTS, trees, strict=True):

        def guess(path: tuple[int, ...], prompt: list[int] = prompt) -> list[tuple[int, float]]:
            chances, ids = logits_of(oracle, [*prompt, *path]).softmax(-1).topk(7)
            return list(zip(ids.tolist(), chances.tolist(), strict=True))

        expected = grow(prompt[-1], guess, 7, 3)
        assert sorted(tree.weights) == pytest.approx(sorted(expected.weights), rel=1e-3)
        assert sorted(zip(tree.depths, tree.tokens, strict=True)) == sorted(
            zip(expected.depths, expected.tokens, strict=True)
        )


def test_a_sampled_tree_leads_where_the_sampler_will_go(model: ModelDirectory, oracle: Any) -> None:
    drafter = drafter_of(model)
    accepted = 0
    for seed in range(12):
        sampling = Sampling(temperature=0.9, top_p=0.95, top_k=20 * (seed % 2), seed=seed)
        prompt = PROMPTS[seed % len(PROMPTS)]
        (tree,) = drafter.draft([ask(100 + seed, prompt, sampling, guesses=6, depth=3)])
        path: list[int] = []

        def chosen(place: int, sampling: Sampling = sampling, prompt: list[int] = prompt) -> int:
            said = [*prompt, *path]  # noqa: B023 - the walk's own
            (token,) = choose(logits_of(oracle, said)[None], [sampling], [len(said)])
            path.append(token)  # noqa: B023
            return token

        verdict = verify(range(len(tree.tokens)), tree.parents, tree.tokens, chosen)
        accepted += len(verdict.path) - 1
        assert tree.parents.count(0) > 1
        assert tree.tokens[1] == verdict.tokens[0]  # the heaviest guess is the sampler's choice
    assert accepted > 24  # of 36: the noise is known, and the logits are the target's


@settings(max_examples=8)
@given(
    grown=st.lists(
        st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=4), min_size=3, max_size=3), max_size=4
    ),
    cut=st.integers(0, 6),
    sampling=st.sampled_from([GREEDY, SAMPLED]),
)
def test_what_is_kept_between_rounds_changes_no_tree(
    model: ModelDirectory, grown: list[list[list[int]]], cut: int, sampling: Sampling
) -> None:
    drafter = drafter_of(model, rows=3)
    texts = [list(prompt) for prompt in PROMPTS[:3]]
    for number, new in enumerate(grown):
        for text, tokens in zip(texts, new, strict=True):
            if number == 2:  # a sequence that goes on otherwise than it was
                del text[max(1, len(text) - cut) :]
            text += tokens
        trees = drafter.draft([ask(key, text, sampling) for key, text in enumerate(texts)])
        for key, text in enumerate(texts):
            assert_same([trees[key]], drafter_of(model).draft([ask(key, text, sampling)]))


def test_of_a_sequence_that_begins_anew_only_what_is_alike_is_kept(model: ModelDirectory) -> None:
    drafter = drafter_of(model)
    for text in ([5, 9, 40, 41, 7, 8], [5, 9, 77, 41, 7, 8, 3], [5, 9, 77, 41], [5, 9, 77, 41]):
        assert_same(drafter.draft([ask(1, text)]), drafter_of(model).draft([ask(1, text)]))
    assert drafter.tokens_read == 6 + 5 + 1 + 1


def test_a_sequence_that_outgrows_its_slot_keeps_what_is_stored(model: ModelDirectory) -> None:
    drafter = drafter_of(model, rows=2)
    texts = [[7 + n % 90 for n in range(230)], [3, 4, 5]]
    for _ in range(3):
        for text in texts:
            text += range(50, 60)
        trees = drafter.draft([ask(key, text) for key, text in enumerate(texts)])
        assert_same(trees, [drafter_of(model).draft([ask(0, text)])[0] for text in texts])
        assert drafter.tokens_read == sum(map(len, texts))  # each once


def test_nothing_is_guessed_behind_the_context_or_for_want_of_memory(model: ModelDirectory) -> None:
    cell = 4 * bytes_per_cell(kv_heads=2, head_dim=16, dtype=torch.float32)
    drafter = drafter_of(model, memory=300 * cell)
    sizes = (511, 512, 250, 296)  # the model was made for 512 tokens
    asks = [ask(n, [5] * size, guesses=7) for n, size in enumerate(sizes)]
    assert [tree.guesses for tree in drafter.draft(asks)] == [0, 0, 7, 0]
    assert drafter_of(model).draft([asks[0]])[0].depths == (0, *[1] * 7)
    assert drafter_of(model).draft([asks[1]])[0].guesses == 0


def test_a_prompt_too_long_for_one_call_is_read_over_several(model: ModelDirectory) -> None:
    drafter = drafter_of(model, call_tokens=30, pack_tokens=16)
    asks = [ask(1, [5] * 70), ask(2, [6, 7])]
    counts = [[tree.guesses for tree in drafter.draft(asks)] for _ in range(3)]
    assert counts == [[0, 7], [0, 7], [7, 7]]
    assert_same(drafter.draft(asks), drafter_of(model).draft(asks))


def test_memory_that_holds_no_sequence_is_refused_with_the_figures(model: ModelDirectory) -> None:
    with pytest.raises(ModelError, match=r"262,144 bytes .* may have 1,000"):
        drafter_of(model, memory=1000)
    with pytest.raises(ModelError, match=r"bytes for its weights; 1,000 are free"):
        load_drafter(model, model, ModelDrafterOptions(), free=Bytes(1000))


def test_what_was_accepted_shapes_later_trees(model: ModelDirectory) -> None:
    drafter = drafter_of(model)
    before = drafter.draft([ask(1, PROMPTS[0])])[0]
    for round_ in range(20):
        tree = drafter.draft([ask(1, [*PROMPTS[0][:-1], 20 + round_])])[0]
        drafter.learn(1, tree, [0])
    after = drafter.draft([ask(1, PROMPTS[0])])[0]
    assert after.weights[1] < before.weights[1]
    drafter.learn(1, before, [0])  # of a tree that is not the last one: nothing to learn
    drafter.forget(1)
    drafter.learn(1, after, [0])
    assert_same(drafter.draft([ask(1, PROMPTS[0])]), [after])


def test_tokens_the_target_lacks_are_never_guessed(tiny: Path, tmp_path: Path) -> None:
    target = ModelDirectory(tiny, "target")
    wider = make_tiny_llama(tmp_path / "wider", vocab=384, seed=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (wider / name).write_bytes((tiny / name).read_bytes())
    drafter = load_drafter(ModelDirectory(wider, "wider"), target, ModelDrafterOptions(), free=FREE)
    asks = [ask(n, [n + 5], sampling) for n in range(10) for sampling in (GREEDY, SAMPLED)]
    found = [token for one in asks for token in drafter.draft([one])[0].tokens]
    assert max(found) < VOCABULARY
    narrower = load_drafter(target, ModelDirectory(wider, "wider"), ModelDrafterOptions(), free=FREE)
    assert narrower.draft([ask(1, [5, VOCABULARY, 6])])[0].guesses == 0  # it cannot read that one


def test_a_targets_first_blocks_guess_better_than_other_weights(
    tiny: Path, tmp_path: Path, oracle: Any
) -> None:
    target = ModelDirectory(tiny, "target")
    right = {}
    for name, path in (
        ("own", first_blocks(tiny, tmp_path / "own", 3)),
        ("other", make_tiny_llama(tmp_path / "other", seed=9)),
    ):
        drafter = load_drafter(ModelDirectory(path, name), target, ModelDrafterOptions(), free=FREE)
        prompts = [[n, n + 3, n + 11] for n in range(10, 40)]
        trees = drafter.draft([ask(n, prompt, guesses=4, depth=1) for n, prompt in enumerate(prompts)])
        said = [int(logits_of(oracle, prompt).argmax()) for prompt in prompts]
        right[name] = sum(token in tree.tokens[1:] for token, tree in zip(said, trees, strict=True))
    assert right["own"] > 2 * right["other"]
