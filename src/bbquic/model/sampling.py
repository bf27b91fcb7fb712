"""Which token comes next, without random state (architecture: sampling without state).

A token is argmax(filtered logits / temperature + Gumbel noise), and the noise of token v is a pure
function of (seed, position, v). So a row gives the same token in any batch, on any node, after any
restart; and a drafted token can be checked against the sample instead of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bbquic.errors import ModelError

if TYPE_CHECKING:  # the command line reads `Sampling` long before it needs torch
    import torch

MAX_SEED = (1 << 64) - 1  # one word of Philox's key


class NonFiniteLogits(ModelError):
    """A row has a NaN, or no finite maximum: choosing from it would turn damage into text."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} has logits that are not finite")
        self.row = row


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy.

    Raises: ValueError on a field outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int = 0  # 64 bits; with the position it fixes the noise, wherever the row is computed

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is a finite number from 0 up, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k is 0 (no limit) or more, not {self.top_k}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is an unsigned number of 64 bits, not {self.seed}")


def choose(logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token per row of `logits` [S, V], any float dtype; `positions` are those of the chosen tokens.

    Equal maxima go to the lowest id. Sampled rows are computed in float32, their noise in float64.
    Raises: NonFiniteLogits, naming the row, on a NaN or a maximum that is not finite.
    """
    choice = begin_choice(logits, params, positions)
    return choice.finish(*(tensor.cpu().numpy() for tensor in choice.tensors))


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens half chosen: what a device does of it is under way, and nothing was waited for."""

    tensors: tuple[
        torch.Tensor, torch.Tensor, torch.Tensor
    ]  # on the logits' device; for `finish`, on the host
    params: tuple[Sampling, ...]
    positions: tuple[int, ...]

    def finish(
        self, finite: NDArray[np.bool_], ids: NDArray[np.int64], sampled: NDArray[np.float32]
    ) -> list[int]:
        """The tokens, from `tensors` as arrays: whether each row's maximum is finite [S], its id [S], and the
        logits of the rows that are sampled [K, V]. Raises: NonFiniteLogits, naming the row."""
        return list(map(self.chooser(finite, ids, sampled), range(len(self.params))))

    def chooser(
        self, finite: NDArray[np.bool_], ids: NDArray[np.int64], sampled: NDArray[np.float32]
    ) -> Callable[[int], int]:
        """The same of one row at a time, for who asks only of some: a row's noise takes a millisecond."""
        if not finite.all():
            raise NonFiniteLogits(int(np.argmin(finite)))
        rows = [row for row, sampling in enumerate(self.params) if sampling.temperature > 0]
        drawn = dict(zip(rows, sampled, strict=True))

        def chosen(row: int) -> int:
            if row not in drawn:
                return int(ids[row])
            return _sample(drawn[row], self.params[row], self.positions[row])

        return chosen


def begin_choice(logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> Choice:
    """As `choose`, up to where the device's answer is needed."""
    assert logits.ndim == 2, logits.shape
    assert len(logits) == len(params) == len(positions), (logits.shape, len(params), len(positions))
    best, ids = logits.max(dim=-1)  # [S], [S]; of equal maxima the first; a NaN wins
    sampled = [row for row, sampling in enumerate(params) if sampling.temperature > 0]
    drawn = logits if len(sampled) == len(logits) else logits.new_empty((len(sampled), logits.shape[1]))
    if drawn is not logits:
        for place, row in enumerate(sampled):  # an index tensor would have to be waited for on its way there
            drawn[place] = logits[row]  # [K, V]
    return Choice((best.isfinite(), ids, drawn.float()), tuple(params), tuple(positions))


def gumbel_noise(seed: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """Noise [V] of every token at a position of a record; token v's does not depend on V.

    Philox4x64-10 with the key (seed, 0) and the counter (1 + v // 4, position, 0, 0): no two of
    (seed, position, v) share a draw.
    """
    key = np.array([seed, 0], dtype=np.uint64)  # of a list, numpy makes floats once a number is large
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    draws = np.random.Philox(key=key, counter=counter).random_raw(vocabulary)  # uint64 [V]
    uniform = (draws >> np.uint64(11) | np.uint64(1)) * 2.0**-53  # the odd 53-bit numbers: never 0, never 1
    return -np.log(-np.log(uniform))  # type: ignore[no-any-return]


def kept_tokens(scores: NDArray[np.float32], sampling: Sampling) -> NDArray[np.intp]:
    """Ids that top_k and top_p leave of `scores` [V] (logits / temperature), ascending; never none.

    In the order of transformers: top_k (ties with the k-th stay), then the smallest set of the most
    likely whose probability reaches top_p.
    """
    kept = np.arange(len(scores))
    if 0 < sampling.top_k < len(scores):
        smallest_kept = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        kept = np.flatnonzero(scores >= smallest_kept)
    if sampling.top_p < 1:
        by_likelihood = kept[np.argsort(-scores[kept], kind="stable")]
        weights = np.exp(scores[by_likelihood].astype(np.float64) - scores[by_likelihood[0]])
        reached = np.cumsum(weights) / weights.sum()
        kept = np.sort(by_likelihood[: 1 + int(np.searchsorted(reached, sampling.top_p))])
    return kept


def _sample(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    # Below the smallest normal float32 the quotient overflows; there the rule is greedy's anyway.
    temperature = np.float32(max(sampling.temperature, 1e-6))
    with np.errstate(over="ignore"):  # what is that far below the maximum is as good as -inf
        scores = (logits - logits.max()) / temperature  # [V], 0 at the maximum
    kept = kept_tokens(scores, sampling)
    noise = gumbel_noise(sampling.seed, position, len(scores))
    return int(kept[np.argmax(scores[kept] + noise[kept])])
