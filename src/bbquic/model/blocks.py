"""The blocks of a stage, computed by transformers' own decoder layers on packed rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from bbquic.errors import ModelError
from bbquic.kv.attention import Attention, packed_attention
from bbquic.model.linear import PackedLinear, pack_linears, packs
from bbquic.model.shape import kv_shape
from bbquic.model.spec import FamilySpec, load_class
from bbquic.units import Bytes

ATTENTION = "bbquic_packed"  # our name in transformers' attention interface

AttentionInterface.register(ATTENTION, packed_attention)


class StageModel:
    """A contiguous range of blocks; the first stage also embeds, the last has norm and head.

    Everything is a pack `[T, D]` without padding. Holds no KV: attention goes to what comes with
    each pack.
    """

    def __init__(
        self,
        spec: FamilySpec,
        config: Any,
        tensors: dict[str, torch.Tensor],
        *,
        blocks: range,
        embeds: bool,
        heads: bool,
    ) -> None:
        """`tensors` are those of `weights.tensors_for`, in one dtype on one device. They are not copied, and
        taken out of the mapping block by block: where weights are packed, only one block is there twice.

        Raises: ModelError naming a tensor that is missing, left over or of another shape.
        """
        config = copy.deepcopy(config)
        config._attn_implementation = ATTENTION
        first = next(iter(tensors.values()))
        self.blocks = blocks
        self.dtype, self.device = first.dtype, first.device
        self.hidden_size = int(config.hidden_size)
        self.kv_heads, self.head_dim = kv_shape(config.to_dict())
        self.nbytes = Bytes(sum(tensor.nbytes for tensor in tensors.values()))
        self._embedding = tensors[spec.weights.embed] if embeds else None
        self._head = _head_layer(tensors[spec.head_name(config)]) if heads else None
        layer = load_class(spec.classes.decoder_layer)
        with torch.device("meta"):
            self._layers = [layer(config, block).eval() for block in blocks]
            self._norm = load_class(spec.classes.norm)(config.hidden_size, eps=config.rms_norm_eps)
        for block, module in zip(blocks, self._layers, strict=True):
            _assign(module, tensors, spec.block_prefix(block))
            pack_linears(module)
        if heads:
            self._norm.weight = nn.Parameter(tensors[spec.weights.norm], requires_grad=False)
        self._rotary = load_class(spec.classes.rotary_embedding)(config=config).to(self.device)

    @property
    def embedding(self) -> torch.Tensor:
        """[V, D], of a model that embeds."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding

    def check_tokens(self, tokens: torch.Tensor) -> None:
        """Look at ids [T] while they are on the host. Raises: ModelError for one outside the vocabulary."""
        assert self._embedding is not None, "only the first stage embeds"
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= len(self._embedding):
            wrong = least if least < 0 else most
            raise ModelError(f"token {wrong} is outside the vocabulary of {len(self._embedding)}")

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [T], which `check_tokens` has seen, to hidden states [T, D]."""
        assert self._embedding is not None, "only the first stage embeds"
        return nn.functional.embedding(tokens, self._embedding)

    @torch.inference_mode()
    def run(self, hidden: torch.Tensor, positions: torch.Tensor, rows: Attention) -> torch.Tensor:
        """A pack [T, D] through the blocks; `positions` [T] are each token's in its sequence."""
        pack = hidden[None]  # [1, T, D]
        ids = positions[None]
        rotary = self._rotary(pack, ids)
        for layer in self._layers:
            pack = layer(pack, attention_mask=None, position_ids=ids, position_embeddings=rotary, rows=rows)
        return pack[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, D] behind the last block to logits [S, V]."""
        assert self._head is not None, "only the last stage has the head"
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits


def _head_layer(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The LM head [V, D]; where the embedding is tied to it, that one's tensor is left as it is."""
    if packs(weight):
        return PackedLinear(weight, None)
    return lambda rows: nn.functional.linear(rows, weight)


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    """Give a module made on the meta device its weights, exactly those it has; they are taken out."""
    names = [name for name in tensors if name.startswith(prefix)]
    state = {name.removeprefix(prefix): tensors.pop(name) for name in names}
    try:
        module.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ModelError(f"the weights of {prefix.rstrip('.')} do not fit its layer: {error}") from error
    module.requires_grad_(False)
