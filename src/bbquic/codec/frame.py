"""A tensor on the wire: a fixed header that describes it, and its lanes (docs/wire-format.md)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from bbquic.codec.entropy import Buffer, Coder, compress, expand_untrusted
from bbquic.codec.planes import (
    WIDTHS,
    Bits,
    Width,
    byte_join,
    byte_split,
    join,
    narrowed,
    split,
    widened,
)
from bbquic.codec.table import DIGEST, ShiftTable
from bbquic.errors import RemoteProtocolError

VERSION = 1
HEADER = struct.Struct("<BBBBII8sIII")  # version, codec, dtype, width, rows, columns, table, lanes, zero
NO_TABLE = bytes(DIGEST)


class Codec(IntEnum):
    """How a tensor's bytes are laid out."""

    RAW = 0  # as they are
    H8 = 1  # upper bytes Huffman coded
    REC = 2  # exponents Huffman coded, relative to each channel's usual one
    P = 3  # the paper's: upper bytes and lower bytes, both zstd level 3


@dataclass(frozen=True, slots=True)
class Shape:
    """What both ends know of a tensor before a byte of it is read."""

    dtype: str
    rows: int
    columns: int

    @property
    def itemsize(self) -> int:
        return WIDTHS[self.dtype].itemsize

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.rows * self.columns * self.itemsize

    @property
    def kind(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        return np.dtype("<u4") if self.itemsize == 4 else np.dtype("<u2")


@dataclass(frozen=True, slots=True)
class Frame:
    """A tensor as it travels: HEADER's bytes, and a body of one lane after the other.

    The two are apart so that a tensor sent raw is its own body, without a copy.
    """

    header: bytes
    body: Buffer


def encode(bits: Bits, shape: Shape, codec: Codec, table: ShiftTable | None = None) -> Frame:
    """A frame of the bits [T, D]; a raw one, whose body is their memory, where the codec saves nothing.

    REC without a table that fits is H8.
    """
    frame = None if codec is Codec.RAW else _pack(bits, shape, codec, table)
    return _raw(bits, shape) if frame is None else frame


def _raw(bits: Bits, shape: Shape) -> Frame:
    width = WIDTHS[shape.dtype]
    header = HEADER.pack(
        VERSION, Codec.RAW, width, width, shape.rows, shape.columns, NO_TABLE, 0, shape.size, 0
    )
    return Frame(header, np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)


def _pack(bits: Bits, shape: Shape, codec: Codec, table: ShiftTable | None) -> Frame | None:
    digest = NO_TABLE
    if codec is Codec.P:
        width = WIDTHS[shape.dtype]
        high, low = byte_split(bits)
        lanes: tuple[Buffer, Buffer] = (compress(high, Coder.LEVEL_3), compress(low, Coder.LEVEL_3))
    else:
        width, values = effective(bits, shape)
        shifts = None
        if codec is Codec.REC and table is not None and fits(table, width, shape):
            shifts, digest = table.shifts, table.digest
        codec = Codec.H8 if shifts is None else Codec.REC
        high, low = split(values, width, shifts)
        lanes = (compress(high, Coder.HUFFMAN), low.data)
    sizes = [len(lane) for lane in lanes]
    if sum(sizes) >= shape.size:
        return None
    header = HEADER.pack(
        VERSION, codec, WIDTHS[shape.dtype], width, shape.rows, shape.columns, digest, *sizes, 0
    )
    return Frame(header, b"".join(lanes))


def effective(bits: Bits, shape: Shape) -> tuple[Width, Bits]:
    """The width that the values need, and their bits in it."""
    return narrowed(bits) if shape.itemsize == 4 else (WIDTHS[shape.dtype], bits)


def fits(table: ShiftTable, width: Width, shape: Shape) -> bool:
    return table.width is width and table.columns == shape.columns


def decode_untrusted(header: bytes, body: Buffer, shape: Shape, tables: Mapping[bytes, ShiftTable]) -> Bits:
    """The bits [T, D] of a frame that a peer sent; of a raw one, a view of its body.

    `shape` is what the pack around it says. Raises: RemoteProtocolError naming what is wrong; no memory is
    taken for sizes that the frame claims and `shape` does not.
    """
    if len(header) != HEADER.size:
        raise RemoteProtocolError(f"a frame's header has {len(header)} bytes, not {HEADER.size}")
    version, code, dtype, width, rows, columns, digest, high, low, zero = HEADER.unpack(header)
    if version != VERSION:
        raise RemoteProtocolError(f"a frame has version {version}, not {VERSION}")
    try:
        codec, width = Codec(code), Width(width)
    except ValueError:
        raise RemoteProtocolError(f"a frame is of the unknown codec {code} or width {width}") from None
    if (dtype, rows, columns) != (WIDTHS[shape.dtype], shape.rows, shape.columns) or zero:
        raise RemoteProtocolError(
            f"a frame says it is [{rows}, {columns}] of type {dtype}, which {shape} is not"
        )
    if high + low != len(body):
        raise RemoteProtocolError(f"a frame's lanes are {high} and {low} bytes, its body has {len(body)}")
    view = memoryview(body)
    lanes = view[:high], view[high:]
    if codec is Codec.RAW:
        if high or low != shape.size:
            raise RemoteProtocolError(f"a raw frame of {high} and {low} bytes is not {shape.size}")
        return np.frombuffer(lanes[1], shape.kind).reshape(rows, columns)
    return _unpack(codec, width, _table(codec, width, digest, shape, tables), lanes, shape)


def _table(
    codec: Codec, width: Width, digest: bytes, shape: Shape, tables: Mapping[bytes, ShiftTable]
) -> ShiftTable | None:
    if codec is not Codec.REC:
        if digest != NO_TABLE:
            raise RemoteProtocolError(f"a frame of codec {codec.name} names a shift table")
        return None
    table = tables.get(digest)
    if table is None or not fits(table, width, shape):
        raise RemoteProtocolError(f"a frame uses the shift table {digest.hex()}, which is not known here")
    return table


def _unpack(
    codec: Codec, width: Width, table: ShiftTable | None, lanes: tuple[memoryview, memoryview], shape: Shape
) -> Bits:
    count = shape.rows * shape.columns
    where = shape.rows, shape.columns
    if codec is Codec.P:
        high = expand_untrusted(lanes[0], count)
        low = expand_untrusted(lanes[1], count * (shape.itemsize - 1))
        return byte_join(high, low, shape.itemsize, where)
    if width.itemsize > shape.itemsize or (shape.itemsize == 2 and width is not WIDTHS[shape.dtype]):
        raise RemoteProtocolError(f"a frame of {shape.dtype} says that its values are {width.name.lower()}")
    if len(lanes[1]) != count * width.low_bytes:
        raise RemoteProtocolError(f"a frame's low lane has {len(lanes[1])} bytes for {count} values")
    high = expand_untrusted(lanes[0], count)
    low = np.frombuffer(lanes[1], np.uint8)
    bits = join(high, low, width, None if table is None else table.shifts, where)
    return widened(bits, width) if shape.itemsize == 4 else bits
