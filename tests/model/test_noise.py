"""The sampler's noise at a few tokens is that of the whole vocabulary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bbquic.model.noise import gumbel_noise_at
from bbquic.model.sampling import MAX_SEED, gumbel_noise

SEEDS = st.integers(0, MAX_SEED)


@given(
    rows=st.lists(
        st.tuples(SEEDS, st.integers(0, 2**31), st.lists(st.integers(0, 300), min_size=3, max_size=3)),
        min_size=1,
        max_size=5,
    )
)
def test_noise_of_single_tokens_is_the_vocabularys_bit_for_bit(
    rows: list[tuple[int, int, list[int]]],
) -> None:
    seeds = np.array([[seed] * 3 for seed, _, _ in rows], dtype=np.uint64)
    positions = np.array([[position] * 3 for _, position, _ in rows], dtype=np.uint64)
    tokens = np.array([tokens for *_, tokens in rows], dtype=np.uint64)
    found = gumbel_noise_at(seeds, positions, tokens)
    for row, (seed, position, wanted) in enumerate(rows):
        assert found[row].tolist() == gumbel_noise(seed, position, 301)[wanted].tolist()
