"""zstd as lanes use it: an entropy coder alone, or the paper's level 3. Contexts belong to threads."""

from __future__ import annotations

import threading
from enum import Enum
from typing import cast

import numpy as np
import zstandard

from bbquic.codec.planes import U8
from bbquic.errors import RemoteProtocolError

Buffer = bytes | memoryview

MOST_WINDOW = 1 << 21  # bytes; the largest that level 3 asks for: a frame that wants more is not ours


class Coder(Enum):
    """How a lane is compressed."""

    HUFFMAN = "huffman"  # matches make an exponent lane larger, and several times slower
    LEVEL_3 = "level 3"


class _Contexts(threading.local):
    """A compressor or decompressor costs 10 us to make and is not for two threads at once."""

    def __init__(self) -> None:
        self.compressors: dict[Coder, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)

    def compressor(self, coder: Coder) -> zstandard.ZstdCompressor:
        found = self.compressors.get(coder)
        if found is None:
            found = self.compressors[coder] = _new_compressor(coder)
        return found


def _new_compressor(coder: Coder) -> zstandard.ZstdCompressor:
    if coder is Coder.LEVEL_3:
        return zstandard.ZstdCompressor(level=3, write_content_size=False)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1,
        strategy=zstandard.STRATEGY_FAST,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        write_content_size=False,
        write_checksum=False,
        write_dict_id=False,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


_contexts = _Contexts()


def compress(lane: U8, coder: Coder) -> Buffer:
    """The lane as zstd has it, or as it is where that is no smaller."""
    packed = _contexts.compressor(coder).compress(lane.data)
    return packed if len(packed) < lane.size else cast(Buffer, lane.data)


def expand_untrusted(packed: memoryview, size: int) -> U8:
    """The lane of exactly `size` bytes; it is stored as it is iff `packed` has that size.

    Nothing beyond `size` is allocated, whatever the zstd frame says. Raises: RemoteProtocolError.
    """
    if len(packed) == size:
        return np.frombuffer(packed, np.uint8)
    if len(packed) > size:
        raise RemoteProtocolError(f"a lane of {len(packed)} bytes stands for {size}")
    try:
        declared = zstandard.frame_content_size(packed)
        if declared not in (-1, size):
            raise RemoteProtocolError(f"a lane declares {declared} bytes where there are {size}")
        lane = _contexts.decompressor.decompress(packed, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise RemoteProtocolError(f"a lane is no zstd frame of {size} bytes: {error}") from None
    if len(lane) != size:
        raise RemoteProtocolError(f"a lane has {len(lane)} bytes where there are {size}")
    return np.frombuffer(lane, np.uint8)
