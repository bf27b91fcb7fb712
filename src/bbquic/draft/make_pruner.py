"""From prompts to a pruner on disk: a model looked into while it answers, then the training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from bbquic.draft.observe import Observed, Observer
from bbquic.draft.pruner_file import NAME, PrunerFile, write_pruner
from bbquic.draft.train_pruner import Progress, Score, Trainer, TrainOptions
from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.model.weights import load_tensors

OBSERVED = "observed"  # the folder of what was seen: kept, so that another training need not look again


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """depths: of first stages, in blocks; empty: each that the model can have. answer: tokens of one at most.
    together: prompts that are answered at once."""

    depths: tuple[int, ...] = ()
    answer: int = 128
    together: int = 24
    train: TrainOptions = field(default_factory=TrainOptions)


def make_pruner(
    directory: ModelDirectory,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    options: MakeOptions,
    progress: Progress,
) -> tuple[PrunerFile, Mapping[int, Score]]:
    """The pruner in `folder`, and what each depth is worth. Minutes to hours, on this thread and the CPU.

    What is seen goes to `folder`/observed prompt by prompt; a call that was interrupted goes on from there.
    Raises: ModelError; OSError where it cannot be written.
    """
    depths = options.depths or tuple(range(1, directory.blocks))
    if not 1 <= min(depths) <= max(depths) < directory.blocks:
        raise ModelError(
            f"a first stage of {directory.name} has 1 to {directory.blocks - 1} blocks, not {depths}",
            hint="say another --first-blocks",
        )
    if len(prompts) < 2:
        raise ModelError(f"{len(prompts)} prompts are too few to train on")
    seen = _observed(directory, manifest, prompts, folder / OBSERVED, options, depths, progress)
    name = directory.spec.weights.embed
    shape = (int(directory.config.vocab_size), int(directory.config.hidden_size))
    embedding = load_tensors(directory, {name: shape}, torch.float32, "cpu")[name]
    trained = Trainer(seen, embedding, options.train, progress).train()
    shared = {name: one.numpy() for name, one in trained.shared.items()}
    parts = {
        depth: {name: one.numpy() for name, one in part.items()} for depth, part in trained.parts.items()
    }
    file = write_pruner(folder / NAME, shared, parts, manifest, name, trained.threshold)
    return file, trained.scores


def _observed(
    directory: ModelDirectory,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    options: MakeOptions,
    depths: Sequence[int],
    progress: Progress,
) -> Observed:
    """What the model says to all prompts; batches that an earlier call saw are read."""
    folder.mkdir(parents=True, exist_ok=True)
    observer: Observer | None = None
    parts: list[Observed] = []
    for start in range(0, len(prompts), options.together):
        progress("answering prompts", start, len(prompts))
        some = prompts[start : start + options.together]
        path = folder / f"{_name(manifest, some, options.answer, depths)}.safetensors"
        try:
            parts.append(Observed.read(path, depths))
        except (OSError, SafetensorError):
            observer = observer or Observer(directory, depths)
            parts.append(observer.answers(some, options.answer))
            parts[-1].write(path)
    return Observed.together(parts)


def _name(manifest: Manifest, prompts: Sequence[Sequence[int]], answer: int, depths: Sequence[int]) -> str:
    """Of a batch: all that decides what is seen."""
    what = repr((manifest.digest, [list(one) for one in prompts], answer, list(depths)))
    return hashlib.sha256(what.encode()).hexdigest()[:24]
