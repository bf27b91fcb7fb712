from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.hashes import SETTLED, HashCache
from bbquic.model.manifest import Manifest, TensorDigest, compare, manifest_of, write_manifest
from bbquic.model.weights import tensors_for
from tiny_model import make_tiny_llama

NOTHING = HashCache(None)


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Manifest:
    return manifest_of(ModelDirectory(tiny, "tiny"), hashes=NOTHING)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to change."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def opened(path: Path) -> ModelDirectory:
    return ModelDirectory(path, path.name)


def change_tensor(path: Path, name: str, changed: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if changed is None else {name: changed}), path / "model.safetensors")


def test_a_manifest_has_each_tensors_dtype_shape_and_hash(tiny: Path, whole: Manifest) -> None:
    tensors = load_file(tiny / "model.safetensors")
    assert whole.tensors == {
        name: TensorDigest("F32", tuple(t.shape), hashlib.sha256(t.numpy().tobytes()).hexdigest())
        for name, t in tensors.items()
    }
    assert whole.tensors["lm_head.weight"].elements == 320 * 64


def test_a_manifest_survives_the_wire(whole: Manifest) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Manifest) == whole


def test_shards_and_names_of_directories_make_no_difference(tmp_path: Path, whole: Manifest) -> None:
    sharded = manifest_of(opened(make_tiny_llama(tmp_path / "other", shards=4)), hashes=NOTHING)
    assert sharded.model != whole.model
    assert sharded.digest == whole.digest
    compare(whole, sharded, "laptop", "kitchen")


def test_a_node_with_only_its_blocks_agrees_on_those(tmp_path: Path, whole: Manifest) -> None:
    directory = opened(make_tiny_llama(tmp_path, blocks=4, shards=5))
    needed = tensors_for(directory.spec, directory.config, range(1, 2), embeds=False, heads=False)
    for file in set(directory.files.values()) - {directory.files[name] for name in needed}:
        file.unlink()
    part = manifest_of(opened(tmp_path), needed, hashes=NOTHING)
    assert part.digest == whole.only(needed).digest
    compare(whole.only(needed), part, "laptop", "kitchen")
    with pytest.raises(ModelError, match="kitchen has no tensor lm_head"):
        compare(whole, part, "laptop", "kitchen")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (torch.ones(64), "the sha256"),
        (torch.ones(64, dtype=torch.bfloat16), "the dtype BF16 at kitchen and F32 at laptop"),
        (torch.ones(32), r"the shape \(32,\) at kitchen and \(64,\) at laptop"),
        (None, "kitchen has no tensor"),
    ],
)
def test_a_tensor_that_differs_is_named_with_both_sides(
    copy: Path, whole: Manifest, changed: torch.Tensor | None, complaint: str
) -> None:
    change_tensor(copy, "model.norm.weight", changed)
    held = manifest_of(opened(copy), hashes=NOTHING)
    assert held.digest != whole.digest
    with pytest.raises(ModelError, match=complaint) as caught:
        compare(whole, held, "laptop", "kitchen")
    assert "model.norm.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("rms_norm_eps", 1e-6, "kitchen's config.json has rms_norm_eps 1e-06, laptop's 1e-05"),
        ("attention_bias", False, "kitchen's config.json has attention_bias false, laptop's unset"),
    ],
)
def test_a_config_that_differs_is_named_by_its_field(
    copy: Path, whole: Manifest, field: str, value: object, complaint: str
) -> None:
    config = json.loads((copy / "config.json").read_text()) | {field: value}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=complaint):
        compare(whole, manifest_of(opened(copy), hashes=NOTHING), "laptop", "kitchen")


def test_what_config_json_says_of_its_making_is_no_difference(copy: Path, whole: Manifest) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "4.0", "torch_dtype": "float32", "_name_or_path": "/home/x"}
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=8))
    assert manifest_of(opened(copy), hashes=NOTHING).digest == whole.digest


def test_a_tokenizer_that_differs_is_named(copy: Path, whole: Manifest) -> None:
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ModelError, match=r"their tokenizer\.json differ") as caught:
        compare(whole, manifest_of(opened(copy), hashes=NOTHING), "laptop", "kitchen")
    assert "laptop and kitchen" in str(caught.value)


def test_a_laptop_without_weights_reads_the_manifest_in_their_place(copy: Path, whole: Manifest) -> None:
    write_manifest(opened(copy), manifest_of(opened(copy), hashes=NOTHING))
    (copy / "model.safetensors").unlink()
    laptop = opened(copy)
    assert not laptop.has_weights
    assert manifest_of(laptop).digest == whole.digest
    names = ["model.norm.weight"]
    assert manifest_of(laptop, names).digest == whole.only(names).digest
    assert laptop.blocks == 4
    assert laptop.eos == {0, 2}
    with pytest.raises(ModelError, match="holds no weights"):
        laptop.tensor("model.norm.weight")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_manifest_of_another_model_is_refused(tiny: Path, copy: Path, tmp_path: Path, file: str) -> None:
    write_manifest(opened(copy), manifest_of(opened(copy), hashes=NOTHING))
    (copy / "model.safetensors").unlink()
    shutil.copy(make_tiny_llama(tmp_path / "other", vocab=330) / file, copy / file)
    with pytest.raises(ModelError, match=f"of another model than the {file}"):
        manifest_of(opened(copy))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 1}'])
def test_a_damaged_manifest_is_refused(copy: Path, text: str) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match="is not a manifest"):
        manifest_of(opened(copy))


def test_a_tensor_that_the_model_lacks_is_named(tiny: Path, whole: Manifest) -> None:
    with pytest.raises(ModelError, match="no tensor extra"):
        whole.only(["extra"])
    with pytest.raises(ModelError, match="no tensor extra"):
        manifest_of(ModelDirectory(tiny, "tiny"), ["extra"], hashes=NOTHING)


def later(folder: Path) -> HashCache:
    """A cache whose clock is past the time in which a file may still be being written."""
    return HashCache(folder, now_ns=lambda: 2**62)


def forge(folder: Path) -> None:
    """Overwrites every remembered hash, so that its use shows."""
    for file in folder.iterdir():
        entry = json.loads(file.read_text())
        entry["tensors"] = dict.fromkeys(entry["tensors"], "f" * 64)
        file.write_text(json.dumps(entry))


def test_an_unchanged_file_is_not_read_again(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hashes"
    names = ["model.norm.weight", "lm_head.weight"]
    manifest_of(opened(copy), names[:1], hashes=later(folder))
    forge(folder)
    again = manifest_of(opened(copy), names, hashes=later(folder))
    assert again.tensors[names[0]].sha256 == "f" * 64
    assert again.tensors[names[1]].sha256 != "f" * 64


@pytest.mark.parametrize("change", ["contents", "replaced", "other path"])
def test_a_changed_file_is_read_again(copy: Path, tmp_path: Path, change: str) -> None:
    folder = tmp_path / "hashes"
    before = manifest_of(opened(copy), hashes=later(folder))
    forge(folder)
    weights = copy / "model.safetensors"
    stamp = weights.stat()
    if change == "contents":
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as a careful tool would
    elif change == "replaced":
        shutil.copy2(weights, tmp_path / "new")
        (tmp_path / "new").replace(weights)
    else:
        copy = copy.rename(tmp_path / "moved")
    after = manifest_of(opened(copy), hashes=later(folder))
    assert "f" * 64 not in {tensor.sha256 for tensor in after.tensors.values()}
    assert (after.tensors == before.tensors) == (change != "contents")


def test_a_file_that_may_still_be_being_written_is_not_remembered(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hashes"
    changed = (copy / "model.safetensors").stat().st_ctime_ns
    manifest_of(opened(copy), hashes=HashCache(folder, now_ns=lambda: changed + SETTLED - 1))
    assert not folder.exists()
    manifest_of(opened(copy), hashes=HashCache(folder, now_ns=lambda: changed + SETTLED))
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"path": 3}'])
def test_a_damaged_memory_only_costs_time(
    copy: Path, tmp_path: Path, whole: Manifest, content: bytes
) -> None:
    folder = tmp_path / "hashes"
    manifest_of(opened(copy), hashes=later(folder))
    for file in folder.iterdir():
        file.write_bytes(content)
    assert manifest_of(opened(copy), hashes=later(folder)).digest == whole.digest


def test_a_folder_that_cannot_be_written_only_costs_time(copy: Path, tmp_path: Path, whole: Manifest) -> None:
    (tmp_path / "file").write_text("in the way")
    hashes = later(tmp_path / "file" / "hashes")
    assert manifest_of(opened(copy), hashes=hashes).digest == whole.digest
