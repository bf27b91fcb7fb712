"""From a draft model's logits to guesses: the tokens that the target may choose, and how likely each is.

A sampled row's choice is the maximum of log p + noise (architecture: sampling without state), and the noise
is known here as well: so what is guessed is that maximum, not a draw of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bbquic.model.noise import gumbel_noise_at
from bbquic.model.sampling import Sampling

CANDIDATES = 32  # of a node: what is less likely by the draft is hardly ever chosen

Ids = NDArray[np.int64]
Chances = NDArray[np.float64]


def candidates(
    logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]
) -> tuple[Ids, Chances]:
    """Tokens [S, K] of each row of `logits` [S, V], the likeliest first, and their probabilities [S, K].

    `positions` are those of the tokens that are guessed. Greedy rows: the softmax's. Sampled rows: of the
    likeliest that top_k and top_p leave, the softmax of log p + noise. What is filtered has probability 0.
    """
    coldest = 1e-6  # as the sampler's own
    scales = [1 / max(one.temperature, coldest) if one.temperature > 0 else 1.0 for one in params]
    scale = torch.tensor(scales, device=logits.device)[:, None]
    logits = logits.float()
    scores = torch.log_softmax((logits - logits.amax(-1, keepdim=True)) * scale, dim=-1)
    best = scores.topk(min(CANDIDATES, scores.shape[1]), dim=-1)
    ids = best.indices.cpu().numpy()
    logs = best.values.cpu().numpy().astype(np.float64)
    chances: Chances = np.exp(logs)
    sampled = [row for row, one in enumerate(params) if one.temperature > 0]
    if sampled:
        picked = [params[row] for row in sampled]
        places = [positions[row] for row in sampled]
        tokens, with_noise = ids[sampled], _with_noise(ids[sampled], logs[sampled], picked, places)
        order = np.argsort(-with_noise, axis=1, kind="stable")
        ids[sampled] = np.take_along_axis(tokens, order, axis=1)
        chances[sampled] = np.take_along_axis(with_noise, order, axis=1)
    return ids, chances


def _with_noise(
    ids: Ids, logs: NDArray[np.float64], params: Sequence[Sampling], positions: Sequence[int]
) -> Chances:
    """The softmax of log p + noise over rows of candidates [R, K], 0 for those that a row's filters drop."""
    chances = np.exp(logs)
    for row, one in enumerate(params):
        if one.top_k:
            logs[row, one.top_k :] = -np.inf
            chances[row, one.top_k :] = 0
        if one.top_p < 1:
            whole = chances[row].sum() if one.top_k else 1.0
            before = np.cumsum(chances[row]) - chances[row]
            logs[row, before >= one.top_p * whole] = -np.inf
    shape = ids.shape
    seeds = np.array([one.seed for one in params], dtype=np.uint64)[:, None]
    at = np.array(positions, dtype=np.uint64)[:, None]
    noise = gumbel_noise_at(np.broadcast_to(seeds, shape), np.broadcast_to(at, shape), ids.astype(np.uint64))
    scores = logs + noise
    weights: Chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights
