"""Buffers that are used again once what reads them has passed: few, of a few sizes, and never more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bbquic.units import Bytes

SMALLEST = 64 << 10  # bytes; sizes are its doubles, so that no buffer is over half empty but the smallest
EACH = 4  # buffers of a size: a pack brings some tensors, and some packs are on their way

B = TypeVar("B")


class Passing(Protocol):
    """Something that will have happened: a CUDA event, for one."""

    def query(self) -> bool:
        """Whether it has."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(frozen=True, slots=True)
class Lease(Generic[B]):
    """A buffer somebody fills or reads."""

    buffer: B
    size: Bytes


class BufferPool(Generic[B]):
    """For one thread. `EACH` buffers of a size at most: then it waits for the one given back first."""

    def __init__(self, allocate: Callable[[Bytes], B]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[tuple[Lease[B], Passing | None]]] = {}  # by size, oldest first
        self._count: dict[int, int] = {}
        self.taken = 0  # times

    @property
    def buffers(self) -> int:
        """How many there are."""
        return sum(self._count.values())

    @property
    def nbytes(self) -> Bytes:
        return Bytes(sum(size * count for size, count in self._count.items()))

    def take(self, needed: int) -> Lease[B]:
        """A buffer of at least `needed` bytes, which is the caller's until `give_back`."""
        size = Bytes(max(SMALLEST, 1 << (needed - 1).bit_length()) if needed else SMALLEST)
        free = self._free.setdefault(size, [])
        self.taken += 1
        for place, (lease, reader) in enumerate(free):
            if reader is None or reader.query():
                del free[place]
                return lease
        if self._count.get(size, 0) < EACH:
            lease = Lease(self._allocate(size), size)  # first: there may be no memory for it
            self._count[size] = self._count.get(size, 0) + 1
            return lease
        assert free, "a lease was not given back"
        lease, reader = free.pop(0)
        if reader is not None:
            reader.synchronize()
        return lease

    def give_back(self, lease: Lease[B], reader: Passing | None = None) -> None:
        """The buffer may be filled again, as soon as `reader` has passed."""
        self._free[lease.size].append((lease, reader))
