"""Pruners with random weights, which judge as they like."""

from __future__ import annotations

from pathlib import Path

import torch

from bbquic.draft.pruner import PrunerPart
from bbquic.draft.pruner_file import OWN, SHARED, PrunerFile, write_pruner
from bbquic.model.manifest import Manifest

RANK, HIDDEN = 8, 6


def random_tensors(
    seed: int, *, width: int = 64, vocabulary: int = 320, common: int = 40
) -> dict[str, torch.Tensor]:
    """Of `PrunerPart`, by name; its scores are all over [0, 1]."""
    drawn = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn)

    return {
        "factor": matrix(width, RANK) / width**0.5,
        "adapter": matrix(RANK, width) / width**0.5,
        "common": torch.randperm(vocabulary, generator=drawn)[:common].sort().values.int(),
        "mlp.0.weight": 0.3 * matrix(HIDDEN, 3),
        "mlp.0.bias": matrix(HIDDEN),
        "mlp.1.weight": 3 * matrix(1, HIDDEN),
        "mlp.1.bias": matrix(1) + 2,
    }


def random_part(seed: int, *, width: int = 64, vocabulary: int = 320) -> PrunerPart:
    return PrunerPart.of(
        random_tensors(seed, width=width, vocabulary=vocabulary), width=width, vocabulary=vocabulary
    )


def random_file(path: Path, manifest: Manifest, depths: range, threshold: float = 0.5) -> PrunerFile:
    """For the tiny model."""
    parts = {depth: random_tensors(depth) for depth in depths}
    shared = {name: parts[depths[0]][name].numpy() for name in SHARED}
    own = {depth: {name: part[name].numpy() for name in OWN} for depth, part in parts.items()}
    return write_pruner(path, shared, own, manifest, "model.embed_tokens.weight", threshold)
