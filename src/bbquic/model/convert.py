"""Turns a GGUF file into a Hugging Face directory: bf16 safetensors, config, tokenizer, chat template.

Everything about the model comes from the file; a field or tensor that is not expected is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bbquic.errors import ModelError
from bbquic.model.gguf import GGUFFile, read_gguf
from bbquic.model.spec import BLOCK, FamilySpec, GGUFLayout, build_config, families
from bbquic.model.weights import tensors_for

MAX_DIMENSION = 1 << 20  # of anything config.json counts; the largest there is are contexts of a million
MAX_FLOAT = 1e12  # the largest there are are rotary bases of some millions
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type: matched whole in text, and skipped when decoding
NORMAL_TOKEN = 1


def convert_gguf(source: Path, directory: Path) -> None:
    """Writes the model of `source` into the existing `directory`, complete or with an error.

    Raises: ModelError on a file that is damaged, or of a family, tokenizer or layout not known.
    """
    file = read_gguf(source)
    spec, layout = _family(file)
    config = _config(file, layout, spec)
    _write_json(directory / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", special)
    _write_tokenizer(file, directory, max_length=config["max_position_embeddings"])
    save_file(
        _tensors(file, spec, layout, config), directory / "model.safetensors", metadata={"format": "pt"}
    )


def _family(file: GGUFFile) -> tuple[FamilySpec, GGUFLayout]:
    architecture = _field(file, "general.architecture", str)
    layouts = {spec.gguf.architecture: (spec, spec.gguf) for spec in families() if spec.gguf}
    if architecture not in layouts:
        raise ModelError(
            f"GGUF files of the architecture {architecture!r} are not supported",
            hint=f"supported: {', '.join(sorted(layouts))}",
        )
    return layouts[architecture]


def _field(file: GGUFFile, name: str, kind: type[Any]) -> Any:
    value = file.fields.get(name)
    if type(value) is not kind:
        raise ModelError(f"the GGUF file's field {name!r} is {value!r:.60}, not of type {kind.__name__}")
    return value


def _members(file: GGUFFile, name: str, kind: type[Any]) -> list[Any]:
    members: list[Any] = _field(file, name, list)
    if not all(type(member) is kind for member in members):
        raise ModelError(f"the GGUF file's field {name!r} has members that are not of type {kind.__name__}")
    return members


def _config(file: GGUFFile, layout: GGUFLayout, spec: FamilySpec) -> dict[str, Any]:
    prefix = layout.architecture + "."
    config: dict[str, Any] = {"model_type": spec.model_types[0]}
    for ours, theirs in layout.config.items():
        config[ours] = _number(file, prefix + theirs, float if ours.endswith("_eps") else int)
    if unknown := [name for name in file.fields if name.startswith(prefix + "rope.scaling")]:
        raise ModelError(f"the GGUF file scales its rotary embedding ({unknown[0]}), which is not converted")
    theta = _number(file, prefix + layout.rope_theta, float)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config["tie_word_embeddings"] = layout.weights[spec.weights.head] not in file.tensors
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = _special_token(file, theirs)
    return config | {"dtype": "bfloat16"}


def _number(file: GGUFFile, name: str, kind: type[int] | type[float]) -> int | float:
    value: int | float = _field(file, name, kind)
    if not 0 < value <= (MAX_DIMENSION if kind is int else MAX_FLOAT):  # NaN is not
        raise ModelError(f"the GGUF file's {name} is {value}")
    # A float32 is written in the fewest digits that mean it: 1e-05, not 9.999999747378752e-06.
    return value if kind is int else float(str(np.float32(value)))


def _special_token(file: GGUFFile, name: str) -> int | None:
    field = f"tokenizer.ggml.{name}_token_id"
    if field not in file.fields:
        return None
    token: int = _field(file, field, int)
    if not 0 <= token < len(_field(file, "tokenizer.ggml.tokens", list)):
        raise ModelError(f"the GGUF file's {field} is {token}, which is not a token")
    return token


def _tensors(
    file: GGUFFile, spec: FamilySpec, layout: GGUFLayout, config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    blocks = range(config["num_hidden_layers"])
    if len(blocks) > len(file.tensors):
        raise ModelError(f"the GGUF file has {len(file.tensors)} tensors for {len(blocks)} blocks")
    typed = build_config(spec, config)
    expected = tensors_for(spec, typed, blocks, embeds=True, heads=True)
    theirs = {ours: name for ours, name in layout.weights.items() if ours in expected}
    heads: dict[str, int] = {}
    for block in blocks:
        ours_prefix, their_prefix = spec.block_prefix(block), layout.block.replace(BLOCK, str(block))
        theirs |= {ours_prefix + o: their_prefix + t for o, t in layout.block_weights.items()}
        heads |= {ours_prefix + name: config[field] for name, field in layout.interleaved.items()}
    if differing := set(theirs.values()) ^ set(file.tensors):
        raise ModelError(
            f"the GGUF file lacks or does not expect tensors: {', '.join(sorted(differing)[:5])}"
        )
    converted = {}
    for name, shape in expected.items():
        found = file.tensors[theirs[name]].shape
        if found != shape:
            raise ModelError(f"the GGUF file's {theirs[name]} has the shape {found}, not {shape}")
        values = file.dequantized(theirs[name])
        if name in heads:
            if shape[0] % (2 * heads[name]):
                raise ModelError(f"the GGUF file's {theirs[name]} does not divide into {heads[name]} heads")
            values = _rotary_halves(values, heads[name])
        converted[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return converted


def _rotary_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes llama.cpp's order: it rotates neighbouring rows of a head, transformers row i and i + half."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(file: GGUFFile, directory: Path, max_length: int) -> None:
    if file.fields.get("tokenizer.ggml.add_bos_token", False):
        raise ModelError("the GGUF file's tokenizer begins every text with a token, which is not converted")
    tokens: list[str] = _members(file, "tokenizer.ggml.tokens", str)
    types: list[int] = _members(file, "tokenizer.ggml.token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _members(file, "tokenizer.ggml.merges", str)]
    if len(types) != len(tokens) or not set(types) <= {NORMAL_TOKEN, CONTROL_TOKEN}:
        raise ModelError("the GGUF file's token types are not one per token, normal or control")
    try:
        tokenizer = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers raises bare Exception on a merge of unknown tokens
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError("the GGUF file has a token twice")
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # as tokenizer.json says, and no family's own rules
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (token := _special_token(file, theirs)) is not None:
            settings[f"{ours}_token"] = tokens[token]
    if "tokenizer.chat_template" in file.fields:
        settings["chat_template"] = _field(file, "tokenizer.chat_template", str)
    _write_json(directory / "tokenizer_config.json", settings)


def _pre_tokenizer(file: GGUFFile) -> pre_tokenizers.PreTokenizer:
    """What llama.cpp's name for it stands for (its unicode.cpp and llama-vocab.cpp)."""
    kind = (_field(file, "tokenizer.ggml.model", str), _field(file, "tokenizer.ggml.pre", str))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"the GGUF file's tokenizer is {kind}, which is not converted")
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
