from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bbquic.cli.model import app
from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import manifest_of
from tiny_model import make_tiny_llama


def test_list_tells_which_models_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = CliRunner().invoke(app, ["list"])
    assert before.stdout.splitlines()[0].split("\t")[:2] == ["smollm2-135m", "-"]
    held = make_tiny_llama(tmp_path / "bbquic" / "models" / "smollm2-135m")
    after = CliRunner().invoke(app, ["list"])
    assert after.stdout.splitlines()[0].split("\t")[:2] == ["smollm2-135m", str(held)]


def test_get_prints_the_directory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    held = make_tiny_llama(tmp_path / "bbquic" / "models" / "smollm2-135m")
    assert CliRunner().invoke(app, ["get", "smollm2-135m"]).stdout == f"{held}\n"


def test_get_of_an_unknown_model_is_a_model_error() -> None:
    assert isinstance(CliRunner().invoke(app, ["get", "unheard-of"]).exception, ModelError)


def test_a_manifest_stands_in_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_tiny_llama(tmp_path / "model")
    digest = manifest_of(ModelDirectory(path, "model")).digest
    done = CliRunner().invoke(app, ["manifest", str(path)])
    assert done.stdout == f"{path / 'manifest.json'}\n"
    assert digest in done.stderr
    (path / "model.safetensors").unlink()
    assert manifest_of(ModelDirectory(path, "model")).digest == digest
