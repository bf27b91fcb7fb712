from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.weights import load_tensors, tensors_for
from tiny_model import make_tiny_llama

_opened: list[str] | None = None


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_note_open)  # for good: hooks cannot be taken out


@contextmanager
def opened_files() -> Iterator[list[str]]:
    global _opened
    noted: list[str] = []
    _opened = noted
    try:
        yield noted
    finally:
        _opened = None


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_those_that_safetensors_loads(
    tmp_path: Path, shards: int, stored: torch.dtype, dtype: torch.dtype
) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path, shards=shards, dtype=stored), "tiny")
    needed = tensors_for(directory.spec, directory.config, range(4), embeds=True, heads=True)
    loaded = load_tensors(directory, needed, dtype, "cpu")
    expected = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name].to(dtype))


def test_only_files_with_a_tensor_that_is_needed_are_opened(tmp_path: Path) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path, blocks=8, shards=9), "tiny")
    needed = tensors_for(directory.spec, directory.config, range(3, 5), embeds=False, heads=False)
    holding = {str(directory.files[name]) for name in needed}
    assert len(holding) < 5
    with opened_files() as noted:
        loaded = load_tensors(directory, needed, torch.float32, "cpu")
    assert {file for file in noted if file.endswith(".safetensors")} == holding
    assert loaded.keys() == needed.keys()


def test_a_stage_loads_though_shards_of_others_are_not_here(tmp_path: Path) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path, blocks=8, shards=9), "tiny")
    needed = tensors_for(directory.spec, directory.config, range(3, 5), embeds=False, heads=False)
    for file in set(directory.files.values()) - {directory.files[name] for name in needed}:
        file.unlink()
    opened = ModelDirectory(tmp_path, "tiny")
    assert load_tensors(opened, needed, torch.float32, "cpu").keys() == needed.keys()


@pytest.mark.parametrize(
    ("stored", "dtype"), [(torch.bfloat16, torch.float16), (torch.float32, torch.float16)]
)
def test_a_dtype_of_a_smaller_range_is_refused(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path, dtype=stored), "tiny")
    needed = tensors_for(directory.spec, directory.config, range(1), embeds=False, heads=False)
    with pytest.raises(ModelError, match=r"model\.layers\.0.*float16") as caught:
        load_tensors(directory, needed, dtype, "cpu")
    assert "bfloat16" in str(caught.value.hint)


def test_weights_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path), "tiny")
    save_file({"model.norm.weight": torch.ones(64, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*I32"):
        load_tensors(directory, {"model.norm.weight": (64,)}, torch.float32, "cpu")


def test_a_tensor_of_another_shape_is_named(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(64,\), not \(65,\)"):
        load_tensors(ModelDirectory(tiny, "tiny"), {"model.norm.weight": (65,)}, torch.float32, "cpu")


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor model\.extra\.weight"):
        load_tensors(ModelDirectory(tiny, "tiny"), {"model.extra.weight": (1,)}, torch.float32, "cpu")


def test_a_file_cut_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    directory = ModelDirectory(make_tiny_llama(tmp_path), "tiny")
    last = max(directory.by_file(directory.files)[tmp_path / "model.safetensors"], key=lambda t: t.start)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(last.start + last.length - 1)
    with pytest.raises(ModelError, match="cut short"):
        load_tensors(directory, {last.name: last.shape}, torch.float32, "cpu")


PEAK = """
import json, resource, sys
from pathlib import Path
import torch
from bbquic.model.directory import ModelDirectory
from bbquic.model.weights import load_tensors, tensors_for

directory = ModelDirectory(Path(sys.argv[1]), "model")
needed = tensors_for(directory.spec, directory.config, range(20), embeds=True, heads=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loaded = load_tensors(directory, needed, torch.float32, "cpu")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
share = sum(tensor.nbytes for tensor in loaded.values())
print(json.dumps({"grown": (after - before) * 1024, "share": share}))
"""


@pytest.mark.real_model
def test_loading_takes_the_share_and_little_more(default_model: ModelDirectory) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(default_model.path)], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    largest = 49152 * 576 * 2  # the embedding, as it is stored
    assert measured["grown"] < measured["share"] + largest + (64 << 20)
