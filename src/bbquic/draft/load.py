"""From a model's directory to a drafter: its tokenizer compared, its weights read, its memory counted."""

from __future__ import annotations

from dataclasses import replace

import torch

from bbquic.draft.distilled import load_distilled, read_distilled
from bbquic.draft.small import ModelDrafter, ModelDrafterOptions
from bbquic.errors import ModelError
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.tokenizer_difference import refuse_other_tokenizer
from bbquic.model.weights import load_tensors, tensors_for
from bbquic.units import Bytes

DTYPE = torch.float32  # a CPU computes in no other one faster


def load_drafter(
    draft: ModelDirectory, target: ModelDirectory, options: ModelDrafterOptions, *, free: Bytes
) -> ModelDrafter:
    """The model of `draft` as a drafter for `target`, on this machine's CPU, within `free` bytes of memory.

    A distilled one takes its ends and its tokenizer from the target's directory. Raises: ModelError, naming
    the first difference, where tokenizers differ or it was distilled from another model; with the figures,
    where memory is short; as loading does.
    """
    distilled = read_distilled(draft)
    if distilled is None:
        refuse_other_tokenizer(draft, target)
    blocks = range(draft.blocks)
    needed = tensors_for(draft.spec, draft.config, blocks, embeds=True, heads=True)
    weights = sum(torch.Size(shape).numel() for shape in needed.values()) * DTYPE.itemsize
    if weights >= free:
        raise ModelError(
            f"the draft model {draft.name} needs {weights:,} bytes for its weights; {free:,} are free here",
            hint="use a smaller one, or --draft ngram",
        )
    if distilled is None:
        tensors = load_tensors(draft, needed, DTYPE, torch.device("cpu"))
    else:
        tensors = load_distilled(draft, distilled, target, needed, DTYPE)
    model = StageModel(draft.spec, draft.config, tensors, blocks=blocks, embeds=True, heads=True)
    return ModelDrafter(
        model,
        name=draft.name,
        vocabulary=int(target.config.vocab_size),
        known=int(draft.config.vocab_size),
        context=draft.context_length,
        options=replace(options, memory=min(options.memory, Bytes(free - weights))),
    )
