"""The pruner's arithmetic against the long way round, and what is no pruner."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from bbquic.draft.pruner import Guesses, Pruner, PrunerPart, along_paths
from bbquic.errors import ModelError
from pruners import random_part, random_tensors

WIDTH, VOCABULARY = 16, 60


def a_pruner(seed: int) -> tuple[Pruner, PrunerPart, torch.Tensor]:
    part = random_part(seed, width=WIDTH, vocabulary=VOCABULARY)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed + 1))
    return Pruner(part, embedding), part, embedding


@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 5), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_features_are_those_of_a_softmax_over_common_tokens_and_the_guesses_there(
    seed: int, nodes: int, scale: float
) -> None:
    pruner, part, embedding = a_pruner(seed)
    drawn = random.Random(seed)
    hidden = scale * torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(seed))
    tokens = [drawn.sample(range(VOCABULARY), drawn.randint(1, 6)) for _ in range(nodes)]
    node = torch.tensor([place for place, mine in enumerate(tokens) for _ in mine])
    found = pruner.features(hidden, node, torch.tensor([one for mine in tokens for one in mine]))
    expected = []
    for state, mine in zip(hidden.double(), tokens, strict=True):
        low = part.adapter.double() @ (state / state.pow(2).mean().add(torch.finfo(torch.float32).eps).sqrt())
        logits = (embedding.double() @ part.factor.double() @ low).tolist()
        known = sorted({*part.common.tolist(), *mine})
        chances = torch.tensor([logits[one] for one in known], dtype=torch.double).log_softmax(-1)
        entropy = -(chances.exp() * chances).sum()
        expected += [[chances.max(), chances[known.index(one)], entropy] for one in mine]
    assert found.numpy() == pytest.approx(torch.tensor(expected).numpy(), rel=1e-3, abs=1e-3)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 30))
def test_scores_are_products_along_paths_and_none_is_above_its_parents(seed: int, count: int) -> None:
    drawn = random.Random(seed)
    above = [drawn.choice([count, *range(place)]) for place in range(count)]
    chances = [drawn.uniform(-3, 0) for _ in range(count)]
    sums, depths = list[float](), list[int]()
    for place, parent in enumerate(above):
        sums.append(chances[place] + (sums[parent] if parent < count else 0))
        depths.append(1 + (depths[parent] if parent < count else 0))
    found = along_paths(torch.tensor(chances), torch.tensor(above), max(depths))
    assert found.tolist() == pytest.approx(sums, abs=1e-4)


def test_scores_are_between_0_and_1_and_depend_on_the_parents_state_alone() -> None:
    pruner, *_ = a_pruner(3)
    hidden = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(4))
    guesses = Guesses(
        torch.tensor([0, 2]), torch.tensor([0, 0, 1]), torch.tensor([5, 9, 9]), torch.tensor([3, 3, 0]), 2
    )
    before = pruner.scores(hidden, guesses)
    assert ((before >= 0) & (before <= 1)).all()
    assert before[2] <= before[0]
    hidden[[1, 3, 4, 5]] += 1
    assert torch.equal(pruner.scores(hidden, guesses), before)
    hidden[2] += 1
    after = pruner.scores(hidden, guesses)
    assert torch.equal(after[:2], before[:2])
    assert after[2] != before[2]


def test_what_is_written_is_read() -> None:
    tensors = random_tensors(1, width=WIDTH, vocabulary=VOCABULARY)
    part = PrunerPart.read_untrusted(save(tensors), width=WIDTH, vocabulary=VOCABULARY)
    assert torch.equal(part.adapter, tensors["adapter"])
    assert Pruner.bytes_for(part, VOCABULARY) > 4 * 8 * VOCABULARY


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"factor": torch.zeros(WIDTH + 1, 8)}, "factor has the shape"),
        ({"adapter": torch.zeros(9, WIDTH)}, "adapter has the shape"),
        ({"adapter": torch.zeros(8, WIDTH, 1)}, "adapter has the shape"),
        ({"mlp.1.weight": torch.zeros(2, 6)}, "mlp.1.weight has the shape"),
        ({"mlp.0.bias": None}, "mlp.0.bias has the shape"),
        ({"more": torch.zeros(1)}, "too many"),
        ({"factor": torch.full((WIDTH, 8), torch.nan)}, "not finite"),
        ({"common": torch.tensor([3, 3], dtype=torch.int32)}, "rising"),
        ({"common": torch.tensor([3, VOCABULARY], dtype=torch.int32)}, "of the vocabulary of 60"),
        ({"common": torch.tensor([-1, 3], dtype=torch.int32)}, "of the vocabulary of 60"),
        ({"common": torch.zeros(0, dtype=torch.int32)}, "rising"),
    ],
)
def test_what_is_no_pruner_of_the_model_is_refused(change: dict[str, torch.Tensor | None], why: str) -> None:
    tensors = random_tensors(1, width=WIDTH, vocabulary=VOCABULARY) | change
    data = save({name: one for name, one in tensors.items() if one is not None})
    with pytest.raises(ModelError, match=why):
        PrunerPart.read_untrusted(data, width=WIDTH, vocabulary=VOCABULARY)


@given(st.data())
def test_bytes_that_are_no_pruner_are_refused(data: st.DataObject) -> None:
    """A valid one that is cut, or has a byte changed, is refused as such, or still of the model's shapes."""
    whole = bytearray(save(random_tensors(1, width=WIDTH, vocabulary=VOCABULARY)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    stop = data.draw(st.just(len(whole)) | st.integers(0, len(whole)))
    try:
        part = PrunerPart.read_untrusted(bytes(whole[:stop]), width=WIDTH, vocabulary=VOCABULARY)
    except ModelError:
        return
    assert part.factor.shape[0] == WIDTH
