"""The target as a teacher: it answers prompts greedily, many at once, and tells its hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bbquic.kv.attention import PackedAttention
from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange, Tiers
from bbquic.kv.rows import RowSpan, positions
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.weights import load_tensors, tensors_for

PACK = 1024  # tokens of a pass over prompts
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Lesson:
    """A sequence as the target sees it.

    tokens: [T] int32. hidden: [T, D], behind the last block and before the norm, of each token. answer: where
    what the target said begins: hidden[answer - 1] is what chose tokens[answer]; T where nothing was said.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    answer: int


class Teacher:
    """All blocks of the target on this machine's CPU."""

    def __init__(self, directory: ModelDirectory, dtype: torch.dtype = torch.float32) -> None:
        """Raises: ModelError as loading does."""
        blocks = range(directory.blocks)
        needed = tensors_for(directory.spec, directory.config, blocks, embeds=True, heads=True)
        tensors = load_tensors(directory, needed, dtype, CPU)
        self._model = StageModel(
            directory.spec, directory.config, tensors, blocks=blocks, embeds=True, heads=True
        )
        self._ends = torch.tensor(sorted(directory.eos), dtype=torch.int64)
        self.hidden_size = self._model.hidden_size

    def lessons(self, prompts: Sequence[Sequence[int]], most: int) -> list[Lesson]:
        """Each prompt and its greedy answer, up to an end token or `most` tokens; with 0 it is only read.

        The end token is not among a lesson's: nothing is computed behind it.
        """
        capacity = max(map(len, prompts)) + most
        capacity += -capacity % CELL_ALIGNMENT
        where = SlotRange.of(0, len(prompts), capacity)
        arena = Arena(
            blocks=self._model.blocks,
            tiers=Tiers((len(prompts) * capacity,)),
            kv_heads=self._model.kv_heads,
            head_dim=self._model.head_dim,
            dtype=self._model.dtype,
            device=CPU,
        )
        sequences = [_Sequence(slot, list(prompt), []) for slot, prompt in enumerate(prompts)]
        for group in _packs(sequences):
            self._pass(group, where, arena)
        open_ = sequences
        for _ in range(most):
            open_ = self._choose(open_)
            if not open_:
                break
            self._pass(open_, where, arena)
        return [
            Lesson(
                torch.tensor(one.tokens, dtype=torch.int32)[: len(hidden)],
                hidden,
                min(len(prompt), len(hidden)),
            )
            for one, prompt in zip(sequences, prompts, strict=True)
            for hidden in (torch.cat(one.hidden),)
        ]

    def _choose(self, sequences: Sequence[_Sequence]) -> list[_Sequence]:
        """Give each its next token; those that go on."""
        logits = self._model.logits(torch.stack([one.hidden[-1][-1] for one in sequences]))
        chosen = logits.argmax(-1)
        ended = torch.isin(chosen, self._ends).tolist()
        for one, token in zip(sequences, chosen.tolist(), strict=True):
            one.tokens.append(token)
        return [one for one, end in zip(sequences, ended, strict=True) if not end]

    def _pass(self, sequences: Sequence[_Sequence], where: SlotRange, arena: Arena) -> None:
        """What each has that was not computed yet."""
        rows = [RowSpan(one.slot, one.computed, len(one.tokens) - one.computed) for one in sequences]
        tokens = [token for one in sequences for token in one.tokens[one.computed :]]
        attention = PackedAttention(rows, where, arena, device=CPU)
        hidden = self._model.embed(torch.tensor(tokens))
        hidden = self._model.run(hidden, torch.from_numpy(positions(rows)), attention)
        for one, new in zip(sequences, torch.split(hidden, [row.count for row in rows]), strict=True):
            one.hidden.append(new.clone())
            one.computed += len(new)


@dataclass(slots=True)
class _Sequence:
    slot: int
    tokens: list[int]
    hidden: list[torch.Tensor]
    computed: int = 0


def _packs(sequences: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
    """Groups of about `PACK` tokens."""
    group: list[_Sequence] = []
    for one in sequences:
        group.append(one)
        if sum(len(each.tokens) for each in group) >= PACK:
            yield group
            group = []
    if group:
        yield group
