"""What this machine adds to the assumed times, measured apart from all that is predicted with it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from bbquic.codec.frame import Codec, Shape, decode_untrusted, encode
from bbquic.codec.planes import WIDTHS
from bbquic.codec.table import LEARN_ROWS, ShiftTable, TableLearner
from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import CodecSpeed
from bbquic.units import Seconds
from bench.common import median
from bench.stand_in.activations import Pool

CODECS = {Way.H8: Codec.H8, Way.REC: Codec.REC}


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a pack takes beside computing, coding and travelling.

    stage: keeps a stage's device idle between two packs. hop: of a message between two machines, lanes and
    transport of both ends, while others use them. coordinator: its turn-round, once a loop.
    """

    stage: Seconds = Seconds(0.0)
    hop: Seconds = Seconds(0.0)
    coordinator: Seconds = Seconds(0.0)


@dataclass(frozen=True)
class Figures:
    """Of this machine."""

    overhead: Overhead = Overhead()
    codecs: Mapping[Way, CodecSpeed] = field(default_factory=dict)


def codec_speeds(dtype: str, hidden: int, rows: int, repeats: int = 9) -> dict[Way, CodecSpeed]:
    """Ratio and seconds a raw byte, at either end, of stand-ins' messages of so many rows; medians."""
    pool = Pool(dtype, hidden, max(rows, LEARN_ROWS))
    table = TableLearner().add(pool.next_slice(LEARN_ROWS), WIDTHS[dtype])
    assert table is not None, "a table follows from so many rows"
    return {
        way: _speed(pool, table, Shape(dtype, rows, hidden), codec, repeats) for way, codec in CODECS.items()
    }


def _speed(pool: Pool, table: ShiftTable, shape: Shape, codec: Codec, repeats: int) -> CodecSpeed:
    tables = {table.digest: table}
    ratios, encoding, decoding = [], [], []
    for _ in range(repeats):
        bits = pool.next_slice(shape.rows)
        began = time.perf_counter()
        frame = encode(bits, shape, codec, table)
        encoded = time.perf_counter()
        decode_untrusted(frame.header, frame.body, shape, tables)
        decoding.append((time.perf_counter() - encoded) / shape.size)
        encoding.append((encoded - began) / shape.size)
        ratios.append(len(frame.body) / shape.size)
    return CodecSpeed(median(ratios), median(encoding), median(decoding))
