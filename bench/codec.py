"""Codecs on recorded activations, all of them interleaved in one process on one thread.

`python -m bench.codec [--rounds N] [--quick] [--bars]`. Shift tables are learnt on requests 0-15, figures
taken on 16-31. METHODOLOGY.md says what they mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from bbquic.codec.frame import Codec, Frame, Shape, decode_untrusted, encode
from bbquic.codec.planes import WIDTHS, Bits
from bbquic.codec.table import ShiftTable, TableLearner
from bench.common import append_result, median, print_bars
from bench.stand_in.activations import widened

DATA = Path(__file__).parent / "data" / "activations_sample.npz"
LEARN = 16  # requests a table is learnt on; the others are measured
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LAYERS = ("L10", "L20")
ROWS = (4, 8, 32, 128)
WIDE = 6656  # channels: 32 rows are 416 KB, the paper's message of LLaMA-30B
SPEED_ROWS = 32  # from there on, speeds are compared


@dataclass(frozen=True, slots=True)
class Contender:
    """Two functions: bits to bytes, bytes to bits (or to bytes, where it knows no bits)."""

    name: str
    pack: Callable[[Bits], Any]
    unpack: Callable[[Any], Any]


@dataclass
class Figures:
    """Over rounds: seconds a message, and its size."""

    size: float
    pack: list[float]
    unpack: list[float]


def load() -> dict[str, dict[str, Any]]:
    """For each dtype and layer, bits [N, 576] to learn from and to measure on."""
    found: dict[str, dict[str, Any]] = {}
    with np.load(DATA) as data:
        for short in DTYPES:
            for layer in LAYERS:
                decode = data[f"decode_{short}_{layer}"]  # [8 steps, 32 requests, 576]
                learn, measure = decode[:, :LEARN], decode[:, LEARN:]
                found[f"{short}_{layer}"] = {
                    "learn": np.ascontiguousarray(learn.reshape(-1, decode.shape[-1])),
                    "measure": np.ascontiguousarray(measure.reshape(-1, decode.shape[-1])),
                }
    return found


def wide(dtype: str) -> dict[str, Any]:
    """Rows of WIDE channels, widened from the same recording: 128 to learn from, others to measure."""
    rows = widened(dtype, WIDE, 256)  # [256, WIDE]; 32 on end show each request once
    requests = np.arange(len(rows)) % 32
    return {"learn": rows[requests < LEARN], "measure": rows[requests >= LEARN]}


def learn(bits: Bits, dtype: str) -> ShiftTable:
    learner = TableLearner(min(len(bits), 128))
    table = learner.add(bits, WIDTHS[dtype])
    assert table is not None
    return table


def contenders(dtype: str, shape: Shape, table: ShiftTable) -> list[Contender]:
    tables = {table.digest: table}

    def ours_by(codec: Codec) -> Contender:
        return Contender(
            codec.name,
            lambda bits: encode(bits, shape, codec, table),
            lambda frame: decode_untrusted(frame.header, frame.body, shape, tables),
        )

    ours = [ours_by(codec) for codec in (Codec.P, Codec.H8, Codec.REC)]
    plain, back = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    others = [
        Contender("zstd3", lambda bits: plain.compress(bits.data), back.decompress),
        Contender("zlib", lambda bits: zlib.compress(bits.data, 1), zlib.decompress),
    ]
    if importlib.util.find_spec("zipnn") is not None:
        others.append(_zipnn(dtype))
    return ours + others


def _zipnn(dtype: str) -> Contender:
    zipnn = importlib.import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype=dtype)
    return Contender("zipnn", lambda bits: zipnn.compress(bits.tobytes()), zipnn.decompress)


def messages(bits: Bits, rows: int, count: int) -> list[Bits]:
    """`count` messages of so many rows, each beginning at another row of the measured ones."""
    repeated = np.concatenate([bits] * (1 + rows // len(bits)))
    starts = [(7 * number) % (len(repeated) - rows + 1) for number in range(count)]
    return [np.ascontiguousarray(repeated[start : start + rows]) for start in starts]


def compare(bits: Bits, dtype: str, table: ShiftTable, rows: int, rounds: int) -> dict[str, Figures]:
    """Each contender on the same messages, one after another in every round."""
    shape = Shape(dtype, rows, bits.shape[1])
    field = contenders(dtype, shape, table)
    found = {one.name: Figures(0.0, [], []) for one in field}
    batch = messages(bits, rows, 8)
    repeat = max(1, 256 // rows)
    for number in range(rounds + 1):
        for one in field:
            packed = [one.pack(message) for message in batch]
            start = time.perf_counter()
            for _ in range(repeat):
                for message in batch:
                    one.pack(message)
            middle = time.perf_counter()
            for _ in range(repeat):
                for frame in packed:
                    one.unpack(frame)
            end = time.perf_counter()
            if number:
                figures = found[one.name]
                figures.pack.append((middle - start) / repeat / len(batch))
                figures.unpack.append((end - middle) / repeat / len(batch))
                figures.size = sum(map(_size, packed)) / len(batch) / shape.size
    return found


def _size(packed: Any) -> int:
    return len(packed.header) + len(packed.body) if isinstance(packed, Frame) else len(packed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.codec", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one small round: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    sizes = (4,) if args.quick else ROWS
    measured: dict[str, float] = {}
    details: dict[str, Any] = {}
    data = load()
    for short, dtype in DTYPES.items():
        cells = {
            f"{rows}": (rows, [part for name, part in data.items() if name.startswith(short)])
            for rows in sizes
        }
        if not args.quick:
            cells["416k"] = (32, [wide(dtype)])
        for cell, (rows, parts) in cells.items():
            row = _row(
                [compare(one["measure"], dtype, learn(one["learn"], dtype), rows, rounds) for one in parts]
            )
            details[f"{short}_{cell}"] = row
            _show(short, cell, row)
            for codec in ("H8", "REC"):
                for kind in ("size", "compress", "decompress"):
                    measured[f"{short}_{cell}_{codec}_{kind}"] = row[codec][f"{kind}_vs_P"]
    if not args.quick:
        append_result("codec", {"measured": measured, "details": details})
    return 0 if not args.bars or print_bars("codec", measured) else 1


def _row(by_layer: list[dict[str, Figures]]) -> dict[str, dict[str, float]]:
    """Averaged over the layers: size ratio, and size and speeds against P's."""
    row: dict[str, dict[str, float]] = {}
    for name in by_layer[0]:
        size = sum(layer[name].size for layer in by_layer) / len(by_layer)
        reference = sum(layer["P"].size for layer in by_layer) / len(by_layer)
        pack = [median(layer["P"].pack) / median(layer[name].pack) for layer in by_layer]
        unpack = [median(layer["P"].unpack) / median(layer[name].unpack) for layer in by_layer]
        row[name] = {
            "size": size,
            "size_vs_P": size / reference,
            "compress_vs_P": sum(pack) / len(pack),
            "decompress_vs_P": sum(unpack) / len(unpack),
            "compress_us": 1e6 * sum(median(layer[name].pack) for layer in by_layer) / len(by_layer),
            "decompress_us": 1e6 * sum(median(layer[name].unpack) for layer in by_layer) / len(by_layer),
        }
    return row


def _show(short: str, cell: str, row: dict[str, dict[str, float]]) -> None:
    for name, one in row.items():
        print(
            f"{short} {cell:>4} rows {name:6} {one['size']:6.1%}, {one['size_vs_P']:.3f} of P; "
            f"compress {one['compress_us']:7.0f} us, {one['compress_vs_P']:.2f} x; "
            f"decompress {one['decompress_us']:7.0f} us, {one['decompress_vs_P']:.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
