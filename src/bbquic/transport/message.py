"""Messages on the wire: a fixed prefix, a header, a body. One unidirectional stream carries exactly one.

The bytes are tabled in docs/wire-format.md. Nothing here knows QUIC, a clock or a socket.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from bbquic.errors import RemoteProtocolError, TransportError
from bbquic.transport.printable import printable

MAGIC = b"BQ"
WIRE_VERSION = 1  # raised when a byte of any message but HELLO changes its meaning
PREFIX = struct.Struct("!2sBBIQ")  # magic, wire version, kind, bytes of header, bytes of body
KIB, MIB = 1 << 10, 1 << 20
MAX_MESSAGE = 64 * MIB  # bytes of body; larger is an attack or a bug, never a tensor

T = TypeVar("T")


class Kind(IntEnum):
    """What a message is. 1-15 belong to the session, the rest to the engine."""

    HELLO = 1
    RATE = 3
    PROBE = 4

    DESCRIBE = 16
    DESCRIPTION = 17
    PLAN = 18
    READY = 19
    REFUSED = 20
    RELEASE = 21
    CANCEL = 22
    MEASURE = 23
    PROFILE = 24
    SURVEY = 25
    LINKS = 26
    COORDINATE = 27

    ROWS = 32
    HIDDEN = 33
    TOKENS = 34
    FAILED = 35
    TABLE = 36
    TABLE_KNOWN = 37

    REQUESTS = 40
    OUTCOMES = 41
    PROGRESS = 42
    ENDED = 43
    ATTACH = 44
    ATTACHED = 45

    PING = 48
    PONG = 49


class Rule(NamedTuple):
    """A kind's place in the queue (lower goes first) and what its header and body may weigh, in bytes."""

    priority: int
    header: int
    body: int


ROWS_FIRST, ROWS_IN_BACKGROUND, CONTROL, BULK = 0, 1, 2, 3
NUMBERS = 64  # four of them
MOST_PROBE = 1 * MIB  # bytes of a burst that measures: 36 of the largest datagrams are 576,000
SMALL = 64 * KIB  # names, counters, a sentence or two
SHEET = 256 * KIB  # figures of some hundred links, each with a sentence where there are none
SHIFTS = 256 * KIB  # two bytes a channel: models have some ten thousand
LISTS = 4 * MIB  # ids, positions and trees of every row of a micro-batch
MANIFEST = 16 * MIB  # names, shapes and hashes of every tensor of a model
PROMPTS = 16 * MIB  # tokens and text of some records: one of 3 million tokens still fits

RULES: dict[Kind, Rule] = {
    Kind.HELLO: Rule(ROWS_FIRST, SMALL, 0),
    Kind.RATE: Rule(ROWS_FIRST, NUMBERS, 0),
    Kind.PROBE: Rule(BULK, NUMBERS, MOST_PROBE),
    Kind.DESCRIBE: Rule(CONTROL, SMALL, 0),
    Kind.DESCRIPTION: Rule(CONTROL, SMALL, 0),
    Kind.PLAN: Rule(BULK, MANIFEST, 0),
    Kind.READY: Rule(CONTROL, SMALL, 0),
    Kind.REFUSED: Rule(CONTROL, SMALL, 0),
    Kind.RELEASE: Rule(CONTROL, SMALL, 0),
    Kind.CANCEL: Rule(CONTROL, SMALL, 0),
    Kind.MEASURE: Rule(CONTROL, SMALL, 0),
    Kind.PROFILE: Rule(CONTROL, SMALL, 0),
    Kind.SURVEY: Rule(CONTROL, SMALL, 0),
    Kind.LINKS: Rule(CONTROL, SHEET, 0),
    Kind.COORDINATE: Rule(CONTROL, SMALL, 0),
    Kind.ROWS: Rule(ROWS_FIRST, LISTS, 0),
    Kind.HIDDEN: Rule(ROWS_FIRST, LISTS, MAX_MESSAGE),
    Kind.TOKENS: Rule(ROWS_FIRST, LISTS, 0),
    Kind.FAILED: Rule(ROWS_FIRST, SMALL, 0),
    Kind.TABLE: Rule(CONTROL, SHIFTS, 0),
    Kind.TABLE_KNOWN: Rule(CONTROL, SMALL, 0),
    Kind.REQUESTS: Rule(BULK, PROMPTS, 0),
    Kind.OUTCOMES: Rule(BULK, PROMPTS, 0),
    Kind.PROGRESS: Rule(BULK, LISTS, 0),
    Kind.ENDED: Rule(BULK, LISTS, 0),
    Kind.ATTACH: Rule(CONTROL, SMALL, 0),
    Kind.ATTACHED: Rule(CONTROL, SMALL, 0),
    Kind.PING: Rule(CONTROL, SMALL, 0),
    Kind.PONG: Rule(CONTROL, SMALL, 0),
}
KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message. The header is msgpack, read by the owner of the kind; the body is tensor bytes.

    `background` lets other rows go before these; it stays with the sender. `arrived`, on receipt, is when the
    last datagram came off the wire, in seconds of `time.monotonic()`: by the kernel's clock where that tells.
    Raises: TransportError when header or body is over the limit of the kind, so that no peer has to.
    """

    kind: Kind
    header: bytes
    body: bytes | memoryview = b""
    background: bool = field(default=False, compare=False)
    arrived: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        rule = RULES[self.kind]
        for part, size, limit in (
            ("header", len(self.header), rule.header),
            ("body", self.body_size, rule.body),
        ):
            if size > limit:
                raise TransportError(f"a {self.kind.name} message's {part} has {size} bytes, over {limit}")

    @property
    def body_size(self) -> int:
        """Bytes of the body, whatever the item size of its memoryview."""
        return self.body.nbytes if isinstance(self.body, memoryview) else len(self.body)

    @property
    def size(self) -> int:
        """Bytes on the wire, prefix included."""
        return PREFIX.size + len(self.header) + self.body_size

    @property
    def priority(self) -> int:
        """0 goes first: rows, then rows that can wait, then control, then bulk."""
        priority = RULES[self.kind].priority
        return ROWS_IN_BACKGROUND if self.background and priority == ROWS_FIRST else priority


def encode(message: Message) -> list[bytes | memoryview]:
    """The buffers to write to the stream, in order; the body is not copied and must be C-contiguous."""
    prefix = PREFIX.pack(MAGIC, WIRE_VERSION, message.kind, len(message.header), message.body_size)
    buffers: list[bytes | memoryview] = [prefix + message.header]
    if message.body_size:
        buffers.append(memoryview(message.body).cast("B"))
    return buffers


class MessageDecoder:
    """Reads one message from the pieces of its stream: `feed_untrusted` each, then `finish_untrusted`.

    Sizes are checked as soon as the prefix is there, and memory follows the bytes that came, never the
    bytes that were announced. Both methods raise RemoteProtocolError and nothing else.
    """

    def __init__(self, limit: int = PREFIX.size + MANIFEST + MAX_MESSAGE) -> None:
        """A message over `limit` bytes in all is refused, whatever its kind allows."""
        self._limit = limit
        self._prefix = bytearray()
        self._kind: Kind | None = None
        self._header_size = 0
        self._body_size = 0
        self._header = bytearray()
        self._body = bytearray()

    def feed_untrusted(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        if self._kind is None:
            rest = _move(rest, self._prefix, PREFIX.size)
            if len(self._prefix) < PREFIX.size:
                return
            self._read_prefix_untrusted()
        rest = _move(rest, self._header, self._header_size)
        rest = _move(rest, self._body, self._body_size)
        if rest:
            raise RemoteProtocolError(f"{len(rest)} bytes follow the end of a {self._name} message")

    def finish_untrusted(self, arrived: float | None = None) -> Message:
        """The message, once its stream has ended; `arrived` is put in it as it is.

        Its body is a view of memory nobody else has.
        """
        if self._kind is None:
            raise RemoteProtocolError(
                f"a stream ended after {len(self._prefix)} of a message prefix's {PREFIX.size} bytes"
            )
        expected = self._header_size + self._body_size
        have = len(self._header) + len(self._body)
        if have != expected:
            raise RemoteProtocolError(
                f"a {self._name} message ended after {have} of its {expected} bytes of header and body"
            )
        body = memoryview(self._body) if self._body else b""
        return Message(self._kind, bytes(self._header), body, arrived=arrived)

    @property
    def _name(self) -> str:
        return self._kind.name if self._kind is not None else "?"

    def _read_prefix_untrusted(self) -> None:
        magic, version, code, header_size, body_size = PREFIX.unpack(self._prefix)
        if magic != MAGIC:
            raise RemoteProtocolError(f"a message began with {bytes(magic).hex()}, not {MAGIC.hex()}")
        if version != WIRE_VERSION and code != Kind.HELLO:  # hello is the same in all, to tell the mismatch
            raise RemoteProtocolError(f"a message has wire version {version}, not {WIRE_VERSION}")
        kind = KINDS.get(code)
        if kind is None:
            raise RemoteProtocolError(f"a message has the unknown kind {code}")
        rule = RULES[kind]
        for part, size, limit in (("header", header_size, rule.header), ("body", body_size, rule.body)):
            if size > limit:
                raise RemoteProtocolError(
                    f"a {kind.name} message announced a {part} of {size} bytes, over {limit}"
                )
        total = PREFIX.size + header_size + body_size
        if total > self._limit:
            raise RemoteProtocolError(f"a {kind.name} message announced {total} bytes, over {self._limit}")
        self._kind, self._header_size, self._body_size = kind, header_size, body_size


def _move(source: memoryview, target: bytearray, full: int) -> memoryview:
    """Fill `target` up to `full` bytes from the front of `source`; what is left of `source`."""
    missing = full - len(target)
    if missing > 0 and source:
        target += source[:missing]
        return source[missing:]
    return source


def encode_header(value: msgspec.Struct) -> bytes:
    """A header's msgpack bytes."""
    return msgspec.msgpack.encode(value)


def decode_header_untrusted(struct_type: type[T], header: bytes) -> T:
    """A header as `struct_type`, strictly: no number from a string, no field of another type.

    Raises: RemoteProtocolError, whatever the bytes are.
    """
    try:
        return msgspec.msgpack.decode(header, type=struct_type, strict=True)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = printable(str(error)) or type(error).__name__
        raise RemoteProtocolError(f"a header is not a {struct_type.__name__}: {reason}") from None
