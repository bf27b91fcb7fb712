"""Families of models as data: which transformers classes compute them, and what their weights are called."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import yaml

from bbquic.errors import ModelError

BLOCK = "{block}"  # stands for a block's number in a name


class Classes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dotted paths of transformers classes. Strings, so that reading a spec imports none of them."""

    config: str
    decoder_layer: str
    rotary_embedding: str
    norm: str

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            path = getattr(self, field)
            if not path.startswith("transformers.models.") or not path.replace(".", "").isidentifier():
                raise ValueError(
                    f"{field} is the dotted path of a class in transformers.models, not {path!r}"
                )


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of tensors in a checkpoint; `block` is a prefix with `{block}` in it."""

    embed: str
    block: str
    norm: str
    head: str

    def __post_init__(self) -> None:
        if self.block.count(BLOCK) != 1 or not self.block.endswith("."):
            raise ValueError(f"block is a prefix with one {BLOCK} that ends in '.', not {self.block!r}")


class GGUFLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The family in a GGUF file: fields and tensors by our names (see families/llama.yaml)."""

    architecture: str
    config: dict[str, str]
    rope_theta: str
    weights: dict[str, str]
    block: str
    block_weights: dict[str, str]
    interleaved: dict[str, str]

    def __post_init__(self) -> None:
        if self.block.count(BLOCK) != 1:
            raise ValueError(f"block is a prefix with one {BLOCK}, not {self.block!r}")
        for name in self.interleaved:
            if name not in self.block_weights:
                raise ValueError(f"interleaved names {name!r}, which is not in block_weights")


class FamilySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One family. Built by `families` or `spec_for`."""

    model_types: tuple[str, ...]
    classes: Classes
    weights: Weights
    gguf: GGUFLayout | None = None

    def block_prefix(self, block: int) -> str:
        """What the names of a block's tensors begin with."""
        return self.weights.block.replace(BLOCK, str(block))

    def head_name(self, config: Any) -> str:
        """The tensor the LM head multiplies by: the embedding where the config ties them."""
        return self.weights.embed if config.tie_word_embeddings else self.weights.head


def spec_for(config: Any) -> FamilySpec:
    """The family of a transformers config, by its `model_type`. Raises: ModelError on an unknown one."""
    return spec_for_type(config.model_type)


def spec_for_type(model_type: object) -> FamilySpec:
    """The family of a `model_type`. Raises: ModelError on an unknown one, listing those known."""
    known = {name: spec for spec in families() for name in spec.model_types}
    if not isinstance(model_type, str) or model_type not in known:
        raise ModelError(
            f"models of type {model_type!r} are not supported",
            hint=f"supported types: {', '.join(sorted(known))}",
        )
    return known[model_type]


@cache
def families() -> tuple[FamilySpec, ...]:
    """Every family this package knows, in the order of their files' names."""
    folder = files("bbquic.model") / "families"
    described = {file.name: file for file in folder.iterdir() if file.name.endswith(".yaml")}
    return tuple(
        parse_family(described[name].read_text(encoding="utf-8"), name) for name in sorted(described)
    )


def parse_family(text: str, name: str) -> FamilySpec:
    """The family a YAML text describes. Raises: ModelError naming file, field and what it should be."""
    try:
        return msgspec.convert(yaml.safe_load(text), FamilySpec)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise ModelError(f"the family description {name} is wrong: {error}") from error


def load_class(path: str) -> type[Any]:
    """The class at a dotted path of `Classes`. Raises: ModelError where this transformers lacks it."""
    module, _, name = path.rpartition(".")
    try:
        found: type[Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"the installed transformers has no {path}", hint="pip install 'transformers>=5.20,<6'"
        ) from error
    return found


def build_config(spec: FamilySpec, fields: dict[str, Any]) -> Any:
    """The family's transformers config from config.json's fields. Raises: ModelError on values it refuses."""
    config_class = load_class(spec.classes.config)
    try:
        return config_class.from_dict(fields)
    except Exception as error:  # each config class validates in its own way and raises its own types
        raise ModelError(f"config.json is not a valid {config_class.__name__}: {error}") from error
