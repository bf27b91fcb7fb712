"""The two ends of a hop: which shift tables both of them hold, whatever is lost, reordered or started anew.

A sender learns a table and tells it; only once the receiver has said that it holds it do frames refer to it,
by its digest. A connection that is new knows none. Time and network are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping

from bbquic.codec.entropy import Buffer
from bbquic.codec.frame import Codec, Frame, Shape, decode_untrusted, effective, encode
from bbquic.codec.planes import Bits
from bbquic.codec.table import ShiftTable, TableLearner
from bbquic.errors import RemoteProtocolError

MOST_TABLES = 4  # of a hop: one, and a few more where the values change their width or drift


class HopSender:
    """Encodes a hop's messages. One thread's, but for `known`."""

    def __init__(self) -> None:
        self._learner: TableLearner | None = TableLearner()
        self._table: ShiftTable | None = None  # the receiver holds it
        self._told: dict[bytes, ShiftTable] = {}
        self._untold: list[ShiftTable] = []

    @property
    def has_table(self) -> bool:
        return self._table is not None

    def learn(self, bits: Bits, shape: Shape) -> None:
        """Watch a message's bits [T, D] until a table follows from them."""
        if self._learner is None or not shape.rows:
            return
        width, values = effective(bits, shape)
        table = self._learner.add(values, width)
        if table is not None:
            self._untold.append(table)
            self._learner = None

    def table_to_tell(self) -> ShiftTable | None:
        """A table the receiver is to be told, once."""
        if not self._untold:
            return None
        table = self._untold.pop()
        self._told[table.digest] = table
        return table

    def known(self, digest: bytes) -> None:
        """The receiver holds a table. Raises: RemoteProtocolError for one that it was never told."""
        table = self._told.get(digest)
        if table is None:
            raise RemoteProtocolError(f"a shift table {digest.hex()} is said to be held that was never sent")
        self._table = table

    def encode(self, bits: Bits, shape: Shape, codec: Codec) -> Frame:
        return encode(bits, shape, codec, self._table)

    def decode(self, frame: Frame, shape: Shape) -> Bits:
        """What the receiver will do with a frame of ours: to see how long it takes."""
        return decode_untrusted(frame.header, frame.body, shape, self._told)


class HopReceiver:
    """Decodes a hop's messages. `take_untrusted` and `decode_untrusted` may run in two threads."""

    def __init__(self) -> None:
        self._tables: Mapping[bytes, ShiftTable] = {}

    def take_untrusted(self, width: int, columns: int, shifts: bytes, digest: bytes) -> None:
        """Hold a table that the sender tells. Raises: RemoteProtocolError: a wrong one, or too many."""
        table = ShiftTable.decode_untrusted(width, columns, shifts, digest)
        if table.digest not in self._tables and len(self._tables) >= MOST_TABLES:
            raise RemoteProtocolError(f"a hop has over {MOST_TABLES} shift tables")
        self._tables = {**self._tables, table.digest: table}  # a new one: the other thread has the old

    def decode_untrusted(self, header: bytes, body: Buffer, shape: Shape) -> Bits:
        """Bits [T, D]. Raises: RemoteProtocolError."""
        return decode_untrusted(header, body, shape, self._tables)
