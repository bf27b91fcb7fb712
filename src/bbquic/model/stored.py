"""The header of a safetensors file, which says what is in it without reading any of that.

Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from bbquic.errors import ModelError

MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `dtype` is safetensors' name for it, as in `DTYPE_BYTES`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte of the file
    length: int  # bytes


def read_header(file: Path) -> Mapping[str, StoredTensor]:
    """Every tensor a file says it holds. Raises: ModelError on a file that contradicts itself."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ModelError(f"{file} is not a safetensors file: a header of {length} bytes cannot be")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file} is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    return {name: _stored(file, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(file: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    damaged = ModelError(f"{file} is damaged: its header describes {name!r} as {entry!r:.80}")
    if not isinstance(entry, dict):
        raise damaged
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and _counts(shape) and _counts(offsets) and len(offsets) == 2):
        raise damaged
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{file}: {name} has the type {dtype}, which is not read here")
    start, end = offsets
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise damaged
    if data + end > size:
        raise ModelError(f"{file} is cut short: {name} ends at byte {data + end} of {size}")
    return StoredTensor(name, file, dtype, tuple(shape), data + start, end - start)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
