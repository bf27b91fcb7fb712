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

MOST_TABLES = 4  # that a receiver holds of a hop: one is told now; later senders may learn anew


class HopSender:
    """Encodes a hop's messages. One thread's, but for `known`."""

    def __init__(self) -> None:
        self._learner = TableLearner()
        self._learnt: ShiftTable | None = None
        self._is_told = False
        self._table: ShiftTable | None = None  # the receiver holds it

    @property
    def has_table(self) -> bool:
        """Whether the receiver holds what was learnt."""
        return self._table is not None

    def learn(self, bits: Bits, shape: Shape) -> None:
        """Watch a message's bits [T, D] until a table follows from them."""
        if self._learnt is None and shape.rows:
            width, values = effective(bits, shape)
            self._learnt = self._learner.add(values, width)

    def table_to_tell(self) -> ShiftTable | None:
        """A table the receiver is to be told, once."""
        if self._learnt is None or self._is_told:
            return None
        self._is_told = True
        return self._learnt

    def known(self, digest: bytes) -> None:
        """The receiver holds a table. Raises: RemoteProtocolError for one that it was never told."""
        if self._learnt is None or not self._is_told or digest != self._learnt.digest:
            raise RemoteProtocolError(f"a shift table {digest.hex()} is said to be held that was never sent")
        self._table = self._learnt

    def encode(self, bits: Bits, shape: Shape, codec: Codec) -> Frame:
        return encode(bits, shape, codec, self._table)

    def decode(self, frame: Frame, shape: Shape) -> Bits:
        """What the receiver will do with a frame of ours: to see how long it takes."""
        tables = {} if self._table is None else {self._table.digest: self._table}
        return decode_untrusted(frame.header, frame.body, shape, tables)


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
