"""A small model as a GGUF file, written as llama.cpp's converter writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import load_file

from bbquic.model.spec import spec_for_type

LEFT_OUT = object()  # as a field's or tensor's new value


def write_tiny_gguf(
    model: Path,
    target: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `make_tiny_llama`'s `model` to `target`, matrices as `kind`; `fields` and `tensors` replace."""
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    for name, value in (tiny_fields(model, config) | dict(fields or {})).items():
        if value is LEFT_OUT:
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, values in (tiny_tensors(model, config) | dict(tensors or {})).items():
        if values is LEFT_OUT:
            continue
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def tiny_fields(model: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "tokenizer.ggml.token_type": [
            3 if token in special else 1 for token in sorted(vocabulary, key=vocabulary.__getitem__)
        ],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": json.loads((model / "tokenizer_config.json").read_text())["chat_template"],
    }


def tiny_tensors(model: Path, config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    layout = spec_for_type("llama").gguf
    assert layout is not None
    names = dict(layout.weights)
    heads: dict[str, int] = {}
    for block in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{block}."
        names |= {prefix + ours: f"blk.{block}.{theirs}" for ours, theirs in layout.block_weights.items()}
        heads[prefix + "self_attn.q_proj.weight"] = config["num_attention_heads"]
        heads[prefix + "self_attn.k_proj.weight"] = config["num_key_value_heads"]
    weights = {name: t.float().numpy() for name, t in load_file(model / "model.safetensors").items()}
    return {
        names[name]: permuted(values, heads[name]) if name in heads else values
        for name, values in weights.items()
    }


def permuted(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's `permute` (convert_hf_to_gguf.py): the two halves of a head become neighbours."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)
