from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.stored import read_header
from tiny_model import make_tiny_llama


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def rewrite(file: Path, **changes: Any) -> None:
    """Sets fields of a JSON object in a file; None takes one out."""
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_described_as_safetensors_describes_it(tmp_path: Path, shards: int) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path, shards=shards, dtype=torch.bfloat16), "tiny")
    seen = set()
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                tensor = directory.tensor(name)
                values = opened.get_slice(name)
                assert (tensor.dtype, list(tensor.shape)) == (values.get_dtype(), values.get_shape())
                assert tensor.file == file
                seen.add(name)
    assert seen == set(directory.files)


def test_sizes_are_read_without_transformers(tiny: Path) -> None:
    directory = ModelDirectory(tiny, "tiny")
    assert (directory.blocks, directory.context_length, directory.has_weights) == (4, 512, True)
    assert directory.head_name == "lm_head.weight"
    assert directory.config.num_hidden_layers == 4


def test_answers_end_at_the_tokens_of_all_three_sources(copy: Path) -> None:
    rewrite(copy / "generation_config.json", eos_token_id=[0, 7])
    rewrite(copy / "config.json", eos_token_id=9)
    assert ModelDirectory(copy, "copy").eos == {0, 7, 9, 2}
    (copy / "generation_config.json").unlink()
    rewrite(copy / "config.json", eos_token_id=None)
    assert ModelDirectory(copy, "copy").eos == {2}
    rewrite(copy / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "lstrip": False})
    assert ModelDirectory(copy, "copy").eos == {0}
    (copy / "tokenizer_config.json").unlink()
    assert ModelDirectory(copy, "copy").eos == frozenset()


@pytest.mark.parametrize("eos", ["2", [2, "3"], -1, True, 2.0])
def test_an_end_token_that_is_no_token_is_refused(copy: Path, eos: object) -> None:
    rewrite(copy / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ModelError, match="eos_token_id"):
        _ = ModelDirectory(copy, "copy").eos


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"auto_map": {"AutoConfig": "configuration_evil.Config"}}, "run code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"model_type": "evil"}, "'evil' are not supported"),
        ({"model_type": None}, "not supported"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(
    copy: Path, changes: Mapping[str, Any], complaint: str
) -> None:
    rewrite(copy / "config.json", **changes)
    with pytest.raises(ModelError, match=complaint):
        ModelDirectory(copy, "copy")


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelDirectory(copy, "copy")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelDirectory(tmp_path, "empty")


@pytest.mark.parametrize("value", [None, 0, -4, "4", 4.0, True])
def test_a_size_that_is_no_size_is_refused(copy: Path, value: object) -> None:
    rewrite(copy / "config.json", num_hidden_layers=value)
    with pytest.raises(ModelError, match="num_hidden_layers"):
        _ = ModelDirectory(copy, "copy").blocks


def test_pickled_weights_are_refused_with_a_way_out(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickles") as caught:
        ModelDirectory(copy, "copy")
    assert "safetensors" in str(caught.value.hint)


def test_a_directory_without_weights_asks_for_a_manifest(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights") as caught:
        ModelDirectory(copy, "copy")
    assert "bbquic model manifest" in str(caught.value.hint)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "x.bin", 3]
)
def test_an_index_cannot_lead_out_of_its_directory(copy: Path, shard: object) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index\.json"):
        ModelDirectory(copy, "copy").tensor("model.norm.weight")


def test_an_index_and_a_shard_that_disagree_are_named(copy: Path) -> None:
    index = {"weight_map": {"model.extra.weight": "model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"does not hold model\.extra\.weight"):
        ModelDirectory(copy, "copy").tensor("model.extra.weight")


def test_a_tensor_that_is_not_there_is_named(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.4"):
        ModelDirectory(tiny, "tiny").tensor("model.layers.4.mlp.up_proj.weight")


def safetensors_file(path: Path, header: object, data: bytes = b"\0" * 16) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def test_a_header_made_by_hand_is_read(tmp_path: Path) -> None:
    tensor = read_header(safetensors_file(tmp_path / "x", {"__metadata__": {}, "a": GOOD}))["a"]
    assert (tensor.shape, tensor.length) == ((2, 2), 16)


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {},
        GOOD | {"dtype": "F31"},
        GOOD | {"dtype": None},
        GOOD | {"shape": [2, -2]},
        GOOD | {"shape": [2, 3]},
        GOOD | {"shape": [True, 4]},
        GOOD | {"shape": 4},
        GOOD | {"data_offsets": [0]},
        GOOD | {"data_offsets": [-4, 12]},
        GOOD | {"data_offsets": [16, 0]},
        GOOD | {"data_offsets": [4, 20]},
        GOOD | {"shape": [2**40, 2**40], "data_offsets": [0, 2**82]},
    ],
)
def test_a_header_that_contradicts_itself_or_its_file_is_refused(tmp_path: Path, entry: object) -> None:
    with pytest.raises(ModelError):
        read_header(safetensors_file(tmp_path / "x", {"a": entry}))


@pytest.mark.parametrize("raw", [b"", b"\0" * 8, b"\xff" * 8, b"\xff" * 100, b"\0\0\0\0\0\1\0\0{}"])
def test_what_is_no_header_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_header(tmp_path / "x")


@given(st.data())
def test_one_wrong_byte_in_a_header_never_gives_another_error(tiny: Path, data: st.DataObject) -> None:
    raw = bytearray((tiny / "model.safetensors").read_bytes())
    place = data.draw(st.integers(0, 8 + int.from_bytes(raw[:8], "little") - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    damaged = tiny.parent / "damaged.safetensors"
    damaged.write_bytes(raw)
    try:
        tensors = read_header(damaged)
    except ModelError:
        return
    assert all(tensor.start + tensor.length <= len(raw) for tensor in tensors.values())
