"""Two ends of a hop: a table is used once both hold it, told once, and never believed of a stranger."""

from __future__ import annotations

import numpy as np
import pytest
from test_frame import activations

from bbquic.codec.frame import Codec, Frame, Shape
from bbquic.codec.hop import MOST_TABLES, HopReceiver, HopSender
from bbquic.codec.planes import Width
from bbquic.codec.table import DIGEST, LEARN_ROWS, ShiftTable
from bbquic.errors import RemoteProtocolError

SHAPE = Shape("bfloat16", 64, 48)


def learnt() -> tuple[HopSender, ShiftTable]:
    """A sender that has just learnt its table, and told it."""
    sender = HopSender()
    for seed in range(LEARN_ROWS // SHAPE.rows):
        assert sender.table_to_tell() is None
        sender.learn(activations(SHAPE.rows, SHAPE.columns, SHAPE.dtype, seed), SHAPE)
    table = sender.table_to_tell()
    assert table is not None
    return sender, table


def codec_of(frame: Frame) -> Codec:
    return Codec(frame.header[1])


def test_a_table_is_used_when_the_receiver_said_that_it_holds_it() -> None:
    sender, table = learnt()
    bits = activations(SHAPE.rows, SHAPE.columns, SHAPE.dtype, seed=9)
    assert codec_of(sender.encode(bits, SHAPE, Codec.REC)) is Codec.H8
    receiver = HopReceiver()
    receiver.take_untrusted(table.width, table.columns, table.encode(), table.digest)
    sender.known(table.digest)
    assert sender.has_table
    frame = sender.encode(bits, SHAPE, Codec.REC)
    assert codec_of(frame) is Codec.REC
    np.testing.assert_array_equal(receiver.decode_untrusted(frame.header, frame.body, SHAPE), bits)
    np.testing.assert_array_equal(sender.decode(frame, SHAPE), bits)


def test_a_table_is_learnt_and_told_once() -> None:
    sender, _ = learnt()
    for seed in range(9):
        sender.learn(activations(SHAPE.rows, SHAPE.columns, SHAPE.dtype, seed), SHAPE)
        assert sender.table_to_tell() is None


def test_a_receiver_that_is_new_knows_no_table() -> None:
    sender, table = learnt()
    sender.known(table.digest)
    frame = sender.encode(activations(64, 48, "bfloat16"), SHAPE, Codec.REC)
    with pytest.raises(RemoteProtocolError, match=f"{table.digest.hex()}, which is not known here"):
        HopReceiver().decode_untrusted(frame.header, frame.body, SHAPE)


@pytest.mark.parametrize("told", [True, False])
def test_a_table_that_was_never_told_is_not_held(told: bool) -> None:
    sender = learnt()[0] if told else HopSender()
    with pytest.raises(RemoteProtocolError, match="never sent"):
        sender.known(bytes(DIGEST))
    assert not sender.has_table


def test_a_receiver_holds_a_few_tables_and_no_more() -> None:
    receiver = HopReceiver()
    tables = [ShiftTable.of(Width.BFLOAT16, np.full(8, n, np.uint8)) for n in range(MOST_TABLES + 1)]
    for table in tables[:-1]:
        receiver.take_untrusted(table.width, 8, table.encode(), table.digest)
    receiver.take_untrusted(tables[0].width, 8, tables[0].encode(), tables[0].digest)  # a repeat is none
    with pytest.raises(RemoteProtocolError, match="over 4 shift tables"):
        receiver.take_untrusted(tables[-1].width, 8, tables[-1].encode(), tables[-1].digest)
