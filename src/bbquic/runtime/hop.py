"""A hop's codec at work: chosen by the switch from what is measured here, coded in the lanes' threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

import numpy as np

from bbquic.codec.entropy import Buffer
from bbquic.codec.frame import Codec, Frame, Shape
from bbquic.codec.hop import HopReceiver, HopSender
from bbquic.codec.planes import Bits
from bbquic.codec.table import ShiftTable
from bbquic.errors import RemoteProtocolError
from bbquic.plan.breakeven import Choice, CodecSample, CodecSwitch, HopConditions, Way
from bbquic.runtime.protocol import PackHeader
from bbquic.units import Bytes, BytesPerSecond, Seconds

NEWEST = 0.1  # weight of the newest message in what is usual

Rate = Callable[[], BytesPerSecond | None]


class CodecMode(StrEnum):
    """What a user may ask for; `auto` leaves it to the switch."""

    AUTO = "auto"
    RAW = "raw"
    H8 = "H8"
    REC = "REC"


CODECS = {Way.RAW: Codec.RAW, Way.H8: Codec.H8, Way.REC: Codec.REC}


class HopOut:
    """The sending end: what a tensor becomes on its way. `encode` is the outbound lane's thread's."""

    def __init__(self, dtype: str, mode: CodecMode, rate: Rate) -> None:
        """`rate` is what is known of the link just now."""
        self._dtype = dtype
        self._mode = mode
        self._rate = rate
        self._sender = HopSender()
        self._switch = CodecSwitch()
        self._payload: float | None = None
        self._overlap = 0.0
        self.choice = Choice(Way.RAW, "nothing sent yet")

    @property
    def is_coding(self) -> bool:
        """Whether messages are compressed just now, which takes longer than a change of threads."""
        return self.choice.way is not Way.RAW

    def encode(self, pack: PackHeader, data: Buffer, *, is_alone: bool) -> Frame:
        """A pack's tensor as it is to be sent; `is_alone`: no other pack is in this stage's lanes."""
        bits, shape = _bits(pack, data, self._dtype)
        if self._mode is not CodecMode.RAW:
            self._sender.learn(bits, shape)
        self._payload = _usual(self._payload, shape.size)
        self._overlap = _usual(self._overlap, 0.0 if is_alone else 1.0)
        self.choice = self._choose(bits, shape)
        frame, took = self._timed(bits, shape, self.choice.way)
        if self.choice.way is not Way.RAW:
            sample = CodecSample(Bytes(shape.size), Bytes(len(frame.body)), Seconds(took))
            self._switch.note(self.choice.way, sample)
        # a raw tensor travels as the object it is: nobody has to copy it to own it
        return Frame(frame.header, data) if len(frame.body) == len(data) else frame

    def table_to_tell(self) -> ShiftTable | None:
        return self._sender.table_to_tell()

    def known(self, digest: bytes) -> None:
        """The next stage holds a table. Raises: RemoteProtocolError."""
        self._sender.known(digest)

    def _choose(self, bits: Bits, shape: Shape) -> Choice:
        if self._mode is not CodecMode.AUTO:
            return Choice(Way(self._mode.value), "as asked for")
        conditions = HopConditions(
            self._rate(), Bytes(round(self._payload or shape.size)), overlapped=self._overlap > 0.5
        )
        ways = (Way.H8, Way.REC) if self._sender.has_table else (Way.H8,)
        probe = self._switch.probe(conditions, ways)
        if probe is not None and shape.rows:
            self._probe(bits, shape, *probe)
        return self._switch.choose(conditions)

    def _probe(self, bits: Bits, shape: Shape, way: Way, size: Bytes) -> None:
        """What a codec would do, both its ends, measured on the first rows of a message."""
        rows = min(shape.rows, max(1, size // (shape.columns * shape.itemsize)))
        part = Shape(shape.dtype, rows, shape.columns)
        frame, encoding = self._timed(bits[:rows], part, way)
        began = time.perf_counter()
        self._sender.decode(frame, part)
        decoding = time.perf_counter() - began
        sample = CodecSample(Bytes(part.size), Bytes(len(frame.body)), Seconds(encoding), Seconds(decoding))
        self._switch.note(way, sample)

    def _timed(self, bits: Bits, shape: Shape, way: Way) -> tuple[Frame, float]:
        began = time.perf_counter()
        frame = self._sender.encode(bits, shape, CODECS[way])
        return frame, time.perf_counter() - began


class HopIn:
    """The receiving end. `decode_untrusted` is the inbound lane's thread's."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._receiver = HopReceiver()

    def is_coded(self, pack: PackHeader) -> bool:
        """Whether there is more to do than to look at a body."""
        return len(pack.frame) > 1 and pack.frame[1] != Codec.RAW

    def take_untrusted(self, width: int, columns: int, shifts: bytes, digest: bytes) -> None:
        """Hold a table. Raises: RemoteProtocolError."""
        self._receiver.take_untrusted(width, columns, shifts, digest)

    def decode_untrusted(self, pack: PackHeader, body: Buffer, size: int) -> Buffer:
        """The tensor's `size` bytes; a body without a frame is the tensor. Raises: RemoteProtocolError."""
        if not pack.frame:
            if len(body) != size:
                raise RemoteProtocolError(f"{len(body)} bytes of hidden states, not {size}")
            return body
        shape = _shape(pack, size, self._dtype)
        bits = self._receiver.decode_untrusted(pack.frame, body, shape)
        return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data


def _shape(pack: PackHeader, size: int, dtype: str) -> Shape:
    shape = Shape(dtype, pack.token_count, 1)
    return Shape(dtype, shape.rows, size // shape.size)


def _bits(pack: PackHeader, data: Buffer, dtype: str) -> tuple[Bits, Shape]:
    shape = _shape(pack, len(data), dtype)
    return np.frombuffer(data, shape.kind).reshape(shape.rows, shape.columns), shape


def _usual(before: float | None, new: float) -> float:
    return new if before is None else (1 - NEWEST) * before + NEWEST * new
