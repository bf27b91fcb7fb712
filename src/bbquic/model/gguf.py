"""Reads a GGUF file that nobody vouches for: every length is checked before it is believed.

`gguf.GGUFReader` follows the lengths it finds (an array said to have 2**60 members is a loop of 2**60
rounds), so the header is parsed here; the arithmetic of dequantising is the gguf package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from bbquic.errors import ModelError

VERSIONS = (2, 3)
MAX_FIELDS = 4096  # real files have some dozens
MAX_TENSORS = 1 << 16  # real files have some hundreds
MAX_STRING = 1 << 20  # bytes; the longest is a chat template of some kilobytes
MAX_ELEMENTS = 1 << 36  # of one tensor; an embedding of 256k tokens by 16k has 1 << 32
MAX_ALIGNMENT = 1 << 16

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor's bytes are; `shape` is torch's order (GGUF has the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    length: int  # bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header over the mapped file. Built by `read_gguf`."""

    fields: Mapping[str, Any]  # int, float, bool, str, or a list of one of them
    tensors: Mapping[str, GGUFTensor]
    data: NDArray[np.uint8]

    def dequantized(self, name: str) -> NDArray[np.float32]:
        """A tensor's values in float32, in `shape`. Raises: KeyError on an unknown name."""
        tensor = self.tensors[name]
        stored = self.data[tensor.offset : tensor.offset + tensor.length]
        values: NDArray[np.float32] = gguf.quants.dequantize(stored.reshape(tensor.shape[0], -1), tensor.kind)
        return values.reshape(tensor.shape)


def read_gguf(path: Path) -> GGUFFile:
    """Parses the header; no tensor is read. Raises: ModelError on anything the format does not allow."""
    try:
        data: NDArray[np.uint8] = np.memmap(path, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"cannot read {path}: {error}") from error
    cursor = _Cursor(data.data, str(path))
    if cursor.take(4) != b"GGUF":
        raise cursor.error("it does not begin with GGUF")
    if (version := cursor.scalar("<I")) not in VERSIONS:
        raise cursor.error(f"its version is {version}, not one of {VERSIONS}")
    tensor_count = cursor.count("<Q", MAX_TENSORS, "tensors")
    field_count = cursor.count("<Q", MAX_FIELDS, "fields")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.string()
        if name in fields:
            raise cursor.error(f"the field {name!r} is there twice")
        fields[name] = cursor.value(cursor.scalar("<I"))
    described = [_describe(cursor) for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", 32)
    if not (type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0):
        raise cursor.error(f"its alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in described:
        length = _stored_length(cursor, name, shape, kind)
        if name in tensors:
            raise cursor.error(f"the tensor {name!r} is there twice")
        if offset % alignment or start + offset + length > len(data):
            raise cursor.error(f"the tensor {name!r} is not within the file")
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, length)
    return GGUFFile(fields, tensors, data)


def _describe(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    dimensions = cursor.count("<I", 4, f"dimensions of {name!r}")
    shape = tuple(cursor.scalar("<Q") for _ in range(dimensions))[::-1]
    number = cursor.scalar("<I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.error(f"the tensor {name!r} has the unknown type {number}") from None
    if kind.name not in _READABLE:
        raise cursor.error(f"the tensor {name!r} has the type {kind.name}, which is not read here")
    return name, shape, kind, cursor.scalar("<Q")


def _stored_length(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Bytes of a tensor: its last dimension is cut into blocks of some values in some bytes."""
    values, size = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    if not shape or not 0 < elements <= MAX_ELEMENTS or shape[-1] % values:
        raise cursor.error(f"the tensor {name!r} cannot have the shape {shape} as {kind.name}")
    return elements // values * size


class _Cursor:
    """Takes values off the front of a buffer and never beyond its end."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data
        self.name = name
        self.position = 0

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.name} is not a GGUF file that can be read: {what}")

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise self.error(f"it ends at byte {len(self.data)}, within its header")
        taken = bytes(self.data[self.position : end])
        self.position = end
        return taken

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def count(self, layout: str, limit: int, what: str) -> int:
        number: int = self.scalar(layout)
        if number > limit:
            raise self.error(f"it says it has {number} {what}; {limit} are allowed")
        return number

    def string(self) -> str:
        try:
            return self.take(self.count("<Q", MAX_STRING, "bytes in a string")).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"a string is not UTF-8 ({error})") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar("<" + _SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise self.error(f"a field has the unknown type {kind}")

    def array(self) -> list[Any]:
        kind = self.scalar("<I")
        smallest = (
            struct.calcsize("<" + _SCALARS[kind]) if kind in _SCALARS else 8
        )  # a string has a length first
        length = self.count("<Q", (len(self.data) - self.position) // smallest, "members in an array")
        if kind in _SCALARS:
            layout = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack(layout, self.take(struct.calcsize(layout))))
        if kind != _STRING:
            raise self.error(f"an array has members of the type {kind}")
        return [self.string() for _ in range(length)]
