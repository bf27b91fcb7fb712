"""Recorded activations, widened to a model's hidden size and served a slice a message.

A recorded value is never in a message twice, up to 32 rows: the columns are cut into blocks of 576, as wide
as the recording, and each block of a row shows another recorded moment. Where a message has more rows, values
do come again, but in blocks with another order of the channels, so that an LZ coder finds no copies. A column
shows the same channel for 512 rows on end: a codec that learns from channels has something to learn.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

RECORDING = Path(__file__).parent.parent / "data" / "activations_sample.npz"
LAYERS = (10, 20)
SHORT = {"bfloat16": "bf16", "float16": "fp16"}

Bits = NDArray[np.uint16]
T = TypeVar("T", bound=np.generic)


@cache
def moments(dtype: str) -> Bits:
    """Bit patterns [16 moments, 32 requests, 576 channels]: 8 decode steps behind each of two layers."""
    with np.load(RECORDING) as arrays:
        return np.concatenate([arrays[f"decode_{SHORT[dtype]}_L{layer}"] for layer in LAYERS])


def widened(dtype: str, hidden: int, rows: int, seed: int = 1) -> Bits:
    """Bit patterns [rows, hidden] as a model with that hidden size might send them (`widen`)."""
    return widen(moments(dtype), hidden, rows, seed)


def widen(recorded: NDArray[T], hidden: int, rows: int, seed: int = 1) -> NDArray[T]:
    """From [moments, requests, channels] to [rows, hidden].

    Each block has an order of the channels of its own, and every 32 rows (a group) blocks show other moments.
    Row r shows request r mod 32 in all its blocks, so that any 32 rows on end have no recorded value twice.
    Raises: ValueError where the recording is too small for `hidden`.
    """
    count, requests, channels = recorded.shape
    blocks = -(-hidden // channels)
    if blocks > count:
        raise ValueError(f"a hidden size of {hidden} needs more than {count} blocks of {channels} channels")
    random = np.random.default_rng(seed)
    groups = []
    for group in range(-(-rows // requests)):
        if group % count == 0:  # all moments were shown in each block
            orders = [random.permutation(channels) for _ in range(blocks)]
        columns = [recorded[(block + group) % count][:, order] for block, order in enumerate(orders)]
        groups.append(np.concatenate(columns, axis=1)[:, :hidden])
    return np.ascontiguousarray(np.concatenate(groups)[:rows])


class Pool:
    """Widened activations, made once; each message is another slice of them, without a copy."""

    SPARE_ROWS = 256  # beyond the largest message: so many slices differ before the first comes again

    def __init__(self, dtype: str, hidden: int, most_rows: int, seed: int = 1) -> None:
        self.dtype, self.hidden, self.most_rows = dtype, hidden, most_rows
        self._values = widened(dtype, hidden, most_rows + self.SPARE_ROWS, seed)  # [R, D]
        self._first = 0

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def next_slice(self, rows: int) -> Bits:
        """Bit patterns [rows, hidden], a view; the rows behind those of the slice before.

        Raises: ValueError for more rows than the pool was made for.
        """
        if rows > self.most_rows:
            raise ValueError(f"a pack of {rows} rows, of a pool for {self.most_rows}")
        if self._first + rows > len(self._values):
            self._first = (self._first + rows) % (len(self._values) - rows + 1)
        first = self._first
        self._first += rows
        return self._values[first : first + rows]
