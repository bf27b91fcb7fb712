"""Whether stand-in messages compress as real ones do."""

from __future__ import annotations

from collections.abc import Mapping

from bbquic.codec.frame import Codec, Shape, encode
from bench.stand_in.activations import Bits

# Size in % of the raw message, of messages of 416 KB of the recorded model itself: measured once, on the
# whole recording of which bench/data holds a sample.
EXPECTED: Mapping[str, tuple[float, float]] = {  # P, H8
    "bfloat16": (71.6, 0.95 * 71.6),
    "float16": (86.0, 86.0),
}
TOLERANCE = 2.0  # percentage points


def percent(values: Bits, dtype: str, codec: Codec) -> float:
    """Size in % of the raw message."""
    rows, columns = values.shape
    return 100 * len(encode(values, Shape(dtype, rows, columns), codec).body) / values.nbytes


def check_ratios(dtype: str, values: Bits) -> tuple[float, float]:
    """P's and H8's sizes in %, of a message of 32 rows.

    Raises: AssertionError where one is further than `TOLERANCE` from what the model's own messages give.
    """
    found = percent(values, dtype, Codec.P), percent(values, dtype, Codec.H8)
    for name, size, expected in zip(("P", "H8"), found, EXPECTED[dtype], strict=True):
        assert abs(size - expected) <= TOLERANCE, (
            f"{name} makes {size:.1f} % of a stand-in's {dtype} message, {expected:.1f} % of a real one"
        )
    return found
