"""Whose rows carry drafts: what a drafter is asked, when decode rows wait for it, and what it is told. Pure.

An instant drafter is asked as a pack is made. Another one has its own cycle: each time it is free it is asked
for all that wait for it, whatever their micro-batches, and a micro-batch waits once a pack, for one answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

from bbquic.draft.drafter import Ask, Drafter, Speculation
from bbquic.draft.tree import DraftTree
from bbquic.plan.speculation import TREE_TOKENS, tree_room
from bbquic.runtime.drafters import TimedDrafter
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class DraftWork:
    """What a drafter is to do in its own thread; `micro_batches` wait for it."""

    micro_batches: tuple[int, ...]
    asks: tuple[Ask, ...]
    _drafter: Drafter
    _told: tuple[Callable[[], None], ...]
    _sequences: tuple[Sequence, ...]

    def draft(self) -> list[DraftTree]:
        """A tree for each ask. Raises: what the drafter does."""
        for tell in self._told:
            tell()
        return self._drafter.draft(self.asks) if self.asks else []

    def hand_out(self, trees: Items[DraftTree]) -> None:
        """Give each sequence its draft, unless it went on or began anew since it was asked about.

        Raises: ValueError for a tree that nobody asked for.
        """
        if len(trees) != len(self.asks):
            raise ValueError(f"{len(trees)} trees for {len(self.asks)} sequences")
        for sequence, ask, tree in zip(self._sequences, self.asks, trees, strict=True):
            if tree.tokens[0] != ask.tokens[-1] or tree.guesses > ask.guesses or max(tree.depths) > ask.depth:
                raise ValueError(f"a tree is not what was asked for: {ask.guesses} nodes, {ask.depth} deep")
            if tree.guesses and sequence.decodes and sequence.length == len(ask.tokens):
                sequence.draft = tree


@dataclass(slots=True)
class _Round:
    """A micro-batch's next pack with decode rows, in the making."""

    guesses: int
    waits: bool = False  # for drafts


class Drafting:
    """One job's. It is off from the start without a drafter, and after one that failed."""

    def __init__(
        self, drafter: Drafter | None, speculation: Speculation | None, *, most: int, kept: int | None
    ) -> None:
        """`most` guesses for a row; `kept` of them go on from the first stage, None: all."""
        self._drafter = drafter if speculation is not None and most else None
        self._speculation = speculation
        self._most = most
        self._kept = kept
        self._rounds: dict[int, _Round] = {}
        self._waiting: list[tuple[int, Sequence, Ask]] = []  # not handed to the drafter yet
        self._told: list[Callable[[], None]] = []
        self._words: deque[str] = deque(maxlen=1)
        self._timed = drafter if isinstance(drafter, TimedDrafter) else None
        self._rows = self._tokens = self._guesses = self._accepted = self._dropped = 0

    @property
    def words(self) -> tuple[str, ...]:
        """What was decided of late about guessing, and why none is made any more."""
        decided = () if self._speculation is None or self._drafter is None else self._speculation.decisions()
        share = self._dropped / max(1, self._guesses)
        pruned = (f"of {self._guesses:,} guesses the first stage dropped {share:.0%}",) if share else ()
        return (*decided, *pruned, *self._words)

    @property
    def drafts(self) -> Drafts:
        """What it came to so far."""
        seconds = 0.0 if self._timed is None else self._timed.spent
        return Drafts(self._rows, self._tokens, self._guesses, self._accepted, seconds)

    @property
    def has_cycle(self) -> bool:
        """Whether the drafter works beside the loop."""
        return self._drafter is not None and not self._drafter.is_instant

    def room(self, largest: int, need: int) -> int:
        """Cells beyond its `need` for a sequence's trees and their holes (`Regions.place`).

        None where no slot is that long: then nothing is drafted for it.
        """
        room = tree_room(self._most) if self._drafter is not None else 0
        return room if need + room <= largest else 0

    def holds(self, micro_batch: int, sequences: Items[Sequence]) -> bool:
        """Whether a micro-batch's next decode rows, those of `sequences`, wait for drafts."""
        drafter, speculation = self._drafter, self._speculation
        if drafter is None or speculation is None:
            return False
        now = self._rounds.get(micro_batch)
        if now is None:
            most = min(self._most, TREE_TOKENS // len(sequences))
            now = _Round(min(most, speculation.guesses(micro_batch, len(sequences))))
            self._rounds[micro_batch] = now
            asks = [(micro_batch, one, ask) for one in sequences if (ask := _ask(one, now.guesses))]
            self._waiting += asks
            now.waits = bool(asks)
            if drafter.is_instant:
                self._draft_now()
        return now.waits

    def work(self) -> DraftWork | None:
        """All that waits for a drafter that has a cycle of its own; None: nothing does."""
        drafter = self._drafter
        if drafter is None or not (self._waiting or self._told):
            return None
        waiting, self._waiting = self._waiting, []
        told, self._told = tuple(self._told), []
        micro_batches = tuple(sorted({index for index, _, _ in waiting}))
        asks, sequences = tuple(ask for *_, ask in waiting), tuple(one for _, one, _ in waiting)
        return DraftWork(micro_batches, asks, drafter, told, sequences)

    def take(self, work: DraftWork, trees: Items[DraftTree]) -> None:
        """The drafts are there, and rows go on; those that the drafter has no right to turn it off."""
        try:
            work.hand_out(trees)
        except ValueError as error:
            self.stop(error)
        for index in work.micro_batches:
            if index in self._rounds:
                self._rounds[index].waits = False

    def stop(self, error: BaseException) -> None:
        """Draft no more, because of an error."""
        if self._drafter is not None:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            self._words.append(f"{self._drafter.name} drafts no more: {why}")
        self._drafter = None
        for one in self._rounds.values():
            one.waits = False
        self._waiting.clear()
        self._told.clear()

    def clear(self) -> None:
        """Nothing waits for drafts: whoever sat somewhere reads again."""
        self._rounds.clear()
        self._waiting.clear()

    def launched(self, micro_batch: int) -> int:
        """A micro-batch's decode rows leave: how many guesses were wanted for each."""
        now = self._rounds.pop(micro_batch, None)
        return 0 if now is None else now.guesses

    @staticmethod
    def draft_of(sequence: Sequence, guesses: int) -> DraftTree | None:
        """What a sequence's next row carries. One that moved here since it was drafted for may have more than
        are wanted here, and goes without."""
        draft, sequence.draft = sequence.draft, None
        return draft if draft is not None and draft.guesses <= guesses else None

    def kept(self, tree: DraftTree | None) -> tuple[int, ...] | None:
        """Of a tree, the nodes that go on from the first stage; None: all."""
        if tree is None or self._kept is None or self._kept >= tree.guesses:
            return None
        return tree.heaviest(self._kept)

    def learn(self, sequence: Sequence, tree: DraftTree, path: Items[int], kept: int) -> None:
        """What was accepted of a tree, of which `kept` guesses went on from the first stage."""
        self._guesses += tree.guesses
        self._accepted += len(path) - 1
        self._dropped += tree.guesses - kept
        if self._timed is not None:
            self._timed.passed(sequence.key, kept)
        if self._drafter is not None:
            self._tell(partial(self._drafter.learn, sequence.key, tree, tuple(path)))

    def forget(self, sequence: Sequence) -> None:
        if self._drafter is not None:
            self._tell(partial(self._drafter.forget, sequence.key))

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None:
        self._rows += rows
        self._tokens += committed
        if self._speculation is not None and rows:
            self._speculation.noted(micro_batch, rows, guesses, committed)

    def _tell(self, tell: Callable[[], None]) -> None:
        """A drafter in a thread of its own hears it there."""
        if self.has_cycle:
            self._told.append(tell)
            return
        try:
            tell()
        except Exception as error:  # the boundary of a drafter
            self.stop(error)

    def _draft_now(self) -> None:
        work = self.work()
        if work is None:
            return
        try:
            trees = work.draft()
        except Exception as error:  # the boundary of a drafter
            self.stop(error)
        else:
            self.take(work, trees)


def _ask(sequence: Sequence, guesses: int) -> Ask | None:
    """None where a plain row will do: the last token of an answer has no successor."""
    depth = min(guesses, sequence.left - 1)
    if depth < 1 or not sequence.room or sequence.draft is not None:
        return None
    return Ask(sequence.key, sequence.tokens, sequence.request.sampling, guesses, depth)
