"""Units as types, so that a bit and a byte, a second and a millisecond never meet unnoticed."""

from typing import NewType

Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", int)
BytesPerSecond = NewType("BytesPerSecond", float)
