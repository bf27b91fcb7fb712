"""QUIC's variable-length integers (RFC 9000, 16), read in place."""

from __future__ import annotations


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """The integer at `place`, and where the next byte is.

    Where `data` ends inside the integer, IndexError is raised or the second figure is beyond the end of
    `data`, and the first means nothing: whoever reads on checks the one before using the other.
    """
    first = data[place]
    if first < 0x40:
        return first, place + 1
    if first < 0x80:
        return (first & 0x3F) << 8 | data[place + 1], place + 2
    length = 4 if first < 0xC0 else 8
    value = int.from_bytes(data[place : place + length], "big")
    return value & ((1 << (8 * length - 2)) - 1), place + length


def encode_varint(value: int) -> bytes:
    """The shortest encoding. Raises: OverflowError for what has over 62 bits."""
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x4000_0000:
        return (value | 0x8000_0000).to_bytes(4, "big")
    if value < 0x4000_0000_0000_0000:
        return (value | 0xC000_0000_0000_0000).to_bytes(8, "big")
    raise OverflowError(f"{value} has over 62 bits")
