"""A shift for each channel, learnt from a hop's traffic: channels differ in magnitude, and once each
exponent is told relative to its channel's usual one, fewer of them are left to code.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from bbquic.codec.planes import Bits, Width
from bbquic.errors import RemoteProtocolError

LEARN_ROWS = 256  # from 8 rows a table is worse than none
DIGEST = 8  # bytes; tells a hop's few tables apart, and a damaged one from them
CENTRE = 15  # float16's exponent of 1.0: shifted exponents lie around it, and borrow from no sign


@dataclass(frozen=True, slots=True, eq=False)
class ShiftTable:
    """`shifts` [D]: exponents as uint8 (bfloat16, float32), or steps of the pattern as uint16 (float16)."""

    width: Width
    shifts: Bits
    digest: bytes

    @property
    def columns(self) -> int:
        return int(self.shifts.size)

    @classmethod
    def of(cls, width: Width, shifts: Bits) -> ShiftTable:
        shifts = np.ascontiguousarray(shifts, dtype=_item(width))
        shifts.setflags(write=False)
        digest = hashlib.sha256(bytes([width]) + shifts.astype(shifts.dtype.newbyteorder("<")).tobytes())
        return cls(width, shifts, digest.digest()[:DIGEST])

    def encode(self) -> bytes:
        """The shifts, little-endian."""
        return self.shifts.astype(self.shifts.dtype.newbyteorder("<")).tobytes()

    @classmethod
    def decode_untrusted(cls, width: int, columns: int, shifts: bytes, digest: bytes) -> ShiftTable:
        """Raises: RemoteProtocolError: an unknown width, another size, bytes that are not the digest's."""
        try:
            known = Width(width)
        except ValueError:
            raise RemoteProtocolError(f"a shift table is of the unknown width {width}") from None
        item = _item(known)
        if len(shifts) != columns * item.itemsize:
            raise RemoteProtocolError(f"a shift table has {len(shifts)} bytes for {columns} channels")
        table = cls.of(known, np.frombuffer(shifts, item.newbyteorder("<")))
        if table.digest != digest:
            raise RemoteProtocolError("a shift table is not what its digest says")
        return table


class TableLearner:
    """Watches the rows of one hop until there are enough of them for a table. One width at a time."""

    def __init__(self, rows: int = LEARN_ROWS) -> None:
        self._rows = rows
        self._seen: list[Bits] = []
        self._count = 0
        self._width: Width | None = None

    def add(self, bits: Bits, width: Width) -> ShiftTable | None:
        """Take a message's bits [T, D]; the table once there are enough, and then it starts anew."""
        if width is not self._width or (self._seen and self._seen[0].shape[1] != bits.shape[1]):
            self._width, self._seen, self._count = width, [], 0
        part = _exponents(bits[: self._rows - self._count], width)
        self._seen.append(part)
        self._count += len(part)
        if self._count < self._rows:
            return None
        usual = np.median(np.concatenate(self._seen), axis=0).astype(np.int64)  # [D]
        self._seen, self._count = [], 0
        if width is Width.FLOAT16:
            usual = (usual - CENTRE) << 10
        return ShiftTable.of(width, usual.astype(_item(width)))


def _item(width: Width) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    return np.dtype(np.uint16) if width is Width.FLOAT16 else np.dtype(np.uint8)


def _exponents(bits: Bits, width: Width) -> Bits:
    if width is Width.FLOAT16:
        return ((bits >> 10) & 0x1F).astype(np.uint8)
    return (bits >> (7 if width is Width.BFLOAT16 else 23)).astype(np.uint8)
