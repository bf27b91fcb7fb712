"""A distilled draft on disk: its own blocks, and which target's embedding, head and tokenizer it goes with.

    config.json         the target's, with as many blocks as the draft has
    draft.json          what is not here and must be the target's: by name, sha256 of its bytes there
    model.safetensors   blocks and norm: vectors as F32; a matrix [out, in] as I8, with NAME.scale F32 [out]

A row's values are the bytes times its scale. Neither embedding nor head nor tokenizer is stored again: they
are most of a small model. A directory with draft.json is of use to that one target only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import load_file, save_file

from bbquic.errors import ModelError
from bbquic.model.directory import MAX_JSON, SINGLE, ModelDirectory
from bbquic.model.manifest import Sha256, manifest_of
from bbquic.model.stored import read_header
from bbquic.model.weights import Shape, load_tensors

DESCRIPTION = "draft.json"
SCALE = ".scale"
STEPS = 127  # of a scale, each way


class Distilled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What draft.json says. `target` is a name for people; `made` tells how it was made, for them too."""

    target: str
    tokenizer: Sha256  # of the target's tokenizer.json
    shared: dict[str, Sha256]  # the target's tensors that the draft uses
    blocks: tuple[int, ...]  # of the target, with which it began
    made: dict[str, Any] = {}
    version: Literal[1] = 1

    def check(self, draft: ModelDirectory, target: ModelDirectory) -> None:
        """Raises: ModelError naming the first thing that `target` does not have, or has otherwise."""
        found = manifest_of(target, [*self.shared])
        differs = [name for name, digest in self.shared.items() if found.tensors[name].sha256 != digest]
        if found.tokenizer != self.tokenizer:
            differs.insert(0, "tokenizer.json")
        if differs:
            raise ModelError(
                f"the draft model {draft.name} was distilled from {self.target}, and {target.name} is "
                f"another model: its {differs[0]} differs",
                hint="`bbquic draft distill --model` makes one for it",
            )


def read_distilled(draft: ModelDirectory) -> Distilled | None:
    """None where the directory is a whole model. Raises: ModelError where draft.json is damaged."""
    path = draft.path / DESCRIPTION
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_JSON), type=Distilled)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is damaged: {error}") from error


def load_distilled(
    draft: ModelDirectory,
    distilled: Distilled,
    target: ModelDirectory,
    needed: Mapping[str, Shape],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Tensors of `weights.tensors_for`: what the target shares from there, the others from the draft.

    Raises: ModelError as `Distilled.check`, and naming a tensor that is missing or damaged.
    """
    distilled.check(draft, target)
    shared = {name: shape for name, shape in needed.items() if name in distilled.shared}
    own = {name: shape for name, shape in needed.items() if name not in shared}
    return load_tensors(target, shared, dtype, torch.device("cpu")) | {
        name: tensor.to(dtype) for name, tensor in read_own(draft.path / SINGLE, own).items()
    }


def read_own(file: Path, needed: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """float32 values of what a draft stores. Raises: ModelError naming one that is not as it should be."""
    header = read_header(file)  # which refuses a file that contradicts itself
    for name, shape in needed.items():
        stored = header.get(name)
        if stored is None or stored.shape != shape or stored.dtype != ("I8" if len(shape) > 1 else "F32"):
            raise ModelError(f"{file} has no {name} of the shape {shape} as a distilled draft stores it")
        scale = header.get(name + SCALE)
        if len(shape) > 1 and (scale is None or scale.shape != shape[:1] or scale.dtype != "F32"):
            raise ModelError(f"{file} has no scales for {name}")
    held = load_file(file)
    values = {name: held[name] for name in needed}
    for name, shape in needed.items():
        if len(shape) > 1:
            values[name] = held[name].float() * held[name + SCALE][:, None]
        if not values[name].isfinite().all():
            raise ModelError(f"{file} is damaged: {name} is not finite")
    return values


def write_distilled(
    folder: Path, target: ModelDirectory, distilled: Distilled, trained: Mapping[str, torch.Tensor]
) -> None:
    """Write a directory; draft.json comes last and is what makes it one. Raises: ModelError."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in trained.items():
        value = value.detach().float()
        if value.ndim == 1:
            tensors[name] = value.contiguous()
        else:
            scale = (value.abs().amax(1) / STEPS).clamp(min=torch.finfo(torch.float32).tiny)
            tensors[name] = (value / scale[:, None]).round().to(torch.int8)
            tensors[name + SCALE] = scale
    fields = dict(target.fields) | {"num_hidden_layers": len(distilled.blocks)}
    if isinstance(kinds := fields.get("layer_types"), list):
        fields["layer_types"] = [kinds[block] for block in distilled.blocks]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DESCRIPTION).unlink(missing_ok=True)
        _write_json(folder / "config.json", fields)
        scratch = folder / f".{SINGLE}.{os.getpid()}"
        save_file(tensors, scratch, metadata={"format": "pt"})
        scratch.replace(folder / SINGLE)
        _write_json(folder / DESCRIPTION, distilled)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror}") from error


def describe(
    target: ModelDirectory, shared: Iterable[str], blocks: Iterable[int], made: Mapping[str, Any]
) -> Distilled:
    """Of a draft for `target`, with the digests of the tensors that it shares."""
    found = manifest_of(target, list(shared))
    digests = {name: tensor.sha256 for name, tensor in found.tensors.items()}
    return Distilled(target.name, found.tokenizer, digests, tuple(blocks), dict(made))


def _write_json(path: Path, value: Any) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(value)))
    scratch.replace(path)
