"""Keys: made private, read strictly, known by their fingerprint."""

from __future__ import annotations

import hashlib
import stat
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from bbquic.errors import ConfigError
from bbquic.transport.identity import (
    Fingerprint,
    Peer,
    find_peer,
    load_identity,
    make_identity,
    new_identity,
    parse_fingerprint,
)

KEY = make_identity("a").fingerprint
OTHER = make_identity("b").fingerprint
THIRD = make_identity("c").fingerprint


def test_a_new_key_is_read_again_as_the_same_identity(tmp_path: Path) -> None:
    made = new_identity("home-a", tmp_path / "certs")
    read = load_identity(tmp_path / "certs" / "home-a.key")
    assert read.fingerprint == made.fingerprint
    assert read.certificate == made.certificate
    assert read.label == "home-a"


def test_a_new_key_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    new_identity("home-a", tmp_path)
    assert stat.S_IMODE((tmp_path / "home-a.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("taken", ["home-a.key", "home-a.crt"])
def test_no_file_is_overwritten(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not overwritten") as caught:
        new_identity("home-a", tmp_path)
    assert caught.value.hint is not None
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "precious"


@pytest.mark.parametrize("name", ["", "-a", "A", "a_b", "a/b", "../a", "a" * 64, "a.b", "ä", "a\n"])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a machine"):
        new_identity(name, tmp_path)
    with pytest.raises(ValueError, match="cannot name a machine"):
        Peer(name, None, (KEY,))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    new_identity("home-a", tmp_path)
    path = tmp_path / "home-a.key"
    path.chmod(mode)
    with pytest.raises(ConfigError, match="can be read by others") as caught:
        load_identity(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_a_key_and_a_certificate_of_another_are_refused(tmp_path: Path) -> None:
    new_identity("home-a", tmp_path)
    new_identity("home-b", tmp_path)
    (tmp_path / "home-b.crt").replace(tmp_path / "home-a.crt")
    with pytest.raises(ConfigError, match="do not belong together"):
        load_identity(tmp_path / "home-a.key")


def test_a_key_that_is_no_pem_is_refused(tmp_path: Path) -> None:
    new_identity("home-a", tmp_path)
    (tmp_path / "home-a.key").write_bytes(b"\x00garbage")
    with pytest.raises(ConfigError, match=r"home-a\.key is not a private key in PEM"):
        load_identity(tmp_path / "home-a.key")


def test_a_certificate_that_is_no_pem_is_refused(tmp_path: Path) -> None:
    new_identity("home-a", tmp_path)
    (tmp_path / "home-a.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=r"home-a\.crt is not a certificate in PEM"):
        load_identity(tmp_path / "home-a.key")


@pytest.mark.parametrize("missing", ["home-a.key", "home-a.crt"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    new_identity("home-a", tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=f"cannot read .*{missing}"):
        load_identity(tmp_path / "home-a.key")


def test_an_encrypted_key_is_refused(tmp_path: Path) -> None:
    identity = new_identity("home-a", tmp_path)
    (tmp_path / "home-a.key").write_bytes(
        identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    )
    with pytest.raises(ConfigError, match="is encrypted"):
        load_identity(tmp_path / "home-a.key")


@pytest.mark.parametrize(
    "key",
    [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())],
    ids=["rsa", "p-384"],
)
def test_a_key_of_another_kind_is_refused(
    tmp_path: Path, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
) -> None:
    new_identity("home-a", tmp_path)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "home-a.key").write_bytes(pem)
    with pytest.raises(ConfigError, match=r"neither an Ed25519 nor a P-256 key"):
        load_identity(tmp_path / "home-a.key")


def test_a_fingerprint_is_the_hash_of_the_public_key() -> None:
    identity = make_identity("a")
    spki = identity.private_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = urlsafe_b64encode(hashlib.sha256(spki).digest()).decode().rstrip("=")
    assert identity.fingerprint == f"sha256:{digest}"
    assert parse_fingerprint(identity.fingerprint) == identity.fingerprint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256:",
        KEY[:-1],
        KEY + "A",
        KEY + "=",
        KEY.upper(),
        KEY.replace("sha256", "sha512"),
        "sha256:" + "+" * 43,
    ],
    ids=["nothing", "no digits", "too short", "too long", "padded", "capitals", "sha512", "strange digits"],
)
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a key fingerprint"):
        parse_fingerprint(text)


@given(st.text(max_size=60))
def test_any_text_is_a_fingerprint_or_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a key fingerprint"):
        parse_fingerprint("sha256:" + text + "!")


@pytest.mark.parametrize(
    ("address", "keys", "may"),
    [
        (("", 1), (KEY,), frozenset()),
        (("host", 0), (KEY,), frozenset()),
        (("host", 65536), (KEY,), frozenset()),
        (None, (), frozenset()),
        (None, (KEY, KEY), frozenset()),
        (None, (KEY, OTHER, THIRD), frozenset()),
        (None, (Fingerprint("sha256:x"),), frozenset()),
        (None, (KEY,), frozenset({"rule"})),
    ],
)
def test_a_peer_cannot_be_wrong_once_built(
    address: tuple[str, int] | None, keys: tuple[Fingerprint, ...], may: frozenset[str]
) -> None:
    with pytest.raises(ValueError, match=r"."):
        Peer("home-a", address, keys, may)


def test_a_peer_is_found_by_either_of_its_keys() -> None:
    peers = [Peer("a", None, (KEY, OTHER)), Peer("b", None, (THIRD,))]
    assert find_peer(peers, OTHER) is peers[0]
    assert find_peer(peers, THIRD) is peers[1]
    assert find_peer(peers[:1], THIRD) is None
