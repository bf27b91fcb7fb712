"""Which tensors a stage needs, and reading those and no others from disk."""

from __future__ import annotations

from typing import Any

import torch

from bbquic.model.spec import FamilySpec, load_class

Shape = tuple[int, ...]


def tensors_for(
    spec: FamilySpec, config: Any, blocks: range, *, embeds: bool, heads: bool
) -> dict[str, Shape]:
    """Checkpoint name and shape of each tensor of some blocks, and of the first or last stage's ends.

    A tied head is the embedding's tensor, named once. Raises: ModelError on blocks the model lacks.
    """
    layer = block_shapes(spec, config)
    needed: dict[str, Shape] = {}
    if embeds:
        needed[spec.weights.embed] = (config.vocab_size, config.hidden_size)
    for block in blocks:
        needed |= {spec.block_prefix(block) + name: shape for name, shape in layer.items()}
    if heads:
        needed[spec.weights.norm] = (config.hidden_size,)
        needed[spec.head_name(config)] = (config.vocab_size, config.hidden_size)
    return needed


def block_shapes(spec: FamilySpec, config: Any) -> dict[str, Shape]:
    """Name, without the block's prefix, and shape of each tensor of one block; no memory is taken."""
    with torch.device("meta"):
        layer = load_class(spec.classes.decoder_layer)(config, layer_idx=0)
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
