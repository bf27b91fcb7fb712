"""Which tensors a stage needs, and reading those and no others from disk."""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO
from typing import Any

import torch

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.spec import FamilySpec, load_class
from bbquic.model.stored import StoredTensor

Shape = tuple[int, ...]


def tensors_for(
    spec: FamilySpec, config: Any, blocks: range, *, embeds: bool, heads: bool
) -> dict[str, Shape]:
    """Checkpoint name and shape of each tensor of some blocks, and of the first or last stage's ends.

    A tied head is the embedding's tensor, named once. Raises: ModelError on blocks the model lacks.
    """
    if blocks and not 0 <= min(blocks) <= max(blocks) < config.num_hidden_layers:
        raise ModelError(f"the model has blocks 0 to {config.num_hidden_layers - 1}, not {blocks}")
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


# Whose values a dtype holds: never one of a smaller range, where large weights would become infinite.
_READABLE_AS = {
    "F32": (torch.float32, torch.bfloat16),
    "BF16": (torch.bfloat16, torch.float32),
    "F16": (torch.float16, torch.float32, torch.bfloat16),
}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_tensors(
    directory: ModelDirectory, needed: Mapping[str, Shape], dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Reads the tensors of `tensors_for`, in the order of the files, and opens no file without one.

    At most one tensor more than the result is in memory at a time: files are read, not mapped, since
    touched pages of a map count as the process's own.
    Raises: ModelError naming a tensor that is missing, of another shape, cut short, or whose dtype has a
    larger range than `dtype`.
    """
    loaded: dict[str, torch.Tensor] = {}
    for file, tensors in directory.by_file(needed).items():
        for tensor in tensors:
            _check(tensor, needed[tensor.name], dtype)
        with open(file, "rb", buffering=0) as opened:
            for tensor in tensors:
                loaded[tensor.name] = _read(opened, tensor).to(device=device, dtype=dtype)
    return loaded


def _check(tensor: StoredTensor, shape: Shape, dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise ModelError(f"{tensor.name} in {tensor.file} has the shape {tensor.shape}, not {shape}")
    allowed = _READABLE_AS.get(tensor.dtype, ())
    if dtype not in allowed:
        names = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        raise ModelError(
            f"{tensor.name} in {tensor.file} is {tensor.dtype}, which {dtype} cannot stand for",
            hint=f"run it in {names}" if names else None,
        )


def _read(opened: FileIO, tensor: StoredTensor) -> torch.Tensor:
    data = torch.empty(tensor.length, dtype=torch.uint8)
    left = data.numpy().data
    opened.seek(tensor.start)
    while left:
        count = opened.readinto(left)
        if not count:
            raise ModelError(f"{tensor.file} is cut short within {tensor.name}")
        left = left[count:]
    return data.view(_STORED[tensor.dtype]).reshape(tensor.shape)
