"""What a model is, to the byte, in some kilobytes: so that machines can agree before they compute.

A manifest needs no weights to be compared: a laptop that coordinates may hold manifest.json in their place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bbquic.errors import ModelError
from bbquic.model.directory import MANIFEST, MAX_JSON, ModelDirectory
from bbquic.model.hashes import HashCache, file_sha256
from bbquic.model.registry import user_cache

# Fields of config.json that say nothing of the computation; any other that differs is a difference.
WITHOUT_EFFECT = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class TensorDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as it is stored; `sha256` is of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    sha256: Sha256

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's identity: its config, its tokenizer and each tensor. `model` is its name, for people."""

    model: str
    config: dict[str, str]  # config.json's fields that have an effect, each as canonical JSON
    tokenizer: Sha256  # of tokenizer.json
    tensors: dict[str, TensorDigest]

    @property
    def digest(self) -> str:
        """128 bits in hexadecimal over everything but the name: equal iff `compare` finds no difference."""
        encoded = msgspec.json.encode((self.config, self.tokenizer, self.tensors), order="deterministic")
        return hashlib.sha256(encoded).hexdigest()[:32]

    def only(self, names: Iterable[str]) -> Manifest:
        """The same of some tensors only. Raises: ModelError naming one that the model lacks."""
        try:
            return msgspec.structs.replace(self, tensors={name: self.tensors[name] for name in names})
        except KeyError as error:
            raise ModelError(f"the model {self.model} has no tensor {error.args[0]}") from None


def manifest_of(
    directory: ModelDirectory, names: Iterable[str] | None = None, *, hashes: HashCache | None = None
) -> Manifest:
    """The manifest of a directory, or of some of its tensors; only their files are read.

    Where the directory holds no weights, it is read from manifest.json. `hashes` saves reading files
    that have not changed; None is the user's cache. Raises: ModelError on missing tensors, or a
    manifest.json of another model.
    """
    if not directory.has_weights:
        whole = _read_manifest(directory)
        return whole if names is None else whole.only(names)
    hashes = hashes or HashCache(user_cache() / "hashes")
    tensors: dict[str, TensorDigest] = {}
    for file, held in directory.by_file(directory.files if names is None else names).items():
        digests = hashes.of_tensors(file, held)
        tensors |= {t.name: TensorDigest(t.dtype, t.shape, digests[t.name]) for t in held}
    return Manifest(directory.name, _config_fields(directory.fields), _tokenizer_digest(directory), tensors)


def write_manifest(directory: ModelDirectory, manifest: Manifest) -> Path:
    """Writes manifest.json beside config.json, whole or not at all; returns its path. Raises: ModelError."""
    path = directory.path / MANIFEST
    scratch = path.with_name(f".{MANIFEST}.{os.getpid()}")
    try:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        scratch.replace(path)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return path


def compare(expected: Manifest, held: Manifest, expected_by: str, held_by: str) -> None:
    """Passes if `held` has everything of `expected`, and the same; what it has beyond that is no matter.

    Names of models may differ: they are names of directories. Raises: ModelError naming both sides, and
    the first thing that differs.
    """
    for field in sorted(expected.config.keys() | held.config.keys()):
        theirs, ours = held.config.get(field), expected.config.get(field)
        if theirs != ours:
            what = (
                f"{held_by}'s config.json has {field} {theirs or 'unset'}, {expected_by}'s {ours or 'unset'}"
            )
            raise _difference(expected, held, expected_by, held_by, what)
    if expected.tokenizer != held.tokenizer:
        raise _difference(expected, held, expected_by, held_by, "their tokenizer.json differ")
    for name, wanted in expected.tensors.items():
        found = held.tensors.get(name)
        if found is None:
            raise _difference(expected, held, expected_by, held_by, f"{held_by} has no tensor {name}")
        for field in TensorDigest.__struct_fields__:
            theirs, ours = getattr(found, field), getattr(wanted, field)
            if theirs != ours:
                what = f"{name} has the {field} {theirs} at {held_by} and {ours} at {expected_by}"
                raise _difference(expected, held, expected_by, held_by, what)


def _difference(expected: Manifest, held: Manifest, expected_by: str, held_by: str, what: str) -> ModelError:
    return ModelError(
        f"{expected_by} and {held_by} do not hold the same model ({expected.model} and {held.model}): {what}",
        hint="copy the model's directory from one machine to the other",
    )


def _read_manifest(directory: ModelDirectory) -> Manifest:
    path = directory.path / MANIFEST
    try:
        with path.open("rb") as file:
            manifest = msgspec.json.decode(file.read(MAX_JSON), type=Manifest)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is not a manifest: {error}") from error
    if manifest.config != _config_fields(directory.fields):
        raise ModelError(f"{path} is of another model than the config.json beside it")
    if manifest.tokenizer != _tokenizer_digest(directory):
        raise ModelError(f"{path} is of another model than the tokenizer.json beside it")
    return msgspec.structs.replace(manifest, model=directory.name)


def _config_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: json.dumps(value, sort_keys=True, separators=(",", ":"))
        for name, value in sorted(fields.items())
        if name not in WITHOUT_EFFECT
    }


def _tokenizer_digest(directory: ModelDirectory) -> str:
    path = directory.path / "tokenizer.json"
    try:
        return file_sha256(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
