"""peers.toml, and who this machine is in it. The same file lies on every machine of a cluster."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbquic.errors import ConfigError
from bbquic.transport.identity import Fingerprint, Identity, Peer, find_peer, load_identity

PEER_KEYS = frozenset({"name", "address", "keys", "may", "price"})
NEW_KEY_HINT = "make a key with `bbquic certs new NAME` and paste the entry it prints into peers.toml"


@dataclass(frozen=True)
class Peers(Mapping[str, Peer]):
    """The cluster's machines by name, in the order of the file."""

    path: Path
    by_name: dict[str, Peer]
    prices: Mapping[str, float] = field(default_factory=dict)  # dollars an hour, of those that have one

    def __getitem__(self, name: str) -> Peer:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)


def load_peers(path: Path) -> Peers:
    """Read peers.toml. Raises: ConfigError naming file, peer and key for whatever is wrong in it."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=NEW_KEY_HINT) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    _refuse_unknown(str(path), set(document), {"peer"}, "every machine is a [[peer]] table")
    entries = document.get("peer", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: peer must be tables", hint="write [[peer]], with two brackets")
    if not entries:
        raise ConfigError(f"{path} names no peer", hint=NEW_KEY_HINT)
    by_name: dict[str, Peer] = {}
    prices: dict[str, float] = {}
    for number, entry in enumerate(entries, start=1):
        name = entry.get("name")
        where = f"{path}: peer {name}" if isinstance(name, str) else f"{path}: peer number {number}"
        peer = _peer(where, entry)
        _refuse_duplicate(where, peer, by_name.values())
        by_name[peer.name] = peer
        if "price" in entry:
            prices[peer.name] = _price(where, entry["price"])
    return Peers(path, by_name, prices)


def find_identity(peers: Peers, certs_dir: Path, key: Path | None = None) -> tuple[Identity, Peer]:
    """Who this machine is: the peer whose pinned key lies in `certs_dir`, or is `key`.

    Raises: ConfigError when there is none, or several and no `key` to choose by.
    """
    if key is not None:
        identity = load_identity(key)
        peer = find_peer(peers.values(), identity.fingerprint)
        if peer is None:
            raise ConfigError(
                f"{key} is {identity.fingerprint}, which is not pinned in {peers.path}",
                hint="add that fingerprint to this machine's keys in peers.toml, on every machine",
            )
        return identity, peer
    found: list[tuple[Path, Identity, Peer]] = []
    others: list[Path] = []
    for path in sorted(certs_dir.glob("*.key")):
        identity = load_identity(path)
        peer = find_peer(peers.values(), identity.fingerprint)
        if peer is None:
            others.append(path)
        else:
            found.append((path, identity, peer))
    if not found:
        seen = f"none of {', '.join(map(str, others))} is" if others else f"{certs_dir} holds no key that is"
        raise ConfigError(f"this machine is nobody: {seen} pinned in {peers.path}", hint=NEW_KEY_HINT)
    if len(found) > 1:
        names = ", ".join(f"{path} ({peer.name})" for path, _, peer in found)
        raise ConfigError(f"several keys here are pinned in {peers.path}: {names}", hint="choose with --key")
    _, identity, peer = found[0]
    return identity, peer


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`, an IPv6 host in brackets. Raises: ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or not port.isascii() or not port.isdigit() or (":" in host) != bracketed:
        raise ValueError(f"{text!r} is not host:port (an IPv6 host goes in brackets)")
    if not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} has no port between 1 and 65535")
    return host, int(port)


def _peer(where: str, entry: dict[str, Any]) -> Peer:
    _refuse_unknown(where, set(entry), PEER_KEYS, f"a peer has {', '.join(sorted(PEER_KEYS))}")
    if "name" not in entry:
        raise ConfigError(f"{where}: name is missing", hint='name = "home-a"')
    if "keys" not in entry:
        raise ConfigError(f"{where}: keys is missing", hint="`bbquic certs show` prints a machine's key")
    name, address = entry["name"], entry.get("address")
    keys, may = _strings(where, entry, "keys"), _strings(where, entry, "may")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name must be a string")
    if address is not None and not isinstance(address, str):
        raise ConfigError(f"{where}: address must be a string", hint='address = "203.0.113.7:4433"')
    try:
        return Peer(
            name=name,
            address=None if address is None else parse_address(address),
            keys=tuple(map(Fingerprint, keys)),  # Peer itself checks each
            may=frozenset(may),
        )
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _price(where: str, value: object) -> float:
    """Dollars an hour."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise ConfigError(f"{where}: price must be dollars an hour, not {value!r}", hint="price = 0.45")


def _strings(where: str, entry: dict[str, Any], key: str) -> list[str]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where}: {key} must be a list of strings", hint=f'{key} = ["..."]')
    return value


def _refuse_unknown(where: str, found: set[str], known: frozenset[str] | set[str], hint: str) -> None:
    unknown = found - known
    if unknown:
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}", hint=hint)


def _refuse_duplicate(where: str, peer: Peer, others: Iterable[Peer]) -> None:
    for other in others:
        if peer.name == other.name:
            raise ConfigError(f"{where}: this name is taken by an entry above", hint="names are unique")
        if peer.address is not None and peer.address == other.address:
            raise ConfigError(f"{where}: address is also {other.name}'s", hint="a port serves one machine")
        for key in peer.keys:
            if key in other.keys:
                raise ConfigError(
                    f"{where}: keys: {key} is also {other.name}'s", hint="each machine makes a key of its own"
                )
