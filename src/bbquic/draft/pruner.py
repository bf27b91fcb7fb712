"""The learned pruner (§7.2): which guesses of draft trees are worth a trip over the network.

A proxy of the LM head, of low rank, says from the hidden state h behind the first stage's blocks what the
whole model may say there: p̂ = softmax(U A h / rms(h)) (eq. 9), U being the embedding's projection to the
rank. The distribution that judges a guess v is the one at v's *parent*. A small MLP makes of log max p̂,
log p̂[v] and the entropy of p̂ the chance that v stays, if its parent does (eq. 10); its *retention score* is
the product of these chances along its path. So a node never scores higher than its parent.

p̂ is over the `common` tokens and the guesses behind the same node: the rest of the vocabulary is a few per
cent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from bbquic.errors import ModelError
from bbquic.units import Bytes

ROWS = 1024  # nodes that are computed at once, which bounds memory
MOST_RANK, MOST_HIDDEN = 1024, 256
_SHAPES = {  # of a pruner for one depth, by names of sizes
    "factor": ("D", "r"),
    "adapter": ("r", "D"),
    "common": ("C",),
    "mlp.0.weight": ("H", 3),
    "mlp.0.bias": ("H",),
    "mlp.1.weight": (1, "H"),
    "mlp.1.bias": (1,),
}


@dataclass(frozen=True, slots=True)
class PrunerPart:
    """What one depth's pruner is made of, D being the model's width and V its vocabulary.

    factor [D, r] takes embeddings to the rank, adapter [r, D] hidden states; common [C] are tokens, rising;
    layers are the MLP's weights and biases: 3 -> H -> 1. All but `common` are float32.
    """

    factor: torch.Tensor
    adapter: torch.Tensor
    common: torch.Tensor
    layers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, width: int, vocabulary: int) -> PrunerPart:
        """From tensors by name. Raises: ModelError for others than a pruner of such a model has."""
        sizes: dict[str, int] = {"D": width}
        for name, wanted in _SHAPES.items():
            shape = tuple(tensors[name].shape) if name in tensors else ()
            for size, found in zip(wanted, shape, strict=False):
                if isinstance(size, str):
                    sizes.setdefault(size, found)
            if shape != tuple(sizes.get(size, -1) if isinstance(size, str) else size for size in wanted):
                raise ModelError(f"a pruner's {name} has the shape {list(shape)}, which does not fit")
        if len(tensors) != len(_SHAPES) or sizes["r"] > MOST_RANK or sizes["H"] > MOST_HIDDEN:
            raise ModelError("a pruner has tensors too many, or too large")
        common = tensors["common"].long()
        if (
            not len(common)
            or bool((common.diff() <= 0).any())
            or not 0 <= common[0] <= common[-1] < vocabulary
        ):
            raise ModelError(f"a pruner's common tokens are not of the vocabulary of {vocabulary}, rising")
        plain = {name: one.float() for name, one in tensors.items() if name != "common"}
        if not all(bool(torch.isfinite(one).all()) for one in plain.values()):
            raise ModelError("a pruner has values that are not finite")
        layers = plain["mlp.0.weight"], plain["mlp.0.bias"], plain["mlp.1.weight"], plain["mlp.1.bias"]
        return cls(plain["factor"], plain["adapter"], common, layers)

    @classmethod
    def read_untrusted(cls, data: bytes, *, width: int, vocabulary: int) -> PrunerPart:
        """From the bytes of a safetensors file. Raises: ModelError for anything else."""
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ModelError(f"a pruner is not safetensors: {error}") from error
        return cls.of(tensors, width=width, vocabulary=vocabulary)


@dataclass(frozen=True, slots=True)
class Guesses:
    """G guesses of some trees, and the P nodes that have one behind them.

    nodes: [P] places of these in a pack. node: [G] index of each guess's parent among them, tokens: [G] what
    is guessed. above: [G] index of the guess that is the parent, G itself where that is a root.
    depth: of the deepest guess, a root's child having 1.
    """

    nodes: torch.Tensor
    node: torch.Tensor
    tokens: torch.Tensor
    above: torch.Tensor
    depth: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.nodes, self.node, self.tokens, self.above]


class Pruner:
    """A depth's pruner beside the model whose blocks it follows, on the same device."""

    def __init__(self, part: PrunerPart, embedding: torch.Tensor) -> None:
        """`embedding` [V, D]; what is made of it takes 4 V r bytes."""
        device = embedding.device
        factor = part.factor.to(device)
        with torch.inference_mode():
            self._vocabulary = torch.cat(
                [rows.float() @ factor for rows in torch.split(embedding, 4096)]
            )  # [V, r]
            self._common = self._vocabulary[part.common.to(device)]  # [C, r]
        self._is_common = torch.zeros(len(embedding), dtype=torch.bool)
        self._is_common[part.common] = True
        self._is_common = self._is_common.to(device)
        self._adapter = part.adapter.to(device)
        self._layers = tuple(one.to(device) for one in part.layers)

    @staticmethod
    def bytes_for(part: PrunerPart, vocabulary: int) -> Bytes:
        """Memory of one."""
        rank = part.factor.shape[1]
        return Bytes(4 * rank * (vocabulary + len(part.common) + part.adapter.shape[1]) + vocabulary)

    @torch.inference_mode()
    def scores(self, hidden: torch.Tensor, guesses: Guesses) -> torch.Tensor:
        """Retention scores [G] in [0, 1] of guesses in a pack, by the hidden states [T, D] behind it."""
        found = self.features(hidden[guesses.nodes], guesses.node, guesses.tokens)
        return along_paths(self.stays(found), guesses.above, guesses.depth).exp()

    def stays(self, features: torch.Tensor) -> torch.Tensor:
        """The logarithms [G] of the chances that guesses stay where their parents do."""
        first, first_bias, second, second_bias = self._layers
        between = nn.functional.silu(nn.functional.linear(features, first, first_bias))
        return nn.functional.logsigmoid(nn.functional.linear(between, second, second_bias))[:, 0]

    def features(self, hidden: torch.Tensor, node: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """log max p̂, log p̂[v] and the entropy of p̂ (nats), [G, 3], of guesses behind nodes [P, D]."""
        low = nn.functional.rms_norm(hidden.float(), hidden.shape[-1:]) @ self._adapter.T  # [P, r]
        common = [of_rows(rows @ self._common.T) for rows in torch.split(low, ROWS)]
        top, total, mean = (torch.cat(parts) for parts in zip(*common, strict=True))  # each [P]
        own = (low[node] * self._vocabulary[tokens]).sum(-1)  # [G]
        # guesses that are not among the common tokens count, too
        beside = own.masked_fill(self._is_common[tokens], -torch.inf)
        highest = top.scatter_reduce(0, node, beside, "amax")
        more = (beside - highest[node]).exp()
        total = total * (top - highest).exp()
        mean = mean * total + torch.zeros_like(top).scatter_add(0, node, own.where(more > 0, 0) * more)
        total = total + torch.zeros_like(top).scatter_add(0, node, more)
        norm = highest + total.log()
        return torch.stack(((highest - norm)[node], own - norm[node], (norm - mean / total)[node]), dim=-1)


def of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits [P, C]: the highest, the sum of exp(logit - highest), the mean logit by these; each [P]."""
    top = logits.amax(-1)
    weights = (logits - top[:, None]).exp_()
    total = weights.sum(-1)
    return top, total, (weights * logits).sum(-1) / total


def along_paths(chances: torch.Tensor, above: torch.Tensor, depth: int) -> torch.Tensor:
    """Sums [G] of logarithms [G] over each guess and those above it, in log2(depth) rounds."""
    sums = torch.cat((chances, chances.new_zeros(1)))  # behind the last, what is above a root's children
    above = torch.cat((above, above.new_full((1,), len(chances))))
    for _ in range(max(0, depth - 1).bit_length()):
        sums = sums + sums[above]
        above = above[above]
    return sums[:-1]
