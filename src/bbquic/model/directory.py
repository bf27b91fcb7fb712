"""A model on disk as Hugging Face lays it out: config.json, a tokenizer, safetensors.

Opening reads config.json alone; of a weight file, its header when one of its tensors is asked about.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from bbquic.errors import ModelError
from bbquic.model.spec import FamilySpec, build_config, spec_for_type
from bbquic.model.stored import StoredTensor, read_header
from bbquic.model.tokenizer import Tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"
MAX_JSON = 64 << 20  # bytes; the index of the largest checkpoints has a few million
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")


class ModelDirectory:
    """An opened directory. `name` is what people and other nodes know the model by.

    Raises: ModelError where config.json is missing or damaged, asks for remote code, is of an unknown
    type or quantised, or where the only weights are pickles.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.fields = self._json("config.json")  # as they are in the file
        for field, reason in (
            ("auto_map", "wants to run code that comes with it"),
            ("quantization_config", "is quantised in a way that is not read here"),
        ):
            if self.fields.get(field) is not None:
                raise ModelError(f"the model in {path} {reason} (config.json has {field})")
        self.spec: FamilySpec = spec_for_type(self.fields.get("model_type"))
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        if not self.has_weights and not (path / MANIFEST).is_file():
            pickled = [file for file in PICKLES if (path / file).exists()]
            raise ModelError(
                f"{path} has weights as pickles only ({pickled[0]}), which can run code when opened"
                if pickled
                else f"{path} has no weights: neither {SINGLE} nor {INDEX}",
                hint="convert them to safetensors on a machine you can afford to lose"
                if pickled
                else f"a machine that holds no weights needs a {MANIFEST}: run `bbquic model manifest` "
                "where the weights are, and copy the file",
            )

    @cached_property
    def config(self) -> Any:
        """The transformers config; the first use imports transformers (seconds)."""
        return build_config(self.spec, self.fields)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.path)

    @property
    def blocks(self) -> int:
        return self._count("num_hidden_layers")

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together that the model was made for."""
        return self._count("max_position_embeddings")

    @property
    def head_name(self) -> str:
        """The tensor the LM head multiplies by; transformers is asked only where config.json is silent."""
        tied = self.fields.get("tie_word_embeddings")
        if tied is None:
            return self.spec.head_name(self.config)
        return self.spec.weights.embed if tied else self.spec.weights.head

    @cached_property
    def eos(self) -> frozenset[int]:
        """Tokens that end an answer: the generation config's, the config's and the tokenizer's together."""
        generation = self._json("generation_config.json", optional=True)
        found: set[int] = set()
        for source, value in (("generation_config.json", generation), ("config.json", self.fields)):
            tokens = value.get("eos_token_id")
            for token in tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]:
                if type(token) is not int or token < 0:
                    raise ModelError(
                        f"{self.path / source}: eos_token_id has {token!r}, not a token's number"
                    )
                found.add(token)
        if (token := self.tokenizer.eos_token_id) is not None:
            found.add(token)
        return frozenset(found)

    @property
    def has_weights(self) -> bool:
        return (self.path / SINGLE).is_file() or (self.path / INDEX).is_file()

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """Every tensor's file. Raises: ModelError without weights, or on an index that leads elsewhere."""
        if (self.path / INDEX).is_file():
            return {name: self.path / shard for name, shard in self._shards().items()}
        if not (self.path / SINGLE).is_file():
            raise ModelError(f"{self.path} holds no weights, only their {MANIFEST}")
        return dict.fromkeys(self._header(self.path / SINGLE), self.path / SINGLE)

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor is and what its file's header says of it. Raises: ModelError where it is missing."""
        if name not in self.files:
            raise ModelError(f"the model in {self.path} has no tensor {name}")
        header = self._header(self.files[name])
        if name not in header:
            raise ModelError(f"{self.files[name]} does not hold {name}, which {INDEX} says it does")
        return header[name]

    def by_file(self, names: Iterable[str]) -> dict[Path, list[StoredTensor]]:
        """The files that hold some tensors, and of each its tensors as they lie in it."""
        held: dict[Path, list[StoredTensor]] = {}
        for tensor in map(self.tensor, names):
            held.setdefault(tensor.file, []).append(tensor)
        return {file: sorted(tensors, key=lambda tensor: tensor.start) for file, tensors in held.items()}

    def _header(self, file: Path) -> Mapping[str, StoredTensor]:
        if file.name not in self._headers:
            self._headers[file.name] = read_header(file)
        return self._headers[file.name]

    def _shards(self) -> dict[str, str]:
        shards = self._json(INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(f"{self.path / INDEX} has no weight_map")
        for shard in shards.values():
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ModelError(
                    f"{self.path / INDEX} names {shard!r}, which is not a safetensors file beside it"
                )
        return shards

    def _count(self, field: str) -> int:
        value = self.fields.get(field)
        if type(value) is not int or value < 1:
            raise ModelError(f"{self.path / 'config.json'}: {field} is {value!r}, not a number from 1 up")
        return value

    def _json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        if optional and not (self.path / name).exists():
            return {}
        return read_json(self.path / name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises: ModelError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON + 1)
        if len(raw) > MAX_JSON:
            raise ModelError(f"{path} is larger than {MAX_JSON >> 20} MiB")
        value = json.loads(raw)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value
