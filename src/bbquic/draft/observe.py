"""What a pruner is trained on: hidden states behind some of a model's blocks, and what all of it says there.

The model answers prompts greedily, and each position is noted as it is computed, so that observing costs one
pass over a token, whatever the number of depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from bbquic.kv.attention import PackedAttention
from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange, Tiers
from bbquic.kv.rows import RowSpan, positions
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.weights import load_tensors, tensors_for

LIKELIEST = 128  # tokens of a distribution that are noted: all but some per cent of it
OF_PROMPT = 64  # positions of a prompt that are noted, the last: before is what prompts often share
CPU = torch.device("cpu")
HEADED = 512  # positions of which the logits are made at once: 100 MB of a large vocabulary


@dataclass(frozen=True, slots=True)
class Observed:
    """N positions of some sequences, all of a sequence's one behind the other.

    hidden: for each depth K, the hidden states [N, D] behind K blocks over their root mean square, float16.
    likeliest: [N, M] tokens that the model says most likely come next, falling; chances: [N, M] their
    probabilities, float16. tokens: [N] what stands there. sequence: [N] whose position it is.
    is_answer: [N] whether the model wrote it itself.
    """

    hidden: dict[int, torch.Tensor]
    likeliest: torch.Tensor
    chances: torch.Tensor
    tokens: torch.Tensor
    sequence: torch.Tensor
    is_answer: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        scratch = path.with_name(f".{path.name}")
        plain = {name: getattr(self, name).contiguous() for name in _PLAIN}
        save_file(plain | {f"hidden.{depth}": one for depth, one in self.hidden.items()}, scratch)
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path, depths: Sequence[int]) -> Observed:
        """Those depths of what was written. Raises: what safetensors does for another file."""
        with safe_open(path, "pt") as file:
            hidden = {depth: file.get_tensor(f"hidden.{depth}") for depth in depths}
            return cls(hidden, *(file.get_tensor(name) for name in _PLAIN))

    @classmethod
    def together(cls, parts: Sequence[Observed]) -> Observed:
        """One behind the other; a sequence is in one part alone."""
        offsets = np.cumsum([0, *(int(one.sequence.max()) + 1 for one in parts)])
        sequence = [one.sequence + int(offset) for one, offset in zip(parts, offsets, strict=False)]
        hidden = {depth: torch.cat([one.hidden[depth] for one in parts]) for depth in parts[0].hidden}
        others = {name: torch.cat([getattr(one, name) for one in parts]) for name in _PLAIN}
        return cls(hidden, **(others | {"sequence": torch.cat(sequence)}))


_PLAIN = ("likeliest", "chances", "tokens", "sequence", "is_answer")


def unit(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [N, D] over their root mean square: what a proxy head reads."""
    return nn.functional.rms_norm(hidden.float(), hidden.shape[-1:])


class Observer:
    """A whole model that answers and is looked into, on this thread and the CPU."""

    def __init__(self, directory: ModelDirectory, depths: Sequence[int]) -> None:
        """Seconds: the weights are read. Raises: ModelError; ValueError for a depth that the model lacks."""
        blocks = directory.blocks
        if not depths or not 1 <= min(depths) <= max(depths) < blocks:
            raise ValueError(f"hidden states are behind 1 to {blocks - 1} blocks, not {depths}")
        spec, config = directory.spec, directory.config
        needed = tensors_for(spec, config, range(blocks), embeds=True, heads=True)
        tensors = load_tensors(directory, needed, torch.float32, CPU)
        cuts = [0, *sorted(set(depths)), blocks]
        self._parts = [
            StageModel(spec, config, tensors, blocks=range(*cut), embeds=cut[0] == 0, heads=cut[1] == blocks)
            for cut in pairwise(cuts)
        ]
        self._ends = directory.eos

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Sequence[int]], most: int) -> Observed:
        """What is seen while the model answers some prompts together, each with `most` tokens at most."""
        capacity = max(map(len, prompts)) + most
        where = SlotRange.of(0, len(prompts), -(-capacity // CELL_ALIGNMENT) * CELL_ALIGNMENT)
        arena = self._arena(where)
        rows = {slot: list(prompt) for slot, prompt in enumerate(prompts)}
        first, seen = dict.fromkeys(rows, 0), list[Observed]()
        for step in range(most):
            spans = [RowSpan(slot, first[slot], len(tokens)) for slot, tokens in rows.items()]
            attention = PackedAttention(spans, where, arena, device=CPU)
            places = torch.tensor(np.asarray(positions(spans)))
            tokens = torch.tensor([token for row in rows.values() for token in row])
            hidden = self._behind_each(tokens, places, attention)
            seen += self._noted(hidden, tokens, spans, _noted(spans), is_answer=step > 0)
            lasts = np.cumsum([span.count for span in spans]) - 1
            following = self._parts[-1].logits(hidden[-1][lasts]).argmax(-1).tolist()
            first = {span.slot: span.first + span.count for span in spans}
            rows = {
                span.slot: [token]
                for span, token in zip(spans, following, strict=True)
                if token not in self._ends
            }
            if not rows:
                break
        return _of_rows(seen)

    def _arena(self, where: SlotRange) -> Arena:
        model = self._parts[0]
        return Arena(
            blocks=range(self._parts[-1].blocks.stop),
            tiers=Tiers((where.count * where.capacity,)),
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            device=CPU,
        )

    def _behind_each(
        self, tokens: torch.Tensor, places: torch.Tensor, attention: PackedAttention
    ) -> list[torch.Tensor]:
        """A pack's hidden states [T, D] behind each part."""
        hidden = [self._parts[0].embed(tokens)]
        for part in self._parts:
            hidden.append(part.run(hidden[-1], places, attention))
        return hidden[1:]

    def _noted(
        self,
        hidden: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        spans: Sequence[RowSpan],
        noted: torch.Tensor,
        *,
        is_answer: bool,
    ) -> Iterator[Observed]:
        """The noted places of a pack, some at a time."""
        rows = torch.repeat_interleave(
            torch.tensor([span.slot for span in spans]), torch.tensor([span.count for span in spans])
        )
        for places in torch.split(noted, HEADED):
            chances = self._parts[-1].logits(hidden[-1][places]).softmax(-1)
            top = chances.topk(min(LIKELIEST, chances.shape[-1]), dim=-1)
            yield Observed(
                {
                    part.blocks.stop: unit(each[places]).half()
                    for part, each in zip(self._parts[:-1], hidden, strict=False)
                },
                top.indices.int(),
                top.values.half(),
                tokens[places].int(),
                rows[places].int(),
                torch.full((len(places),), is_answer),
            )


def _noted(spans: Sequence[RowSpan]) -> torch.Tensor:
    """Places [N] in a pack of the last tokens of each row."""
    ends = np.cumsum([span.count for span in spans])
    kept = [np.arange(end - min(span.count, OF_PROMPT), end) for span, end in zip(spans, ends, strict=True)]
    return torch.from_numpy(np.concatenate(kept))


def _of_rows(parts: Sequence[Observed]) -> Observed:
    """What was noted pass after pass, row after row."""
    joined = {name: torch.cat([getattr(one, name) for one in parts]) for name in _PLAIN}
    order = joined["sequence"].argsort(stable=True)
    hidden = {depth: torch.cat([one.hidden[depth] for one in parts])[order] for depth in parts[0].hidden}
    return Observed(hidden, **{name: one[order] for name, one in joined.items()})
