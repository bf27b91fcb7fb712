"""Frames: every bit pattern survives, and a damaged frame is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bbquic.codec.frame import HEADER, Codec, Frame, Shape, decode_untrusted, encode
from bbquic.codec.planes import WIDTHS, Bits, Width
from bbquic.codec.table import ShiftTable, TableLearner
from bbquic.errors import RemoteProtocolError

DTYPES = ("bfloat16", "float16", "float32")
SIXTEEN = ("bfloat16", "float16")
CODECS = tuple(Codec)


def kind(dtype: str) -> type[np.uint16] | type[np.uint32]:
    return np.uint32 if dtype == "float32" else np.uint16


def table_for(dtype: str, columns: int, seed: int = 0) -> ShiftTable:
    width = WIDTHS[dtype]
    item = np.uint16 if width is Width.FLOAT16 else np.uint8
    shifts = np.random.default_rng(seed).integers(0, np.iinfo(item).max + 1, columns, dtype=item)
    return ShiftTable.of(width, shifts)


def activations(rows: int, columns: int, dtype: str, seed: int = 1) -> Bits:
    """Values whose exponents cluster by channel, as real ones do."""
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-6, 3, columns))
    values = (random.standard_normal((rows, columns)) * scale).astype(np.float32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "bfloat16" else bits


def joined(frame: Frame) -> bytes:
    return frame.header + bytes(frame.body)


def decoded(frame: bytes, shape: Shape, tables: Mapping[bytes, ShiftTable]) -> Bits:
    return decode_untrusted(frame[: HEADER.size], frame[HEADER.size :], shape, tables)


def round_trip(bits: Bits, dtype: str, codec: Codec, table: ShiftTable | None = None) -> bytes:
    shape = Shape(dtype, *bits.shape)
    frame = joined(encode(bits, shape, codec, table))
    tables = {} if table is None else {table.digest: table}
    back = decoded(frame, shape, tables)
    assert back.dtype.itemsize == bits.dtype.itemsize
    np.testing.assert_array_equal(back, bits)
    return frame


# What survives.


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_all_65536_patterns_survive(dtype: str, codec: Codec) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    round_trip(bits, dtype, codec, table_for(dtype, 256))
    round_trip(bits.T.copy(), dtype, codec, table_for(dtype, 256, seed=3))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("carried", SIXTEEN)
def test_all_16_bit_patterns_survive_in_float32(carried: str, codec: Codec) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    if carried == "bfloat16":
        bits = patterns.astype(np.uint32) << 16
    else:
        with np.errstate(all="ignore"):
            bits = patterns.view(np.float16).astype(np.float32).view(np.uint32)
    round_trip(bits, "float32", codec, table_for(carried, 256))


@settings(max_examples=200)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), codec=st.sampled_from(CODECS))
def test_any_bits_of_any_shape_survive(data: st.DataObject, dtype: str, codec: Codec) -> None:
    shape = data.draw(st.tuples(st.integers(0, 9), st.integers(1, 40)))
    # a few values many times over, so that compressing pays; or anything at all
    values = st.sampled_from([0, 1, 0x3F80, 0x7FC1, 0x8000]) if data.draw(st.booleans()) else None
    bits = data.draw(arrays(kind(dtype), shape, elements=values))
    table = table_for(dtype, shape[1]) if data.draw(st.booleans()) else None
    round_trip(bits, dtype, codec, table)


@pytest.mark.parametrize("codec", CODECS)
def test_a_tensor_that_is_not_contiguous_survives(codec: Codec) -> None:
    whole = activations(64, 128, "bfloat16")
    bits = whole[::2, 1::3]
    assert not bits.flags.c_contiguous
    round_trip(bits, "bfloat16", codec, table_for("bfloat16", bits.shape[1]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.85), ("float16", 0.95), ("float32", 0.93)])
def test_values_like_activations_become_smaller_unless_raw(codec: Codec, dtype: str, most: float) -> None:
    bits = activations(64, 576, dtype)
    table = TableLearner(64).add(bits, WIDTHS[dtype])
    size = len(round_trip(bits, dtype, codec, table)) / bits.nbytes
    assert size <= (most if codec is not Codec.RAW else 1.01)


@pytest.mark.parametrize("carried", SIXTEEN)
def test_16_bit_values_in_float32_cost_no_more_than_their_real_width(carried: str) -> None:
    narrow = activations(64, 576, carried)
    if carried == "bfloat16":
        wide = narrow.astype(np.uint32) << 16
    else:
        wide = narrow.view(np.float16).astype(np.float32).view(np.uint32)
    table = TableLearner(64).add(narrow, WIDTHS[carried])
    for codec in (Codec.H8, Codec.REC):
        assert len(round_trip(wide, "float32", codec, table)) == len(
            round_trip(narrow, carried, codec, table)
        )


def test_noise_is_sent_raw_whatever_was_asked_for() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (32, 64), dtype=np.uint16)
    for codec in CODECS:
        frame = round_trip(bits, "float16", codec)
        assert frame[1] == Codec.RAW
        assert len(frame) == HEADER.size + bits.nbytes


def test_a_raw_frame_is_the_tensors_own_memory_at_both_ends() -> None:
    bits = activations(4, 8, "float16")
    shape = Shape("float16", 4, 8)
    frame = encode(bits, shape, Codec.RAW)
    back = decode_untrusted(frame.header, frame.body, shape, {})
    assert np.shares_memory(back, bits)


def test_a_table_that_does_not_fit_is_not_used() -> None:
    bits = activations(32, 64, "bfloat16")
    for table in (table_for("bfloat16", 63), table_for("float16", 64), None):
        assert round_trip(bits, "bfloat16", Codec.REC, table)[1] == Codec.H8


# What is refused.


def frame_of(codec: Codec = Codec.REC) -> tuple[bytes, Shape, dict[bytes, ShiftTable]]:
    bits = activations(32, 64, "bfloat16")
    table = TableLearner(32).add(bits, Width.BFLOAT16)
    assert table is not None
    shape = Shape("bfloat16", 32, 64)
    return joined(encode(bits, shape, codec, table)), shape, {table.digest: table}


def changed(frame: bytes, **fields: object) -> bytes:
    names = ("version", "codec", "dtype", "width", "rows", "columns", "table", "high", "low", "zero")
    values = dict(zip(names, HEADER.unpack_from(frame), strict=True)) | fields
    return HEADER.pack(*values.values()) + frame[HEADER.size :]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "version 2"),
        ({"codec": 4}, "unknown codec 4"),
        ({"width": 3}, "width 3"),
        ({"rows": 31}, r"\[31, 64\]"),
        ({"rows": 1 << 31}, r"\[2147483648, 64\]"),
        ({"columns": 65}, r"\[32, 65\]"),
        ({"dtype": 2}, "type 2"),
        ({"zero": 1}, "which"),
        ({"table": b"another!"}, "616e6f7468657221, which is not known"),
        ({"codec": 1}, "codec H8 names a shift table"),
        ({"codec": 0}, "raw frame|names a shift table"),
        ({"width": 2}, "says that its values are float16|not known"),
        ({"width": 0}, "says that its values are float32|not known"),
        ({"high": 1}, "lanes are 1 and"),
    ],
)
def test_a_header_that_is_wrong_is_refused_by_name(fields: dict[str, object], reason: str) -> None:
    frame, shape, tables = frame_of()
    with pytest.raises(RemoteProtocolError, match=reason):
        decoded(changed(frame, **fields), shape, tables)


def test_bytes_that_follow_or_miss_are_refused() -> None:
    frame, shape, tables = frame_of()
    for damaged in (frame + b"x", frame[:-1], frame[: HEADER.size], frame[:5], b""):
        with pytest.raises(RemoteProtocolError, match=r"lanes are|header has"):
            decoded(damaged, shape, tables)


def with_high_lane(lane: bytes) -> tuple[bytes, Shape, dict[bytes, ShiftTable]]:
    frame, shape, tables = frame_of()
    low = frame[-struct.unpack_from("<I", frame, HEADER.size - 8)[0] :]
    return changed(frame[: HEADER.size] + lane + low, high=len(lane)), shape, tables


def test_a_lane_that_declares_another_size_is_refused_before_it_is_expanded() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))  # declares 64 MiB in 6 KB
    assert zstandard.frame_content_size(bomb) == 64 << 20
    frame, shape, tables = with_high_lane(bomb[:1500])
    with pytest.raises(RemoteProtocolError, match=f"declares {64 << 20} bytes where there are 2048"):
        decoded(frame, shape, tables)


def test_a_bomb_that_declares_nothing_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    assert len(bomb) < 2048
    frame, shape, tables = with_high_lane(bomb)
    with pytest.raises(RemoteProtocolError, match=r"no zstd frame of 2048 bytes|has .* bytes where"):
        decoded(frame, shape, tables)


def test_a_lane_that_expands_to_less_is_refused() -> None:
    short = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2047))
    frame, shape, tables = with_high_lane(short)
    with pytest.raises(RemoteProtocolError, match="has 2047 bytes where there are 2048"):
        decoded(frame, shape, tables)


def test_two_zstd_frames_in_a_lane_are_refused() -> None:
    half = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024))
    frame, shape, tables = with_high_lane(half + half)
    with pytest.raises(RemoteProtocolError):
        decoded(frame, shape, tables)


def test_a_lane_that_wants_a_large_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=27, write_content_size=False, enable_ldm=True
    )
    greedy = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    lane = greedy.compress(bytes(2048)) + greedy.flush()
    frame, shape, tables = with_high_lane(lane)
    with pytest.raises(RemoteProtocolError):
        decoded(frame, shape, tables)


@settings(max_examples=300)
@given(
    codec=st.sampled_from(CODECS),
    place=st.integers(0, 1 << 20),
    byte=st.integers(0, 255),
    cut=st.integers(0, 3),
)
def test_a_damaged_frame_is_decoded_or_refused_and_nothing_else(
    codec: Codec, place: int, byte: int, cut: int
) -> None:
    frame, shape, tables = frame_of(codec)
    damaged = bytearray(frame)
    damaged[place % len(damaged)] = byte
    try:
        back = decoded(bytes(damaged[: len(damaged) - cut]), shape, tables)
    except RemoteProtocolError:
        return
    assert back.shape == (shape.rows, shape.columns)


# Tables.


@given(width=st.integers(0, 5), columns=st.integers(0, 70), data=st.binary(max_size=140), digest=st.binary())
def test_a_table_from_a_peer_is_what_its_digest_says_or_refused(
    width: int, columns: int, data: bytes, digest: bytes
) -> None:
    with pytest.raises(RemoteProtocolError):
        ShiftTable.decode_untrusted(width, columns, data, digest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_survives_the_wire(dtype: str) -> None:
    table = table_for(dtype, 64)
    back = ShiftTable.decode_untrusted(table.width, 64, table.encode(), table.digest)
    assert back.digest == table.digest
    np.testing.assert_array_equal(back.shifts, table.shifts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_is_learnt_from_enough_rows_and_each_channel_by_itself(dtype: str) -> None:
    bits = activations(300, 64, dtype)
    learner = TableLearner()
    assert learner.add(bits[:255], WIDTHS[dtype]) is None
    table = learner.add(bits[255:], WIDTHS[dtype])
    assert table is not None
    shuffled = np.random.default_rng(2).permutation(64)
    again = TableLearner().add(bits[:256, shuffled], WIDTHS[dtype])
    assert again is not None
    np.testing.assert_array_equal(again.shifts, table.shifts[shuffled])
    plain = len(encode(bits, Shape(dtype, 300, 64), Codec.H8).body)
    assert len(encode(bits, Shape(dtype, 300, 64), Codec.REC, table).body) < plain
