"""Buffers used again: never two users at once, and never more than there may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.runtime.pool import EACH, SMALLEST, BufferPool, Lease
from bbquic.units import Bytes


class Reader:
    """Reads a buffer until the device comes to it."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed
        self.waited = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = self.waited = True


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.booleans()), max_size=60))
def test_a_buffer_is_given_out_only_when_its_reader_has_passed(uses: list[tuple[int, bool]]) -> None:
    made: list[int] = []

    def allocate(size: int) -> int:
        made.append(size)
        return len(made)

    pool: BufferPool[int] = BufferPool(allocate)
    readers: dict[int, Reader] = {}
    for needed, is_quick in uses:
        lease = pool.take(needed)
        assert lease.size >= max(needed, 1)
        assert lease.size < 2 * max(needed, SMALLEST)
        assert lease.buffer not in readers or readers[lease.buffer].passed
        readers[lease.buffer] = Reader(is_quick)
        pool.give_back(lease, readers[lease.buffer])
    assert pool.buffers == len(made)
    assert pool.nbytes == sum(made)
    assert all(made.count(size) <= EACH for size in made)


def test_a_full_pool_waits_for_the_buffer_given_back_first() -> None:
    pool: BufferPool[list[int]] = BufferPool(lambda size: [])
    leases: list[Lease[list[int]]] = [pool.take(1) for _ in range(EACH)]
    readers = [Reader(False) for _ in leases]
    for lease, reader in zip(leases, readers, strict=True):
        pool.give_back(lease, reader)
    assert pool.take(1).buffer is leases[0].buffer
    assert [reader.waited for reader in readers] == [True] + [False] * (EACH - 1)


def test_what_nobody_reads_is_free_at_once() -> None:
    pool: BufferPool[list[int]] = BufferPool(lambda size: [])
    for _ in range(10):
        pool.give_back(pool.take(100))
    assert (pool.buffers, pool.taken) == (1, 10)


def test_a_buffer_that_there_was_no_memory_for_is_none_of_them() -> None:
    room = [False] * 10 + [True] * EACH

    def allocate(size: Bytes) -> bytearray:
        if not room.pop(0):
            raise MemoryError
        return bytearray(size)

    pool = BufferPool(allocate)
    for _ in range(10):
        with pytest.raises(MemoryError):
            pool.take(1)
    assert pool.buffers == 0
    leases = [pool.take(1) for _ in range(EACH)]
    assert pool.buffers == len({id(lease.buffer) for lease in leases}) == EACH
