"""The draft while it learns: some of its target's blocks and a norm, between the target's own ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bbquic.errors import ConfigError
from bbquic.model.directory import ModelDirectory
from bbquic.model.spec import load_class
from bbquic.model.weights import load_tensors, tensors_for

CPU = torch.device("cpu")


class Student(nn.Module):
    """Trained are the blocks and the norm; embedding and head stay as the target's are."""

    def __init__(self, target: ModelDirectory, blocks: Sequence[int]) -> None:
        """Begins as the target's `blocks`, one behind the other.

        Raises: ConfigError for blocks that the target lacks; ModelError as loading does.
        """
        super().__init__()
        if not blocks or not all(0 <= block < target.blocks for block in blocks):
            raise ConfigError(f"{target.name} has blocks 0 to {target.blocks - 1}, not {list(blocks)}")
        spec = target.spec
        tensors = _tensors(target, blocks)
        config = copy.deepcopy(target.config)
        config._attn_implementation = "sdpa"
        layer = load_class(spec.classes.decoder_layer)
        self.embedding = nn.Parameter(tensors[spec.weights.embed], requires_grad=False)
        self.head = nn.Parameter(tensors[spec.head_name(target.config)], requires_grad=False)
        self.target_norm = _norm(target, tensors)
        self.target_norm.requires_grad_(False)
        self.norm = copy.deepcopy(self.target_norm).requires_grad_(True)
        self.blocks = nn.ModuleList()
        for place, block in enumerate(blocks):
            made = layer(config, layer_idx=place)
            prefix = spec.block_prefix(block)
            held = {n.removeprefix(prefix): t.clone() for n, t in tensors.items() if n.startswith(prefix)}
            made.load_state_dict(held)
            self.blocks.append(made)
        self._rotary = load_class(spec.classes.rotary_embedding)(config=config)
        self._spec, self._head_name = spec, spec.head_name(target.config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] to hidden states [B, T, D] behind the norm: what the head multiplies."""
        hidden = nn.functional.embedding(tokens, self.embedding)
        places = torch.arange(tokens.shape[1])[None]
        rotary = self._rotary(hidden, places)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None, position_ids=places, position_embeddings=rotary)
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def trained(self) -> dict[str, nn.Parameter]:
        """What learning changes, by the names that a checkpoint of a model with these blocks has."""
        named = {self._spec.weights.norm: self.norm.weight}
        for place, block in enumerate(self.blocks):
            prefix = self._spec.block_prefix(place)
            named |= {prefix + name: parameter for name, parameter in block.named_parameters()}
        return named

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Tensors of the target that stay as they are."""
        return tuple({self._spec.weights.embed: None, self._head_name: None})

    def load_trained(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take values of `trained`; there are exactly those."""
        mine = self.trained()
        assert mine.keys() == tensors.keys()
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(tensors[name])


def _tensors(target: ModelDirectory, blocks: Sequence[int]) -> dict[str, torch.Tensor]:
    ends = range(0)
    needed = tensors_for(target.spec, target.config, ends, embeds=True, heads=True)
    for block in set(blocks):
        one = range(block, block + 1)
        needed |= tensors_for(target.spec, target.config, one, embeds=False, heads=False)
    return load_tensors(target, needed, torch.float32, CPU)


def _norm(target: ModelDirectory, tensors: Mapping[str, torch.Tensor]) -> Any:
    norm = load_class(target.spec.classes.norm)(target.config.hidden_size, eps=target.config.rms_norm_eps)
    norm.load_state_dict({"weight": tensors[target.spec.weights.norm]})
    return norm
