"""Which sequence has which slot of a drafter's KV, and which of its tokens are stored there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Held:
    """A slot's: tokens whose keys and values are in its cells from 0 on."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    asked: int = 0  # the round in which it was asked for last

    def keep(self, tokens: Sequence[int]) -> int:
        """Drop what is not how `tokens` begin, and their newest one; gives how many are left."""
        self.tokens = self.tokens[: shared(self.tokens, tokens[:-1])]
        return len(self.tokens)


class Slots:
    """Slots by key. Where none is free, one that asks again gets that of the sequence that was not asked
    about for the longest, if that was before it first asked: so sequences that take turns never rob each
    other, and what one of them would compute anew each time is not drafted at all."""

    def __init__(self, count: int) -> None:
        assert count >= 1, count
        self._free = list(range(count))
        self._held: dict[int, Held] = {}
        self._refused: dict[int, int] = {}  # by key that has none, since when
        self._round = 0

    def take(self, keys: Sequence[int]) -> dict[int, Held]:
        """A round's: the slots of those keys that have or get one."""
        self._round += 1
        for key in keys:
            if key in self._held:
                self._held[key].asked = self._round
        for key in keys:
            if key not in self._held and (slot := self._find(key)) is not None:
                self._held[key] = Held(slot, asked=self._round)
                self._refused.pop(key, None)
        return {key: self._held[key] for key in keys if key in self._held}

    def forget(self, key: int) -> None:
        """The key may have none."""
        self._refused.pop(key, None)
        held = self._held.pop(key, None)
        if held is not None:
            self._free.append(held.slot)
            self._free.sort()

    def resize(self, count: int) -> list[tuple[int, int]]:
        """Have `count` slots: those that were asked about last keep one. Gives what goes where: old, new."""
        assert count >= 1, count
        kept = sorted(self._held, key=lambda key: -self._held[key].asked)[:count]
        self._held = {key: self._held[key] for key in kept}
        moves = []
        for slot, held in enumerate(sorted(self._held.values(), key=lambda held: held.slot)):
            moves.append((held.slot, slot))
            held.slot = slot
        self._free = list(range(len(moves), count))
        return moves

    def _find(self, key: int) -> int | None:
        if not self._free:
            since = self._refused.setdefault(key, self._round)
            oldest = min(self._held, key=lambda one: self._held[one].asked)
            if since == self._round or self._held[oldest].asked >= since:
                return None
            self.forget(oldest)
        return self._free.pop(0)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two begin with alike."""
    count = min(len(one), len(other))
    if list(one[:count]) == list(other[:count]):  # as is usual; the loop is for what is not
        return count
    return next(place for place in range(count) if one[place] != other[place])
