from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bbquic.errors import ModelError
from bbquic.model.convert import convert_gguf
from bbquic.model.directory import ModelDirectory
from tiny_gguf import LEFT_OUT, write_tiny_gguf
from tiny_model import make_tiny_llama


def converted(source: Path, directory: Path) -> Path:
    directory.mkdir()
    convert_gguf(source, directory)
    return directory


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_comes_back_as_it_was_in_bfloat16(tmp_path: Path, tied: bool) -> None:
    original = make_tiny_llama(tmp_path / "original", tied=tied, dtype=torch.bfloat16)
    back = converted(write_tiny_gguf(original, tmp_path / "tiny.gguf"), tmp_path / "back")
    expected, found = load_file(original / "model.safetensors"), load_file(back / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    ours, theirs = ModelDirectory(back, "back"), ModelDirectory(original, "original")
    for field in (
        "rope_parameters",
        "rms_norm_eps",
        "head_dim",
        "tie_word_embeddings",
        "num_key_value_heads",
    ):
        assert getattr(ours.config, field) == getattr(theirs.config, field)


def test_transformers_opens_the_result_and_computes_the_same(tmp_path: Path) -> None:
    original = make_tiny_llama(tmp_path / "original", dtype=torch.bfloat16)
    back = converted(write_tiny_gguf(original, tmp_path / "tiny.gguf"), tmp_path / "back")
    tokens = AutoTokenizer.from_pretrained(back)("the world of words", return_tensors="pt").input_ids
    logits = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
        for path in (original, back)
    ]
    assert torch.equal(*logits)


def test_quantised_weights_come_back_near_to_what_they_were(tmp_path: Path) -> None:
    original = make_tiny_llama(tmp_path / "original")
    source = write_tiny_gguf(original, tmp_path / "tiny.gguf", kind=GGMLQuantizationType.Q8_0)
    found = load_file(converted(source, tmp_path / "back") / "model.safetensors")
    for name, tensor in load_file(original / "model.safetensors").items():
        assert (found[name].float() - tensor).abs().max() < 0.02 * tensor.abs().max()


def test_digits_stand_alone_and_special_tokens_whole(tiny: Path, tmp_path: Path) -> None:
    back = converted(write_tiny_gguf(tiny, tmp_path / "tiny.gguf"), tmp_path / "back")
    tokenizer = ModelDirectory(back, "back").tokenizer
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert len(tokenizer.encode("2024")) == 4
    for text in ("and which words", "é漢👍", "a\n\n b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


REFUSED_FIELDS: dict[str, dict[str, Any]] = {
    "another architecture": {"general.architecture": "mamba"},
    "blocks left out": {"llama.block_count": LEFT_OUT},
    "no blocks": {"llama.block_count": 0},
    "endless blocks": {"llama.block_count": 2**31},
    "more blocks than tensors": {"llama.block_count": 2**20},
    "wide": {"llama.embedding_length": 2**31},
    "another width": {"llama.embedding_length": 128},
    "heads that do not divide": {"llama.attention.head_count": 3},
    "a head of odd size": {"llama.rope.dimension_count": 13},
    "text for a number": {"llama.context_length": "512"},
    "eps that is no number": {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    "endless rope": {"llama.rope.freq_base": float("inf")},
    "scaled rope": {"llama.rope.scaling.type": "yarn"},
    "another tokenizer": {"tokenizer.ggml.model": "llama"},
    "another pre-tokenizer": {"tokenizer.ggml.pre": "qwen2"},
    "a bos before every text": {"tokenizer.ggml.add_bos_token": True},
    "tokens left out": {"tokenizer.ggml.tokens": LEFT_OUT},
    "types left out": {"tokenizer.ggml.token_type": LEFT_OUT},
    "too few types": {"tokenizer.ggml.token_type": [1, 1]},
    "unknown types": {"tokenizer.ggml.token_type": [9] * 320},
    "a token twice": {"tokenizer.ggml.tokens": ["a"] * 320},
    "numbers for tokens": {"tokenizer.ggml.tokens": list(range(320))},
    "numbers for merges": {"tokenizer.ggml.merges": [1, 2]},
    "merges of one": {"tokenizer.ggml.merges": ["a"]},
    "merges of unknown tokens": {"tokenizer.ggml.merges": ["漢 字"]},
    "an end that is no token": {"tokenizer.ggml.eos_token_id": 320},
    "another vocabulary": {"llama.vocab_size": 400},
}


@pytest.mark.parametrize("fields", REFUSED_FIELDS.values(), ids=REFUSED_FIELDS.keys())
def test_a_field_that_cannot_be_honoured_is_refused(
    tiny: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(ModelError):
        converted(write_tiny_gguf(tiny, tmp_path / "tiny.gguf", fields=fields), tmp_path / "back")


REFUSED_TENSORS: dict[str, dict[str, Any]] = {
    "one left out": {"blk.2.attn_q.weight": LEFT_OUT},
    "one too many": {"rope_freqs.weight": np.ones(8, dtype=np.float32)},
    "another shape": {"blk.0.attn_k.weight": np.ones((64, 64), dtype=np.float32)},
    "transposed": {"blk.0.attn_k.weight": np.ones((64, 32), dtype=np.float32)},
}


@pytest.mark.parametrize("tensors", REFUSED_TENSORS.values(), ids=REFUSED_TENSORS.keys())
def test_tensors_other_than_expected_are_refused(tiny: Path, tmp_path: Path, tensors: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(tensors))):
        converted(write_tiny_gguf(tiny, tmp_path / "tiny.gguf", tensors=tensors), tmp_path / "back")


@settings(max_examples=60)
@given(st.data())
def test_one_wrong_byte_converts_or_is_a_model_error(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    source = write_tiny_gguf(tiny, folder / "tiny.gguf")
    raw = bytearray(source.read_bytes())
    raw[data.draw(st.integers(0, 16_000))] ^= data.draw(st.integers(1, 255))
    source.write_bytes(raw)
    try:
        converted(source, folder / "back")
    except ModelError:
        return
    assert ModelDirectory(folder / "back", "back").tokenizer.encode("the") != []
