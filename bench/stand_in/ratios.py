"""Two lossless codecs in a dozen lines each, to prove that stand-in messages compress as real ones do.

Only sizes are looked at here; nothing of this is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import zstandard

from bench.stand_in.activations import Bits

# Size in % of the raw message, of messages of 416 KB of the recorded model itself: measured once, on the
# whole recording of which bench/data holds a sample.
EXPECTED: Mapping[str, tuple[float, float]] = {  # P, H8
    "bfloat16": (71.6, 0.95 * 71.6),
    "float16": (86.0, 86.0),
}
TOLERANCE = 2.0  # percentage points

HUFFMAN_ONLY = zstandard.ZstdCompressionParameters(
    compression_level=1,
    strategy=zstandard.STRATEGY_FAST,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,  # with tables so small, matches of 7 bytes are as good as never found
    target_length=0,
    write_content_size=False,
    write_checksum=False,
    write_dict_id=False,
)


def lanes(values: Bits) -> tuple[bytes, bytes]:
    """The high and the low bytes of the values."""
    return (values >> 8).astype(np.uint8).tobytes(), values.astype(np.uint8).tobytes()


def p_percent(values: Bits) -> float:
    """P, the paper's layout: zstd level 3 on each of the two lanes."""
    coder = zstandard.ZstdCompressor(level=3)
    return 100 * sum(len(coder.compress(lane)) for lane in lanes(values)) / values.nbytes


def h8_percent(values: Bits) -> float:
    """H8: the high lane through a Huffman coder alone, the low lane as it is."""
    high, low = lanes(values)
    coder = zstandard.ZstdCompressor(compression_params=HUFFMAN_ONLY)
    return 100 * (len(coder.compress(high)) + len(low)) / values.nbytes


def check_ratios(dtype: str, values: Bits) -> tuple[float, float]:
    """P's and H8's sizes in %, of a message of 32 rows.

    Raises: AssertionError where one is further than `TOLERANCE` from what the model's own messages give.
    """
    found = p_percent(values), h8_percent(values)
    for name, percent, expected in zip(("P", "H8"), found, EXPECTED[dtype], strict=True):
        assert abs(percent - expected) <= TOLERANCE, (
            f"{name} makes {percent:.1f} % of a stand-in's {dtype} message, {expected:.1f} % of a real one"
        )
    return found
