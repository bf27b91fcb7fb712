"""A trained pruner on disk: safetensors, with the digest of the model that it is for. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest

NAME = "pruner.safetensors"  # in a model's directory, and in the folder that training writes to
FORMAT = "bbquic pruner 1"
SHIPPED = Path(__file__).parent / "artefacts"  # what comes with the package, by the model's digest
SHARED = ("factor", "common")  # of all depths
OWN = ("adapter", "mlp.0.weight", "mlp.0.bias", "mlp.1.weight", "mlp.1.bias")  # of each

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PrunerFile:
    """What a file says of itself; tensors are read when a part is asked for.

    model: digest of the manifest, name: the model's, for people. embedding: sha256 of the tensor that
    `factor` goes with. threshold: what training found to be of use. depths: blocks of first stages, rising.
    """

    path: Path
    name: str
    model: str
    embedding: str
    threshold: float
    depths: tuple[int, ...]

    @classmethod
    def open(cls, path: Path) -> PrunerFile:
        """Raises: ModelError for what cannot be read, or is no pruner."""
        try:
            with safe_open(path, "np") as file:
                fields, names = file.metadata() or {}, set(file.keys())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the pruner {path}: {error}") from error
        if fields.get("format") != FORMAT:
            raise ModelError(
                f"{path} is not a pruner of this version: its format is {fields.get('format')!r}",
                hint="train one with `bbquic draft train-pruner`",
            )
        depths = sorted(
            {int(head) for head, _, _ in (name.partition(".") for name in names) if head.isdecimal()}
        )
        if not depths or names != {*SHARED, *(f"{depth}.{name}" for depth in depths for name in OWN)}:
            raise ModelError(f"{path} does not have a pruner's tensors")
        try:
            return cls(
                path,
                fields["name"],
                fields["model"],
                fields["embedding"],
                _share(fields["threshold"]),
                tuple(depths),
            )
        except (KeyError, ValueError) as error:
            raise ModelError(f"{path} does not say of what it is: {error}") from error

    def check(self, manifest: Manifest) -> PrunerFile:
        """Itself. Raises: ModelError, naming both, where it is of another model."""
        if self.model != manifest.digest:
            raise ModelError(
                f"the pruner {self.path} is of another model, {self.name} {self.model[:12]}, than "
                f"{manifest.model} {manifest.digest[:12]}",
                hint=f"train one for {manifest.model} with `bbquic draft train-pruner`, or say --no-prune",
            )
        return self

    def part(self, depth: int) -> bytes:
        """The pruner of one depth as safetensors. Raises: ModelError where there is none, or none to read."""
        if depth not in self.depths:
            raise ModelError(
                f"the pruner {self.path} is for first stages of {self.words}, not of {depth} blocks"
            )
        try:
            with safe_open(self.path, "np") as file:
                tensors = {name: file.get_tensor(name) for name in SHARED}
                tensors |= {name: file.get_tensor(f"{depth}.{name}") for name in OWN}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the pruner {self.path}: {error}") from error
        return save(tensors)

    @property
    def words(self) -> str:
        """Its depths: `1 to 29`, or each."""
        first, last = self.depths[0], self.depths[-1]
        if len(self.depths) > 2 and self.depths == tuple(range(first, last + 1)):
            return f"{first} to {last}"
        return ", ".join(map(str, self.depths))


def write_pruner(
    path: Path,
    shared: Arrays,
    parts: Mapping[int, Arrays],
    manifest: Manifest,
    embedding: str,
    threshold: float,
) -> PrunerFile:
    """Writes a file, whole or not at all: `parts` by depth, `embedding` the name of that tensor.

    Raises: OSError; KeyError for a model whose manifest lacks the embedding.
    """
    fields = {
        "format": FORMAT,
        "name": manifest.model,
        "model": manifest.digest,
        "embedding": manifest.tensors[embedding].sha256,
        "threshold": str(threshold),
    }
    tensors = {name: np.ascontiguousarray(shared[name]) for name in SHARED}
    for depth, part in parts.items():
        tensors |= {f"{depth}.{name}": np.ascontiguousarray(part[name]) for name in OWN}
    scratch = path.with_name(f".{path.name}")
    save_file(tensors, scratch, metadata=fields)
    scratch.replace(path)
    return PrunerFile.open(path)


def find_pruner(
    directory: ModelDirectory, manifest: Manifest, wanted: Path | None = None
) -> PrunerFile | None:
    """The one that is `wanted`, else that in the model's directory, else the one that ships for that model.

    None where there is none. Raises: ModelError for one that is damaged or of another model.
    """
    shipped = SHIPPED / f"{manifest.digest}.{NAME}"
    for path in (wanted,) if wanted is not None else (directory.path / NAME, shipped):
        if path == wanted or path.is_file():
            return PrunerFile.open(path).check(manifest)
    return None


def _share(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"a threshold of {text}")
    return value
