"""Networks as people write them: a TOML file, or `a:b:rate=20,delay=50,loss=0.5%` on a command line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.wan.errors import WanError
from bench.wan.link import Link, Network, Pair, Uplink

LINK_KEYS = {
    "rate": "rate_mbps",
    "delay": "delay_ms",
    "jitter": "jitter_ms",
    "jitter-hold": "jitter_hold_ms",
    "loss": "loss",
    "burst": "loss_burst",
    "reorder": "reorder",
    "reorder-delay": "reorder_ms",
    "queue": "queue_ms",
    "queue-bytes": "queue_bytes",
    "mtu": "mtu",
}
UPLINK_KEYS = {key: LINK_KEYS[key] for key in ("rate", "queue", "queue-bytes")}
FILE_KEYS = {"hosts", "mtu", "seed", "default", "link", "one-way", "uplink"}
WHOLE = {"mtu", "queue-bytes"}


def network_of_file(path: Path) -> Network:
    """Read a network from TOML; bench/METHODOLOGY.md shows one.

    Raises: WanError with what is wrong in it.
    """
    try:
        document = tomllib.loads(path.read_text())
        unknown = document.keys() - FILE_KEYS
        if unknown:
            raise WanError(f"unknown key {sorted(unknown)[0]!r}; there are {', '.join(sorted(FILE_KEYS))}")
        return network_of(
            hosts=document["hosts"],
            both=document.get("link", {}).items(),
            one_way=document.get("one-way", {}).items(),
            uplinks=document.get("uplink", {}).items(),
            default=document.get("default", {}),
            mtu=document.get("mtu", 1500),
            seed=document.get("seed", 1),
        )
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise WanError(f"{path}: {error}") from error
    except WanError as error:
        raise WanError(f"{path}: {error}") from error


def network_of(
    *,
    hosts: Iterable[str],
    both: Iterable[tuple[str, Mapping[str, Any]]] = (),
    one_way: Iterable[tuple[str, Mapping[str, Any]]] = (),
    uplinks: Iterable[tuple[str, Mapping[str, Any]]] = (),
    default: Mapping[str, Any] | None = None,
    mtu: int = 1500,
    seed: int = 1,
) -> Network:
    """both, one_way: `a:b` and settings by their short names; of two for a direction the later counts.

    Raises: WanError on an unknown name, ValueError on a value that no link can have.
    """
    names = tuple(hosts)
    links: dict[Pair, Link] = {}
    for text, settings in both:
        source, to = _pair(text)
        links[source, to] = links[to, source] = _link(settings)
    for text, settings in one_way:
        links[_pair(text)] = _link(settings)
    return Network(
        hosts=names,
        links=links,
        uplinks={host: Uplink(**{"rate_mbps": None, **_fields(one, UPLINK_KEYS)}) for host, one in uplinks},
        mtus=dict.fromkeys(names, mtu),
        default=_link(default or {}),
        seed=seed,
    )


def settings_of(text: str) -> dict[str, str]:
    """`rate=20,loss=0.5%` by name. Raises: WanError where a part is not `name=value`."""
    settings = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise WanError(f"{part!r} is not name=value")
        settings[key.strip()] = value.strip()
    return settings


def _pair(text: str) -> Pair:
    source, colon, to = text.partition(":")
    if not colon or ":" in to:
        raise WanError(f"{text!r} is not two hosts, as in a:b")
    return source, to


def _link(settings: Mapping[str, Any]) -> Link:
    return Link(**_fields(settings, LINK_KEYS))


def _fields(settings: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    fields = {}
    for key, value in settings.items():
        if key not in keys:
            raise WanError(f"unknown setting {key!r}; there are {', '.join(keys)}")
        fields[keys[key]] = _number(key, value)
    return fields


def _number(key: str, value: Any) -> float | int:
    """A number, or a text that is one; a share may be a percentage. Raises: WanError."""
    text = str(value)
    try:
        if text.endswith("%"):
            return float(text.removesuffix("%")) / 100
        return int(text) if key in WHOLE else float(text)
    except ValueError as error:
        raise WanError(f"{key} = {text!r} is not a number") from error
