"""One step of a micro-batch put together: decode rows, chunks of prompts, and the moves to be made first."""

from __future__ import annotations

from bbquic.runtime.protocol import Move, Row, WireSampling
from bbquic.runtime.seats import Flight, MicroBatch, Pack, Seat


class Packing:
    """A pack in the making; `flight` ends it and puts it on its way."""

    def __init__(self, batch: MicroBatch) -> None:
        self._batch = batch
        self._step = batch.step + 1
        self._rows: list[Row] = []
        self._seats: list[Seat] = []
        self._tokens: list[int] = []
        self._moves: list[Move] = []
        self._prompt_tokens = 0

    def add_row(self, slot: int, seat: Seat, budget: int) -> int:
        """The next row of a sequence, of `budget` tokens at most, and the move it waited for; its size."""
        first = seat.sequence.computed
        tokens, from_prompt = seat.sequence.next_row(budget)
        wants = seat.sequence.unread == 0
        sampling = WireSampling.of(seat.sequence.request.sampling) if wants else None
        self._rows.append(Row(slot, seat.generation, first, len(tokens), wants, sampling))
        self._seats.append(seat)
        self._tokens.extend(tokens)
        self._prompt_tokens += from_prompt
        if seat.move is not None:
            self._moves.append(seat.move)
            seat.move = None
        seat.step = self._step
        return len(tokens)

    def flight(self, *, decodes: bool) -> Flight | None:
        """None when there is no row in it."""
        batch = self._batch
        if not self._rows or batch.range is None:
            return None
        pack = Pack(
            micro_batch=batch.index,
            step=self._step,
            range=batch.range,
            rows=tuple(self._rows),
            tokens=tuple(self._tokens),
            prompt_tokens=self._prompt_tokens,
            moves=tuple(self._moves),
        )
        batch.step = self._step
        batch.flights[self._step] = flight = Flight(pack, tuple(self._seats), decodes)
        return flight
