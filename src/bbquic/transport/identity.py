"""Who a machine is: a key of its own, and the fingerprints that peers.toml pins for everybody.

As with ssh or WireGuard there is no authority: a certificate is only the envelope TLS wants around a
key, and neither its name nor its dates are believed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NewType

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from bbquic.errors import ConfigError

Fingerprint = NewType("Fingerprint", str)
PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey

FINGERPRINT_PREFIX = "sha256:"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
RIGHTS = frozenset({"coordinate"})  # coordinate: may send plans, cancels and releases
MAX_PINS = 2  # the key in use and the one that will replace it
NOT_BEFORE = datetime(2020, 1, 1, tzinfo=UTC)
NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280's "no well-defined expiration"


def parse_fingerprint(text: str) -> Fingerprint:
    """`sha256:` and the unpadded URL-safe base64 of a SHA-256. Raises: ValueError for anything else."""
    if text.startswith(FINGERPRINT_PREFIX):
        digits = text.removeprefix(FINGERPRINT_PREFIX)
        try:
            digest = base64.b64decode(digits + "=", altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            digest = b""
        if len(digest) == hashlib.sha256().digest_size and _fingerprint(digest) == text:
            return Fingerprint(text)
    raise ValueError(f"{text!r} is not a key fingerprint: it is sha256: and 43 letters, digits, - or _")


def fingerprint_of(certificate: x509.Certificate) -> Fingerprint:
    """The fingerprint of the certificate's key: SHA-256 over its SubjectPublicKeyInfo in DER.

    Raises: ValueError or UnsupportedAlgorithm for a key that `cryptography` does not read.
    """
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return _fingerprint(hashlib.sha256(spki).digest())


def _fingerprint(digest: bytes) -> Fingerprint:
    return Fingerprint(FINGERPRINT_PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("="))


def check_name(name: str) -> None:
    """Raises: ValueError unless `name` may name a machine."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a machine: use 1 to 63 of a-z, 0-9 and -, no - in front")


@dataclass(frozen=True, slots=True)
class Peer:
    """A machine of the cluster, as peers.toml describes it. `address` is None for one that only dials.

    Raises: ValueError on a bad name, port, fingerprint or right, and on no key or more than two.
    """

    name: str
    address: tuple[str, int] | None
    keys: tuple[Fingerprint, ...]
    may: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.address is not None:
            host, port = self.address
            if not host or not 0 < port < 65536:
                raise ValueError(f"{self.name}'s address {host!r}, port {port} is not a place to dial")
        if not 1 <= len(self.keys) <= MAX_PINS or len(set(self.keys)) != len(self.keys):
            raise ValueError(f"{self.name} needs one key, or two different ones while it changes them")
        for key in self.keys:
            parse_fingerprint(key)
        unknown = self.may - RIGHTS
        if unknown:
            raise ValueError(f"{self.name} may not {min(unknown)!r}: the only right is {min(RIGHTS)!r}")


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and its certificate. Who it makes this machine, peers.toml says by its fingerprint."""

    private_key: PrivateKey
    certificate: x509.Certificate
    fingerprint: Fingerprint

    @property
    def label(self) -> str:
        """The name in the certificate, for messages only: nobody vouches for it."""
        names = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(names[0].value) if names else "unnamed"


def make_identity(name: str) -> Identity:
    """A fresh Ed25519 key with its certificate, in memory only. Raises: ValueError on a bad name."""
    check_name(name)
    key = ed25519.Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .sign(key, None)
    )
    return Identity(key, certificate, fingerprint_of(certificate))


def new_identity(name: str, directory: Path) -> Identity:
    """Make a key and write it as NAME.key (mode 0600 from its first byte) and NAME.crt in `directory`.

    Raises: ConfigError on a bad name, where a file of that name exists, or where it cannot be written.
    """
    try:
        identity = make_identity(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    key = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificate = identity.certificate.public_bytes(Encoding.PEM)
    key_path, certificate_path = directory / f"{name}.key", directory / f"{name}.crt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_new(certificate_path, certificate, 0o644)
        try:
            _write_new(key_path, key, 0o600)
        except OSError:
            certificate_path.unlink()
            raise
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename} exists and is not overwritten",
            hint="choose another name, or move the old files away if that key is no longer pinned anywhere",
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return identity


def _write_new(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def load_identity(key_path: Path) -> Identity:
    """Read NAME.key and the NAME.crt beside it.

    Raises: ConfigError when either cannot be read, when others may read the key, or when they do not match.
    """
    certificate_path = key_path.with_suffix(".crt")
    key = _parse_key(key_path, _read_private(key_path))
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        public = certificate.public_key()
    except OSError as error:
        raise ConfigError(f"cannot read {certificate_path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{certificate_path} is not a certificate in PEM") from None
    if key.public_key() != public:
        raise ConfigError(
            f"{key_path} and {certificate_path} do not belong together",
            hint="put back the certificate made with the key, or make both anew: bbquic certs new NAME",
        )
    return Identity(key, certificate, fingerprint_of(certificate))


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"{path} can be read by others on this machine (mode {mode:04o})",
                    hint=f"chmod 600 {path}",
                )
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _parse_key(path: Path, data: bytes) -> PrivateKey:
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise ConfigError(f"{path} is encrypted; a node starts without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} is not a private key in PEM") from None
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise ConfigError(f"{path} is neither an Ed25519 nor a P-256 key", hint="bbquic certs new NAME makes one")


def find_peer(peers: Iterable[Peer], fingerprint: Fingerprint) -> Peer | None:
    """The peer that has this key pinned, if any."""
    return next((peer for peer in peers if fingerprint in peer.keys), None)
