"""One step of a micro-batch put together: decode rows, chunks of prompts, and the moves to be made first."""

from __future__ import annotations

from bbquic.draft.tree import DraftTree
from bbquic.runtime.prefixes import Prefixes
from bbquic.runtime.protocol import Move, Path, Row, Tree, WireSampling
from bbquic.runtime.seats import Flight, MicroBatch, Pack, Seat


class Packing:
    """A pack in the making; `flight` ends it and puts it on its way."""

    def __init__(self, batch: MicroBatch, prefixes: Prefixes | None) -> None:
        """`prefixes`: where sequences that begin look for what others have read; None: nowhere."""
        self._batch = batch
        self._prefixes = prefixes
        self._step = batch.step + 1
        self._rows: list[Row] = []
        self._seats: list[Seat] = []
        self._tokens: list[int] = []
        self._trees: list[DraftTree | None] = []  # of decode rows, which come first
        self._moves: list[Move] = []
        self._prompt_tokens = 0
        self._shared_tokens = 0
        self._held: dict[int, int] = {}  # tokens that slots with a row in this pack held before it

    def begin(self, slot: int, seat: Seat, leaving: int | None) -> bool:
        """Let a sequence without a row begin behind what another slot has of it; False: it waits for more of
        that. `leaving` is a micro-batch that is to be given up."""
        if self._prefixes is None:
            return True
        shared, waits = self._prefixes.longest(self._batch, slot, seat.sequence, self._held, leaving)
        if waits:
            return False
        if shared is not None:
            is_own = shared.batch is self._batch  # its own rows of this step come behind the copy
            seat.move = Move(
                micro_batch=shared.batch.index,
                slot=shared.slot,
                generation=shared.seat.generation,
                step=min(shared.seat.step, self._step - 1) if is_own else shared.seat.step,
                target=slot,
                target_generation=seat.generation,
                count=shared.count,
                keeps=True,
            )
            shared.batch.readers[shared.slot] += 1
            self._shared_tokens += seat.sequence.skip(shared.count)
        return True

    def add_row(self, slot: int, seat: Seat, budget: int) -> int:
        """The next row of a sequence, of `budget` tokens at most, and the move it waited for; its size."""
        tokens, from_prompt = seat.sequence.next_row(budget)
        self._prompt_tokens += from_prompt
        return self._add(slot, seat, tokens, None)

    def add_decode_row(self, slot: int, seat: Seat, draft: DraftTree | None, kept: Path | None) -> int:
        """The newest token of a sequence, with what is drafted behind it; the row's size. Of the draft what
        is `kept` goes on from the first stage."""
        tokens, _ = seat.sequence.next_row(1)
        self._trees.append(draft)
        if draft is None:
            return self._add(slot, seat, tokens, None)
        nodes = tuple(range(len(draft.tokens)))
        return self._add(slot, seat, draft.tokens, Tree(nodes, draft.parents, kept))

    def _add(self, slot: int, seat: Seat, tokens: tuple[int, ...], tree: Tree | None) -> int:
        """A row of these tokens. The sequence counts them as computed, of a tree the root."""
        sequence, accepted = seat.sequence, seat.accepted
        first = sequence.computed - (len(tokens) if tree is None else 1)
        wants = sequence.unread == 0
        sampling = WireSampling.of(sequence.request.sampling) if wants else None
        row = Row(slot, seat.generation, first, len(tokens), wants, sampling, tree, accepted)
        self._rows.append(row)
        self._seats.append(seat)
        self._tokens.extend(tokens)
        seat.accepted = None if tree is None else (0,)
        if seat.move is not None:
            self._moves.append(seat.move)
            seat.move = None
        self._held[slot] = first - len(accepted or ()) if seat.step else 0
        if not seat.step:
            self._batch.residues.pop(slot, None)
            if self._prefixes is not None:
                self._prefixes.note(self._batch, slot, seat)
        seat.step = self._step
        return len(tokens)

    def flight(self, guesses: int = 0) -> Flight | None:
        """None when there is no row in it. `guesses` were wanted for each decode row."""
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
            shared_tokens=self._shared_tokens,
        )
        batch.step = self._step
        batch.flights[self._step] = flight = Flight(pack, tuple(self._seats), tuple(self._trees), guesses)
        return flight
