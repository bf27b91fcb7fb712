"""Beginnings that prompts have in common: read once, and copied to the other sequences' slots. Pure.

There are no slots for prefixes. What a sequence stored stays in its slot after it has left, until the slot is
taken or its cells are, so a sequence that begins looks who has, or had, the same first tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bbquic.runtime.seats import MicroBatch, Seat
from bbquic.runtime.sequence import Sequence

# Tokens. So few in a pack take less than a pack does by itself (LEAST in `chunks` is twice as many), and to
# wait until another one has read them may take a pack more.
LEAST_SHARED = 32

_WIDTH = 4  # bytes of a token


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first `count` tokens of what a seat stored in a slot."""

    batch: MicroBatch
    slot: int
    seat: Seat
    count: int


class Prefixes:
    """Which slot holds how a prompt begins: by a hash of the first LEAST_SHARED tokens, then by comparing."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[tuple[int, int], tuple[MicroBatch, Seat]]] = {}
        self._beginnings: dict[tuple[int, int], bytes] = {}  # of each slot that is in there

    def note(self, batch: MicroBatch, slot: int, seat: Seat) -> None:
        """A seat's first row is on its way: from now on the slot holds what the seat stores."""
        place = batch.index, slot
        before = self._beginnings.pop(place, None)
        if before is not None:
            self._drop(before, place)
        beginning = beginning_of(seat.sequence.prompt)
        if beginning is not None:
            self._beginnings[place] = beginning
            self._holders.setdefault(beginning, {})[place] = (batch, seat)

    def longest(
        self,
        batch: MicroBatch,
        slot: int,
        sequence: Sequence,
        carried: Mapping[int, int],
        leaving: int | None,
    ) -> tuple[Beginning | None, bool]:
        """What a sequence that begins in a slot of `batch` need not read, and whether it is to wait for more.

        It waits while another one reads LEAST_SHARED further tokens of its beginning, or more. That one waits
        for nobody, for it has begun, so all waiting ends; where it leaves, what it has read is still there.

        `carried`: slots of `batch` that have a row in the pack in the making, and what they held before it;
        `leaving`: a micro-batch whose slots others should not keep from being given up.
        """
        most = len(sequence.request.tokens) + len(sequence.generated) - 1  # the last one's output is wanted
        best, coming = None, 0
        longer = b""  # how a prompt begins that may give more than the best: most are passed over by this
        for holder, place, seat in self._candidates(sequence.prompt):
            is_own = holder is batch
            in_place = is_own and place == slot
            if not in_place and holder.slots.get(place) not in (None, seat):
                continue  # whoever sits there now is about to overwrite it
            if holder.index == leaving and not is_own:
                continue
            if not in_place and not seat.sequence.prompt.startswith(longer):
                continue
            same = _common(sequence, seat.sequence, most)
            held = carried.get(place, seat.held) if is_own else seat.held
            if seat.is_taken:
                coming = max(coming, same)
            count = min(same, held)
            if best is None or count + in_place > best.count:  # of equal ones that which needs no copy
                best = Beginning(holder, place, seat, count)
                longer = sequence.prompt[: (count + 1) * _WIDTH]
        if best is None or best.count < LEAST_SHARED:
            best = None
        return best, coming >= LEAST_SHARED + (best.count if best else 0)

    def _candidates(self, prompt: bytes) -> Iterator[tuple[MicroBatch, int, Seat]]:
        """Whoever's tokens begin like this prompt and are still in their slots."""
        beginning = beginning_of(prompt)
        if beginning is None:
            return
        for place, (batch, seat) in list(self._holders.get(beginning, {}).items()):
            slot = place[1]
            if seat in (batch.slots.get(slot), batch.residues.get(slot)):
                yield batch, slot, seat
            else:
                del self._beginnings[place]
                self._drop(beginning, place)

    def _drop(self, beginning: bytes, place: tuple[int, int]) -> None:
        holders = self._holders[beginning]
        del holders[place]
        if not holders:
            del self._holders[beginning]


def beginning_of(prompt: bytes) -> bytes | None:
    """What prompts that may share something have in common; None for one that is too short."""
    return prompt[: LEAST_SHARED * _WIDTH] if len(prompt) > LEAST_SHARED * _WIDTH else None


def common_tokens(one: bytes, other: bytes) -> int:
    """Length in tokens of the longest common prefix of two prompts."""
    least, most = 0, min(len(one), len(other)) // _WIDTH
    while least < most:
        middle = (least + most + 1) // 2
        if one[least * _WIDTH : middle * _WIDTH] == other[least * _WIDTH : middle * _WIDTH]:
            least = middle
        else:
            most = middle - 1
    return least


def shared_beginnings(prompts: Iterable[Items[int]]) -> list[int]:
    """Of each prompt, how many tokens an earlier one begins with, too; 0 where that is not worth it."""
    found: list[int] = []
    earlier: dict[bytes, list[bytes]] = {}
    for tokens in prompts:
        prompt = array("i", tokens).tobytes()
        beginning = beginning_of(prompt)
        alike = [] if beginning is None else earlier.setdefault(beginning, [])
        longest = max((common_tokens(prompt, other) for other in alike), default=0)
        found.append(min(longest, len(tokens) - 1))
        alike.append(prompt)
    return found


def _common(sequence: Sequence, other: Sequence, most: int) -> int:
    if sequence is other:  # it was dropped: answer and all
        return most
    return min(common_tokens(sequence.prompt, other.prompt), most)
