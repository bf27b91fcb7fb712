from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.errors import ModelError
from bbquic.model.gguf import read_gguf
from tiny_gguf import write_tiny_gguf

KINDS = [
    GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
]


@pytest.fixture(scope="module")
def valid(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_file_is_read_as_the_gguf_package_reads_it(
    tiny: Path, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    path = write_tiny_gguf(tiny, tmp_path / "tiny.gguf", kind=kind)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert ours.fields == {n: field.contents() for n, field in theirs.fields.items() if n not in own}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(tensor.shape[::-1])
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.dequantized(tensor.name), expected)


def header(fields: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 0)) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + fields + tensors


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(b"t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**63
HOSTILE = {
    "nothing": b"",
    "no magic": b"GGML" + header()[4:],
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "endless fields": header(counts=(0, HUGE)),
    "endless tensors": header(counts=(HUGE, 0)),
    "endless string": header(field(b"a", 8, struct.pack("<Q", HUGE)), counts=(0, 1)),
    "endless array": header(field(b"a", 9, struct.pack("<IQ", 4, HUGE)), counts=(0, 1)),
    "endless array of strings": header(field(b"a", 9, struct.pack("<IQ", 8, HUGE)), counts=(0, 1)),
    "array of arrays": header(field(b"a", 9, struct.pack("<IQ", 9, 1) + b"\0" * 64), counts=(0, 1)),
    "unknown field type": header(field(b"a", 77, b"\0" * 64), counts=(0, 1)),
    "no UTF-8": header(field(b"\xff", 0, b"\0"), counts=(0, 1)),
    "field twice": header(field(b"a", 0, b"\0") * 2, counts=(0, 2)),
    "odd alignment": header(field(b"general.alignment", 4, struct.pack("<I", 12)), counts=(0, 1)),
    "no alignment": header(field(b"general.alignment", 4, struct.pack("<I", 0)), counts=(0, 1)),
    "text alignment": header(field(b"general.alignment", 8, string(b"32")), counts=(0, 1)),
    "many dimensions": header(tensors=tensor((1,) * 5) + b"\0" * 64, counts=(1, 0)),
    "no dimensions": header(tensors=tensor(()) + b"\0" * 64, counts=(1, 0)),
    "empty tensor": header(tensors=tensor((0,)) + b"\0" * 64, counts=(1, 0)),
    "shape that overflows": header(tensors=tensor((2**32, 2**32, 2**32)) + b"\0" * 64, counts=(1, 0)),
    "tensor beyond the end": header(tensors=tensor((64,)) + b"\0" * 64, counts=(1, 0)),
    "offset beyond the end": header(tensors=tensor((1,), offset=2**62) + b"\0" * 64, counts=(1, 0)),
    "offset off the grid": header(tensors=tensor((1,), offset=4) + b"\0" * 64, counts=(1, 0)),
    "unknown tensor type": header(tensors=tensor((32,), kind=999) + b"\0" * 64, counts=(1, 0)),
    "unread tensor type": header(tensors=tensor((32,), kind=24) + b"\0" * 64, counts=(1, 0)),
    "part of a block": header(tensors=tensor((33,), kind=8) + b"\0" * 64, counts=(1, 0)),
    "tensor twice": header(tensors=tensor((1,)) * 2 + b"\0" * 128, counts=(2, 0)),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=r"x\.gguf"):
        read_gguf(tmp_path / "x.gguf")


def test_a_valid_header_made_by_hand_is_read(tmp_path: Path) -> None:
    raw = header(field(b"a", 9, struct.pack("<IQ2h", 3, 2, -1, 7)), tensor((1,)), counts=(1, 1))
    (tmp_path / "x.gguf").write_bytes(raw + b"\0" * (-len(raw) % 32) + struct.pack("<f", 2.5))
    file = read_gguf(tmp_path / "x.gguf")
    assert file.fields == {"a": [-1, 7]}
    assert file.dequantized("t") == [2.5]


@settings(max_examples=150)
@given(st.data())
def test_a_file_cut_anywhere_is_refused(valid: Path, data: st.DataObject) -> None:
    raw = valid.read_bytes()
    cut = valid.with_name("cut.gguf")
    cut.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 65))])  # the last bytes may be padding
    with pytest.raises(ModelError):
        read_gguf(cut)


@settings(max_examples=150)
@given(st.data())
def test_one_wrong_byte_never_gives_another_error(valid: Path, data: st.DataObject) -> None:
    raw = bytearray(valid.read_bytes())
    raw[data.draw(st.integers(0, 16_000))] ^= data.draw(st.integers(1, 255))
    damaged = valid.with_name("damaged.gguf")
    damaged.write_bytes(raw)
    try:
        file = read_gguf(damaged)
    except ModelError:
        return
    for name in file.tensors:
        assert file.dequantized(name).size > 0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf"):
        read_gguf(tmp_path / "absent.gguf")
