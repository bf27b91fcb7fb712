"""Which ids a job has used: some 40 bytes an id, however long the ids are."""

from __future__ import annotations

import hashlib
import struct

_SLOT = struct.Struct("<12sI")  # 96 bits of the id's hash; the line that used it, 0 in a free slot
_MAX_LINE = (1 << 32) - 1
_START = 1 << 10  # slots


class UsedIds:
    """An open-addressed table of digests. A billion ids meet by chance with probability 1e-11."""

    def __init__(self) -> None:
        self._slots = bytearray(_START * _SLOT.size)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def claim(self, id: str, line: int) -> int | None:
        """The earlier line that uses `id`, or None, and then it is `line`'s from now on."""
        if not 0 < line <= _MAX_LINE:
            raise ValueError(f"line {line} is not from 1 to {_MAX_LINE}")
        digest = hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:12]
        offset, owner = self._find(digest)
        if owner:
            return owner
        _SLOT.pack_into(self._slots, offset, digest, line)
        self._used += 1
        if self._used * _SLOT.size * 3 > len(self._slots) * 2:
            self._grow()
        return None

    def _find(self, digest: bytes) -> tuple[int, int]:
        """Where the digest is, or the free slot where it belongs, and the line that is there."""
        mask = len(self._slots) // _SLOT.size - 1
        index = int.from_bytes(digest[:8], "little") & mask
        while True:
            found, line = _SLOT.unpack_from(self._slots, index * _SLOT.size)
            if line == 0 or found == digest:
                return index * _SLOT.size, line
            index = (index + 1) & mask

    def _grow(self) -> None:
        old = self._slots
        self._slots = bytearray(2 * len(old))
        for digest, line in _SLOT.iter_unpack(old):
            if line:
                _SLOT.pack_into(self._slots, self._find(digest)[0], digest, line)
