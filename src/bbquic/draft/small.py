"""A small model as drafter: all its blocks on this machine, its keys and values kept from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from bbquic.draft.candidates import candidates
from bbquic.draft.confidence import Calibration
from bbquic.draft.drafter import Ask
from bbquic.draft.growth import Growth
from bbquic.draft.slots import Held, Slots
from bbquic.draft.store import DraftStore
from bbquic.draft.tree import DraftTree
from bbquic.kv.attention import PackedAttention
from bbquic.kv.frontier import Frontier, FrontierAttention
from bbquic.kv.rows import Layout, RowSpan
from bbquic.model.blocks import StageModel
from bbquic.units import Bytes

SHORT = 16  # tokens of a row that is caught up together with its neighbours; a longer one has its own call


@dataclass(frozen=True, slots=True)
class ModelDrafterOptions:
    """memory: bytes of keys and values, of `rows` sequences at most; while slots grow, the smaller ones are
    there too. threads: of torch, so that nodes on the same machine keep theirs. pack_tokens: of a pass over
    prompts. call_tokens: caught up in one call; who needs more has no guesses before the next."""

    memory: Bytes = Bytes(1 << 30)
    rows: int = 256
    threads: int = 1
    pack_tokens: int = 256
    call_tokens: int = 512

    def __post_init__(self) -> None:
        if min(self.memory, self.rows, self.threads, self.pack_tokens, self.call_tokens) < 1:
            raise ValueError(f"options of a drafter are from 1 up: {self}")


@dataclass(slots=True)
class _Work:
    """An ask that has a slot, and the hidden state [D] behind its newest token once it is caught up."""

    place: int
    ask: Ask
    held: Held
    behind: torch.Tensor | None = None

    @property
    def missing(self) -> int:
        return len(self.ask.tokens) - len(self.held.tokens)


class ModelDrafter:
    """A `Drafter`. Committed tokens are computed once; a tree's nodes once each, level by level, all rows of
    a call together. What a row gets depends on its own tokens alone, and on what was learnt."""

    is_instant = False

    def __init__(
        self,
        model: StageModel,
        *,
        name: str,
        vocabulary: int,
        known: int,
        context: int,
        options: ModelDrafterOptions | None = None,
    ) -> None:
        """`model` has all blocks, embeds and heads. Tokens from `vocabulary` on, the target's, are never
        guessed; behind one from `known` on, the draft's own, nothing is. `context`: tokens that it was made
        for.

        Raises: ModelError, with the figures, where the memory holds no sequence of some length.
        """
        self.name = name
        self.tokens_read = 0  # of prompts and answers; those of trees do not count
        self._model = model
        self._vocabulary = vocabulary
        self._known = known
        self._context = context
        self._options = options or ModelDrafterOptions()
        self._store = DraftStore(model, self._options.memory, self._options.rows)
        self._slots = Slots(self._store.slots)
        self._calibrations = {greedy: Calibration() for greedy in (True, False)}
        self._made: dict[int, tuple[DraftTree, tuple[float, ...], Calibration]] = {}

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """See `Drafter.draft`; keys differ."""
        if torch.get_num_threads() != self._options.threads:
            torch.set_num_threads(self._options.threads)  # of the thread that calls
        trees = [DraftTree.root(ask.tokens[-1]) for ask in asks]
        work = self._begin(asks)
        self._catch_up(work)
        growths = self._grow([one for one in work if one.behind is not None])
        for place, growth in growths.items():
            ask = asks[place]
            trees[place], chances = growth.tree()
            self._made[ask.key] = trees[place], chances, self._calibrations[ask.sampling.temperature == 0]
        return trees

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        """See `Drafter.learn`."""
        made = self._made.pop(key, None)
        if made is None or made[0] != tree:
            return
        _, chances, calibration = made
        accepted = set(path)
        for node in range(1, len(tree.tokens)):
            if tree.parents[node] in accepted:
                calibration.learn(chances[node], was_right=node in accepted)

    def forget(self, key: int) -> None:
        """See `Drafter.forget`."""
        self._slots.forget(key)
        self._made.pop(key, None)

    def _begin(self, asks: Sequence[Ask]) -> list[_Work]:
        """The asks that get a slot, by slots; what is stored of others than their tokens is dropped."""
        able = {place: ask for place, ask in enumerate(asks) if self._can_guess(ask)}
        if able:
            self._store.make_room(max(map(_cells, able.values())), self._slots)
        held = self._slots.take([ask.key for ask in able.values()])
        work = [_Work(place, ask, held[ask.key]) for place, ask in able.items() if ask.key in held]
        for one in work:
            one.held.keep(one.ask.tokens)
        return sorted(work, key=lambda one: one.held.slot)

    def _can_guess(self, ask: Ask) -> bool:
        fits = len(ask.tokens) < self._context and _cells(ask) <= self._store.most
        return fits and max(ask.tokens) < self._known

    def _catch_up(self, work: Sequence[_Work]) -> None:
        """Compute what is new of the rows' tokens, the rows with the least of it first."""
        left = self._options.call_tokens
        while left and any(one.missing for one in work):
            counts = dict.fromkeys(range(len(work)), 0)
            room = min(left, self._options.pack_tokens)
            for index in sorted(range(len(work)), key=lambda index: work[index].missing):
                counts[index] = min(room, work[index].missing)
                room -= counts[index]
            self._read([(work[index], count) for index, count in counts.items() if count])
            left -= sum(counts.values())

    def _read(self, rows: Sequence[tuple[_Work, int]]) -> None:
        """One pass over the next tokens of some rows, by slots."""
        spans, tokens, positions, ends = [], list[int](), list[int](), []
        for one, count in rows:
            first = len(one.held.tokens)
            spans.append(_span(one.held.slot, first, count))
            tokens += one.ask.tokens[first : first + count]
            positions += range(first, first + count)
            ends.append(len(tokens) - 1)
        device = self._model.device
        attention = PackedAttention(spans, self._store.where, self._store.arena, device=device)
        hidden = self._run(tokens, positions, attention)
        self.tokens_read += len(tokens)
        for (one, count), end in zip(rows, ends, strict=True):
            first = len(one.held.tokens)
            one.held.tokens += one.ask.tokens[first : first + count]
            if not one.missing:
                one.behind = hidden[end]

    def _grow(self, work: Sequence[_Work]) -> dict[int, Growth]:
        """Trees of rows that are caught up, by the places of their asks."""
        growths = {}
        for one in work:
            ask, count = one.ask, len(one.ask.tokens)
            depth = min(ask.depth, self._context - count)
            growths[one.place] = Growth(ask.tokens[-1], ask.guesses, depth, range(count, count + ask.guesses))
        nodes = [(one, 0) for one in work]
        hidden = torch.stack([one.behind for one in work if one.behind is not None]) if work else None
        while nodes and hidden is not None:
            self._guess(nodes, growths, self._model.logits(hidden))
            grown = {one.place: one for one, _ in nodes}.values()
            nodes = [(one, node) for one in grown for node in growths[one.place].expand()]
            hidden = self._next_level(nodes, growths) if nodes else None
        return growths

    def _guess(
        self, nodes: Sequence[tuple[_Work, int]], growths: dict[int, Growth], logits: torch.Tensor
    ) -> None:
        """Add what may follow some nodes, by their logits [S, V]."""
        params = [one.ask.sampling for one, _ in nodes]
        positions = [len(one.ask.tokens) + growths[one.place].depth(node) for one, node in nodes]
        ids, chances = candidates(logits[:, : self._vocabulary], params, positions)
        for row, (one, node) in enumerate(nodes):
            count = one.ask.guesses
            calibrated = self._calibrations[one.ask.sampling.temperature == 0]
            guesses = zip(ids[row, :count].tolist(), chances[row, :count].tolist(), strict=True)
            growths[one.place].add(node, list(guesses), calibrated)

    def _next_level(self, nodes: Sequence[tuple[_Work, int]], growths: dict[int, Growth]) -> torch.Tensor:
        """One pass over nodes, by slots: hidden states [S, D] behind them."""
        rows, tokens, positions = [], list[int](), list[int]()
        for _, group in groupby(nodes, key=lambda pair: pair[0].place):
            mine = list(group)
            work, growth = mine[0][0], growths[mine[0][0].place]
            paths = tuple(growth.path(node) for _, node in mine)
            rows.append(Frontier(work.held.slot, len(work.ask.tokens), paths))
            tokens += [growth.token(node) for _, node in mine]
            positions += rows[-1].positions
        return self._run(tokens, positions, FrontierAttention(rows, self._store.where, self._store.arena))

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], attention: PackedAttention | FrontierAttention
    ) -> torch.Tensor:
        """A pack through all blocks: hidden states [T, D]."""
        device = self._model.device
        hidden = self._model.embed(torch.tensor(tokens, device=device))
        return self._model.run(hidden, torch.tensor(positions, device=device), attention)


def _cells(ask: Ask) -> int:
    """What its tokens and its tree need."""
    return len(ask.tokens) + ask.guesses


def _span(slot: int, first: int, count: int) -> RowSpan:
    """Tokens that go on from `first`; few of them as a tree without branches, which neighbours share a call
    with."""
    if count > SHORT:
        return RowSpan(slot, first, count)
    parents = (0, *range(count - 1))
    return RowSpan(slot, first, count, Layout(first, first, (), parents))
