"""The sampler's noise at single tokens: what `sampling.gumbel_noise` gives for a whole vocabulary.

Philox4x64-10 (Salmon et al., SC 2011) over arrays: a counter's four words are computed alone, so that the
noise of a few candidates costs no pass over the vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_ROUNDS = 10
_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)  # the paper's, as are the steps
_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def gumbel_noise_at(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint64], tokens: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Noise of tokens, each at a position of a record with a seed; all arrays are of one shape."""
    draws = np.choose(
        (tokens % np.uint64(4)).astype(np.intp), _philox(1 + tokens // np.uint64(4), positions, seeds)
    )
    uniform = (draws >> np.uint64(11) | np.uint64(1)) * 2.0**-53
    return -np.log(-np.log(uniform))  # type: ignore[no-any-return]


def _philox(first: Words, second: Words, key: Words) -> list[Words]:
    """The four words at the counters (first, second, 0, 0) under the keys (key, 0)."""
    c0, c1, c2, c3 = first, second, np.zeros_like(first), np.zeros_like(first)
    k0, k1 = key.copy(), np.zeros_like(key)
    for _ in range(_ROUNDS):
        high0, low0 = _product(_FACTORS[0], c0)
        high1, low1 = _product(_FACTORS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _STEPS[0], k1 + _STEPS[1]
    return [c0, c1, c2, c3]


def _product(factor: np.uint64, words: Words) -> tuple[Words, Words]:
    """Upper and lower 64 bits of products of 128."""
    low, high = words & _LOW, words >> _HALF
    factor_low, factor_high = factor & _LOW, factor >> _HALF
    middle = factor_high * low + (factor_low * low >> _HALF)
    other = factor_low * high + (middle & _LOW)
    return factor_high * high + (middle >> _HALF) + (other >> _HALF), factor * words
