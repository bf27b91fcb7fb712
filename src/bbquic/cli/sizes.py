"""Sizes as people write them."""

from __future__ import annotations

import re

from bbquic.errors import ConfigError
from bbquic.units import Bytes

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(text: str) -> Bytes:
    """`8G`, `500M` or plain bytes; decimal, as memory free is shown. Raises: ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size", hint="such as 8G, 500M or a number of bytes")
    return Bytes(int(float(match[1]) * _FACTORS[match[2].upper()]))


def parse_split(text: str) -> tuple[int, ...]:
    """`10,10,10`. Raises: ConfigError."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ConfigError(f"{text!r} is not a split", hint="such as --split 10,10,10")
    return tuple(int(part) for part in parts)
