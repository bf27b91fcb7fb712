"""peers.toml: read strictly, and every mistake named with file, peer and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.config import find_identity, load_peers, parse_address
from bbquic.errors import ConfigError
from bbquic.transport.identity import make_identity, new_identity

A, B, C = (make_identity(name).fingerprint for name in "abc")


def write(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "peers.toml"
    path.write_text(content, encoding="utf-8")
    return path


def peer(name: str, key: str, more: str = "") -> str:
    return f'[[peer]]\nname = "{name}"\nkeys = ["{key}"]\n{more}\n'


def test_peers_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    content = peer("zoe", A, 'address = "203.0.113.7:4433"') + peer("laptop", B, 'may = ["coordinate"]')
    peers = load_peers(write(tmp_path, content))
    assert list(peers) == ["zoe", "laptop"]
    assert peers["zoe"].address == ("203.0.113.7", 4433)
    assert peers["zoe"].may == frozenset()
    assert peers["laptop"].address is None
    assert peers["laptop"].may == {"coordinate"}
    assert peers["laptop"].keys == (B,)


def test_a_price_is_kept_of_those_who_have_one(tmp_path: Path) -> None:
    peers = load_peers(
        write(tmp_path, peer("a", A, "price = 0.45") + peer("b", B) + peer("c", C, "price = 0"))
    )
    assert peers.prices == {"a": 0.45, "c": 0.0}


def test_a_peer_may_have_two_keys(tmp_path: Path) -> None:
    content = f'[[peer]]\nname = "a"\nkeys = ["{A}", "{B}"]\n'
    assert load_peers(write(tmp_path, content))["a"].keys == (A, B)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "names no peer"),
        ("[[peer]", "is not TOML"),
        ("peer = 3", "peer must be tables"),
        ("[peer]\nname = 'a'", "peer must be tables"),
        ("[cluster]\n" + peer("a", A), "unknown key 'cluster'"),
        (f'[[peer]]\nkeys = ["{A}"]', "peer number 1: name is missing"),
        (f'[[peer]]\nname = 3\nkeys = ["{A}"]', "peer number 1: name must be a string"),
        ('[[peer]]\nname = "a"', "peer a: keys is missing"),
        ('[[peer]]\nname = "a"\nkeys = "x"', "peer a: keys must be a list of strings"),
        ('[[peer]]\nname = "a"\nkeys = [1]', "peer a: keys must be a list of strings"),
        ('[[peer]]\nname = "a"\nkeys = []', "peer a: a needs one key, or two"),
        (f'[[peer]]\nname = "a"\nkeys = ["{A}", "{B}", "{C}"]', "peer a: a needs one key, or two"),
        (f'[[peer]]\nname = "a"\nkeys = ["{A}", "{A}"]', "peer a: a needs one key, or two different"),
        (peer("a", "sha256:short"), "peer a: 'sha256:short' is not a key fingerprint"),
        (peer("Home A", A), "peer Home A: 'Home A' cannot name a machine"),
        (peer("a", A, "address = 4433"), "peer a: address must be a string"),
        (peer("a", A, 'address = "host"'), "peer a: 'host' is not host:port"),
        (peer("a", A, 'address = "host:0"'), "peer a: 'host:0' has no port"),
        (peer("a", A, 'address = "::1:4433"'), "peer a: '::1:4433' is not host:port"),
        (peer("a", A, "may = 'coordinate'"), "peer a: may must be a list of strings"),
        (peer("a", A, "may = ['rule']"), "peer a: a may not 'rule'"),
        (peer("a", A, "adress = 'h:1'"), "peer a: unknown key 'adress'"),
        (peer("a", A, "price = '1 $'"), "peer a: price must be dollars an hour"),
        (peer("a", A, "price = -1"), "peer a: price must be dollars an hour"),
        (peer("a", A, "price = inf"), "peer a: price must be dollars an hour"),
        (peer("a", A, "price = true"), "peer a: price must be dollars an hour"),
        (peer("a", A) + peer("a", B), "peer a: this name is taken"),
        (peer("a", A) + peer("b", A), f"peer b: keys: {A} is also a's"),
        (peer("a", A, 'address = "h:1"') + peer("b", B, 'address = "h:1"'), "peer b: address is also a's"),
    ],
    ids=lambda text: "peers" if "sha256:" in text else text,  # keys differ from run to run
)
def test_a_mistake_is_refused_naming_file_peer_and_key(tmp_path: Path, content: str, words: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_peers(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*peers\.toml") as caught:
        load_peers(tmp_path / "peers.toml")
    assert caught.value.hint is not None
    assert "bbquic certs new" in caught.value.hint


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_peers(path)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:1", ("host", 1)),
        ("203.0.113.7:65535", ("203.0.113.7", 65535)),
        ("[2001:db8::1]:4433", ("2001:db8::1", 4433)),
    ],
)
def test_addresses_are_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@given(st.text(alphabet="a1:[].-²", max_size=12))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert host
    assert 0 < port < 65536
    assert text in (f"{host}:{port}", f"[{host}]:{port}") or text.rpartition(":")[2].startswith("0")


def test_who_i_am_follows_from_the_key_i_hold(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    mine = new_identity("some-file", certs)
    new_identity("unrelated", certs)
    peers = load_peers(write(tmp_path, peer("other", A) + peer("home-b", mine.fingerprint)))
    identity, me = find_identity(peers, certs)
    assert identity.fingerprint == mine.fingerprint
    assert me is peers["home-b"]


def test_a_machine_without_any_key_is_told_to_make_one(tmp_path: Path) -> None:
    peers = load_peers(write(tmp_path, peer("a", A)))
    with pytest.raises(ConfigError, match="holds no key") as caught:
        find_identity(peers, tmp_path / "certs")
    assert caught.value.hint is not None
    assert "bbquic certs new NAME" in caught.value.hint


def test_a_machine_whose_key_is_not_pinned_is_told_which_it_has(tmp_path: Path) -> None:
    new_identity("home-b", tmp_path / "certs")
    peers = load_peers(write(tmp_path, peer("a", A)))
    with pytest.raises(ConfigError, match=r"none of .*home-b\.key is pinned"):
        find_identity(peers, tmp_path / "certs")


def test_a_machine_with_several_pinned_keys_has_to_choose(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    one, two = new_identity("one", certs), new_identity("two", certs)
    peers = load_peers(write(tmp_path, peer("one", one.fingerprint) + peer("two", two.fingerprint)))
    with pytest.raises(ConfigError, match="several keys here are pinned") as caught:
        find_identity(peers, certs)
    assert caught.value.hint == "choose with --key"
    assert find_identity(peers, certs, certs / "two.key")[1].name == "two"


def test_a_chosen_key_that_is_not_pinned_is_refused_with_its_fingerprint(tmp_path: Path) -> None:
    mine = new_identity("mine", tmp_path)
    peers = load_peers(write(tmp_path, peer("a", A)))
    with pytest.raises(ConfigError, match=f"{mine.fingerprint}, which is not pinned"):
        find_identity(peers, tmp_path, tmp_path / "mine.key")
