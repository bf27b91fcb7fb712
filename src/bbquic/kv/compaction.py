"""Holes of slots closed beside the layers' compute: block by block, once the block's attention has been."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bbquic.kv.ranges import SlotRange
from bbquic.kv.regions import SlotCompaction
from bbquic.kv.slab import HOST, Arena

TOGETHER = (
    4  # blocks handed over at once: waking a thread takes 26 µs, moving two tokens of 32 rows 73 µs a block
)


class CompactionFailed(RuntimeError):
    """Some cells of a pack's slots were not moved: what these slots hold counts for nothing, and no others."""


@dataclass(frozen=True, slots=True)
class _Cells:
    """What moves in one tier of a range; tensors [n], where the tier's keys are."""

    where: SlotRange
    tier: int
    places: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class _HandedOver:
    """Some blocks' moves, in the thread; on CUDA the result is the event that they are done."""

    blocks: tuple[int, ...]
    what: str
    moved: Future[torch.cuda.Event | None]


class Compactor:
    """A worker's. Moves are made in a thread of their own, on CUDA on a stream of their own.

    All is called in the thread that computes, but for what says otherwise. No block is read before what was
    handed over of it is done. The thread starts with its first work, and ends with this.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compaction")
        self._handed: dict[int, _HandedOver] = {}  # by block, the last that nobody has waited for
        self._stream = _stream(arena.device)

    def wait(self, block: int) -> None:
        """Until nothing moves in a block. Raises: CompactionFailed naming block and pack where that failed."""
        if self._handed:
            handed = self._handed.pop(block, None)
            if handed is not None:
                _join(handed, self.arena.device)

    def move_now(self, compactions: Sequence[SlotCompaction]) -> None:
        """In all blocks, in this thread, behind what was handed over."""
        self.wait_all()
        for cells in _by_tier(self.arena, compactions):
            for block in self.arena.blocks:
                _move(self.arena, block, cells)

    def wait_all(self) -> None:
        """Until nothing moves in any block. Raises: as `wait`."""
        for block in tuple(self._handed):
            self.wait(block)

    def hand_over(self, blocks: tuple[int, ...], cells: Sequence[_Cells], what: str) -> _HandedOver:
        """Have moves made in blocks whose attention has been issued; `what` names their pack."""
        issued = None if self._stream is None else _event()
        handed = _HandedOver(blocks, what, self._thread.submit(self._work, blocks, cells, issued))
        self._handed.update(dict.fromkeys(blocks, handed))
        return handed

    @torch.inference_mode()
    def _work(
        self, blocks: tuple[int, ...], cells: Sequence[_Cells], issued: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if self._stream is None or issued is None:
            self._move_all(blocks, cells)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(issued)
            for tensor in (t for one in cells for t in (one.places, one.sources, one.targets) if t.is_cuda):
                tensor.record_stream(self._stream)
            self._move_all(blocks, cells)
            return _event()

    def _move_all(self, blocks: tuple[int, ...], cells: Sequence[_Cells]) -> None:
        for block in blocks:
            for one in cells:
                try:
                    _move(self.arena, block, one)
                except Exception as error:  # the boundary of the thread
                    raise RuntimeError(f"block {block}: {type(error).__name__}: {error}") from error


class PackCompaction:
    """What one pack waits for before each block's attention, and moves after it."""

    def __init__(self, compactor: Compactor, compactions: Sequence[SlotCompaction], what: str) -> None:
        """`what` names the pack in an error."""
        self._compactor = compactor
        self._what = what
        self._cells = _by_tier(compactor.arena, compactions)
        self._last = compactor.arena.blocks[-1] if compactor.arena.blocks else None
        self._attended: list[int] = []
        self._handed: list[_HandedOver] = []

    def before(self, block: int) -> None:
        """A block's cells are about to be read and written. Raises: as `Compactor.wait`."""
        self._compactor.wait(block)

    def after(self, block: int) -> None:
        """A block's attention has been issued: what it read may be moved."""
        if not self._cells:
            return
        self._attended.append(block)
        if len(self._attended) == TOGETHER or block == self._last:
            self._handed.append(self._compactor.hand_over(tuple(self._attended), self._cells, self._what))
            self._attended.clear()

    def finish(self) -> None:
        """Until its moves were made, or on CUDA asked for; any thread, behind the last block.

        Raises: CompactionFailed naming block and pack where one failed.
        """
        for handed in self._handed:
            _result(handed)


def _by_tier(arena: Arena, compactions: Sequence[SlotCompaction]) -> list[_Cells]:
    """Moves of one tier of one range together; no two of them touch one slot."""
    found: dict[tuple[SlotRange, int], list[SlotCompaction]] = {}
    for one in compactions:
        found.setdefault((one.where, one.where.tier(one.slot)), []).append(one)
    made = []
    for (where, tier), those in found.items():
        moves = [
            (where.place(one.slot), cell, one.target + index)
            for one in those
            for index, cell in enumerate(one.sources)
            if cell != one.target + index
        ]
        if moves:
            device = HOST if arena.is_on_host(tier) else arena.device
            made.append(_Cells(where, tier, *torch.tensor(moves).T.contiguous().to(device)))
    return made


def _move(arena: Arena, block: int, cells: _Cells) -> None:
    """All sources are read before a target is written."""
    for store in arena.view(block, cells.where, cells.tier):
        store[cells.places, :, cells.targets] = store[cells.places, :, cells.sources]


def _result(handed: _HandedOver) -> torch.cuda.Event | None:
    try:
        return handed.moved.result()
    except RuntimeError as error:
        raise CompactionFailed(f"closing the holes of {handed.what} failed in {error}") from error


def _join(handed: _HandedOver, device: torch.device) -> None:
    done = _result(handed)
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    """Recorded on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not say
    event.record()
    return event
