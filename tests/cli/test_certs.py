"""`bbquic certs`: what it writes, and what it prints to be pasted."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bbquic.cli.certs import app
from bbquic.config import load_peers
from bbquic.errors import BBQuicError, ConfigError
from bbquic.transport.identity import load_identity


def certs(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, BBQuicError):
        raise result.exception
    return result


def test_the_printed_entry_is_a_peers_toml(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    result = certs(
        "new", "home-a", "--dir", str(folder), "--address", "203.0.113.7:4433", "--may", "coordinate"
    )
    path = tmp_path / "peers.toml"
    path.write_text(result.stdout)
    peer = load_peers(path)["home-a"]
    assert peer.keys == (load_identity(folder / "home-a.key").fingerprint,)
    assert peer.address == ("203.0.113.7", 4433)
    assert peer.may == {"coordinate"}


def test_an_entry_without_an_address_is_a_peers_toml_too(tmp_path: Path) -> None:
    result = certs("new", "laptop", "--dir", str(tmp_path / "certs"))
    path = tmp_path / "peers.toml"
    path.write_text(result.stdout)
    assert load_peers(path)["laptop"].address is None


def test_where_the_key_went_is_said_on_stderr(tmp_path: Path) -> None:
    result = certs("new", "home-a", "--dir", str(tmp_path / "certs"))
    assert "home-a.key" in result.stderr
    assert "home-a.key" not in result.stdout


def test_a_fresh_directory_keeps_keys_out_of_git(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs("new", "home-a", "--dir", str(folder))
    assert "*" in (folder / ".gitignore").read_text().splitlines()
    assert stat.S_IMODE((folder / "home-a.key").stat().st_mode) == 0o600


def test_a_directory_that_was_there_is_left_as_it_is(tmp_path: Path) -> None:
    certs("new", "home-a", "--dir", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home-a.crt", "home-a.key"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new", "Home A"], "cannot name a machine"),
        (["new", "home-a", "--address", "host"], "--address: 'host' is not host:port"),
        (["new", "home-a", "--may", "rule"], "--may: 'rule' is no right"),
        (["show"], "holds no key"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        certs(*arguments, "--dir", str(tmp_path / "certs"))
    assert not (tmp_path / "certs").exists()


def test_show_prints_name_and_fingerprint_of_each_key(tmp_path: Path) -> None:
    for name in ("home-b", "home-a"):
        certs("new", name, "--dir", str(tmp_path))
    expected = [
        f"{name}\t{load_identity(tmp_path / f'{name}.key').fingerprint}" for name in ("home-a", "home-b")
    ]
    assert certs("show", "--dir", str(tmp_path)).stdout.splitlines() == expected
