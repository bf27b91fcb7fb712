from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from bbquic.model.sampling import NonFiniteLogits, Sampling, choose, gumbel_noise, kept_tokens

SEEDS = st.integers(0, 2**64 - 1)


def random_logits(seed: int, rows: int, vocabulary: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_greedy_takes_the_maximum_and_of_equal_ones_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0], [-1.0, -3.0, -1e30]])
    assert choose(logits, [Sampling()] * 3, [0, 1, 2]) == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_float_dtype_is_accepted(dtype: torch.dtype) -> None:
    logits = random_logits(0, 2, 50).to(dtype)
    tokens = choose(logits, [Sampling(), Sampling(temperature=0.7, seed=1)], [3, 3])
    assert tokens[0] == logits[0].float().argmax()
    assert tokens[1] == choose(logits[1:].float(), [Sampling(temperature=0.7, seed=1)], [3])[0]


@given(SEEDS, st.integers(0, 10_000), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_row_gets_the_same_token_in_any_batch(seed: int, position: int, mates: list[int]) -> None:
    logits = random_logits(seed % 1000, 4 + len(mates), 64)
    wanted = Sampling(temperature=0.9, top_p=0.9, top_k=40, seed=seed)
    alone = choose(logits[:1], [wanted], [position])
    for place in range(len(mates) + 1):
        others = logits[1 : 1 + len(mates)]
        batch = torch.cat([others[:place], logits[:1], others[place:]])
        params = [Sampling(temperature=float(mate), seed=mate) for mate in mates]
        params.insert(place, wanted)
        positions = [7] * len(params)
        positions[place] = position
        assert choose(batch, params, positions)[place] == alone[0]


@given(SEEDS, st.integers(0, 2**32), st.integers(1, 300), st.integers(1, 300))
def test_noise_of_a_token_depends_on_seed_and_position_alone(
    seed: int, position: int, few: int, many: int
) -> None:
    few, many = sorted((few, many))
    noise = gumbel_noise(seed, position, many)
    assert np.isfinite(noise).all()
    assert (noise[:few] == gumbel_noise(seed, position, few)).all()
    assert (noise != gumbel_noise(seed, position + 1, many)).any()
    assert (noise != gumbel_noise((seed + 1) % 2**64, position, many)).any()


@given(SEEDS, st.integers(0, 2**40))
def test_noise_is_gumbel_over_philox_as_published(seed: int, position: int) -> None:
    draws = philox((1, position, 0, 0), (seed, 0)) + philox((2, position, 0, 0), (seed, 0))
    expected = [-math.log(-math.log((draw >> 11 | 1) * 2.0**-53)) for draw in draws]
    assert gumbel_noise(seed, position, 8).tolist() == pytest.approx(expected, rel=1e-12)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x64-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = high >> 64 ^ b ^ first, high % 2**64, low >> 64 ^ d ^ second, low % 2**64
        first = (first + 0x9E3779B97F4A7C15) % 2**64
        second = (second + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


def test_golden_tokens_stay() -> None:
    # A seeded record must give the same text after an upgrade.
    settings = [(0, 1.0, 0), (1, 1.0, 0), (2, 0.5, 0), (3, 1.0, 3), (4, 0.8, 10), (2**64 - 1, 0.9, 0)]
    params = [Sampling(temperature=1.0, seed=seed, top_p=p, top_k=k) for seed, p, k in settings]
    logits = torch.linspace(-2, 2, 16).repeat(6, 1)
    assert choose(logits, params, range(6)) == [7, 14, 13, 15, 13, 11]


def test_tokens_are_as_frequent_as_their_softmax_says() -> None:
    logits = random_logits(5, 1, 12)
    draws = 20_000
    sampling = Sampling(temperature=1.3, seed=11)
    tokens = choose(logits.expand(draws, -1), [sampling] * draws, range(draws))
    counts = np.bincount(tokens, minlength=12)
    expected = draws * torch.softmax(logits[0].double() / 1.3, dim=0).numpy()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # 11 degrees of freedom: exceeded once in a thousand seeds


def test_seeds_are_as_good_a_source_as_positions() -> None:
    logits = random_logits(6, 1, 8)
    draws = 5_000
    params = [Sampling(temperature=1.0, seed=seed) for seed in range(draws)]
    counts = np.bincount(choose(logits.expand(draws, -1), params, [9] * draws), minlength=8)
    expected = draws * torch.softmax(logits[0].double(), dim=0).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 24.4  # 7 degrees of freedom, one in a thousand


@given(
    st.lists(st.integers(-400, 400), min_size=2, max_size=40, unique=True),
    st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    st.integers(0, 45),
    st.sampled_from([0.05, 0.33, 0.51, 0.77, 0.9, 0.999, 1.0]),
)
def test_filters_leave_the_tokens_that_transformers_leaves(
    values: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.tensor(values, dtype=torch.float32) / 40
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers.append(TopPLogitsWarper(top_p))
    theirs = torch.isfinite(warpers(torch.zeros(1, 1, dtype=torch.long), logits[None])[0])
    ours = kept_tokens(
        (logits / temperature).numpy(), Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    )
    assert ours.tolist() == theirs.nonzero()[:, 0].tolist()


@given(SEEDS, st.integers(1, 20), st.floats(0.01, 1.0))
def test_a_sample_is_one_of_the_tokens_kept(seed: int, top_k: int, top_p: float) -> None:
    logits = random_logits(seed % 97, 1, 30)
    sampling = Sampling(temperature=2.0, top_k=top_k, top_p=top_p, seed=seed)
    assert choose(logits, [sampling], [0])[0] in kept_tokens((logits[0] / 2).numpy(), sampling)


def test_equal_tokens_at_the_edge_of_top_k_all_stay() -> None:
    scores = np.array([1, 0, 1, 1, -1], dtype=np.float32)
    assert kept_tokens(scores, Sampling(temperature=1.0, top_k=2)).tolist() == [0, 2, 3]


def test_forbidden_tokens_are_never_sampled() -> None:
    logits = torch.full((1, 100), float("-inf"))
    logits[0, 42] = -50.0
    for seed in range(20):
        assert choose(logits, [Sampling(temperature=1.5, seed=seed)], [seed]) == [42]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(8, 30, 200)
    for temperature in (1e-3, 1e-30):
        params = [Sampling(temperature=temperature, seed=s) for s in range(30)]
        assert choose(logits, params, range(30)) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_damaged_row_is_named(damage: float, temperature: float) -> None:
    logits = random_logits(1, 3, 10)
    logits[1, 4] = damage
    with pytest.raises(NonFiniteLogits, match="row 1") as caught:
        choose(logits, [Sampling(temperature=temperature)] * 3, [0, 0, 0])
    assert caught.value.row == 1


def test_a_row_without_any_finite_logit_is_damaged() -> None:
    with pytest.raises(NonFiniteLogits):
        choose(torch.full((1, 4), float("-inf")), [Sampling()], [0])


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_settings_out_of_range_cannot_be_built(field: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        Sampling(**field)  # type: ignore[arg-type]
