"""How fast this machine codes hidden states: on values that are distributed like a model's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bbquic.codec.frame import Codec, Frame, Shape, decode_untrusted, encode
from bbquic.codec.planes import WIDTHS, Bits
from bbquic.codec.table import LEARN_ROWS, ShiftTable, TableLearner
from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import CodecSpeed
from bbquic.runtime.hop import CODECS
from bbquic.runtime.stopwatch import Stopwatch

ROWS = 64  # of the message that is timed
# Of the logarithm of channels' magnitudes: exponents then carry 2.7 bits, as a model's do.
CHANNEL_SPREAD = 0.5

# Sizes belong to activations, not to a machine: those of docs/compression.md.
RATIOS: Mapping[str, Mapping[Way, float]] = {
    "bfloat16": {Way.H8: 0.68, Way.REC: 0.67},
    "float16": {Way.H8: 0.86, Way.REC: 0.85},
    "float32": {Way.H8: 0.84, Way.REC: 0.835},
}


def measure_codecs(dtype: str, hidden: int, watch: Stopwatch) -> dict[Way, CodecSpeed]:
    """Seconds a raw byte at either end, by codec, for messages [ROWS, hidden]."""
    bits = like_activations(dtype, LEARN_ROWS + ROWS, hidden)
    table = TableLearner().add(bits[:LEARN_ROWS], WIDTHS[dtype])
    assert table is not None, "so many rows make a table"
    shape = Shape(dtype, ROWS, hidden)
    message = np.ascontiguousarray(bits[LEARN_ROWS:])
    ways = (Way.H8, Way.REC)
    return {
        way: _speed(message, shape, way, table, watch.share(1 / (len(ways) - place)))
        for place, way in enumerate(ways)
    }


def _speed(bits: Bits, shape: Shape, way: Way, table: ShiftTable, watch: Stopwatch) -> CodecSpeed:
    tables = {table.digest: table}
    frame: Frame = encode(bits, shape, CODECS[way], table)
    assert frame.header[1] != Codec.RAW, "such values compress"

    def pack() -> None:
        encode(bits, shape, CODECS[way], table)

    def unpack() -> None:
        decode_untrusted(frame.header, frame.body, shape, tables)

    encoding = watch.share(0.5).median(pack)
    decoding = watch.median(unpack)
    return CodecSpeed(RATIOS[shape.dtype][way], encoding / shape.size, decoding / shape.size)


def like_activations(dtype: str, rows: int, columns: int) -> Bits:
    """Bits [rows, columns] of normal values in channels of unlike magnitude; the same ones each time."""
    random = np.random.default_rng(0)
    scales = np.exp(CHANNEL_SPREAD * random.standard_normal(columns))
    values = (random.standard_normal((rows, columns)) * scales).astype(np.float32)
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
