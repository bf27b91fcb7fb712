"""A whole job simulated: sequences of given lengths, slots refilled at once, prompts beside answers. Pure.

The rules are the scheduler's: a micro-batch's decode rows travel in one pack; a chunk of prompts rides with
them, as large as does not starve decode rows; packs with chunks alone leave while the pipe is not full; and
in the job's tail micro-batches are dissolved where fewer are a shorter step. Here they go by the cluster's
figures, there by measurements.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import Cluster, Layout, ModelSizes
from bbquic.plan.cost import Load
from bbquic.plan.decider import Decider, Decision, Watch
from bbquic.plan.line import Line, Passage
from bbquic.plan.varying import Conditions
from bbquic.units import Seconds

LEAST_CHUNK = 64  # tokens
STRETCH = 4.0  # times as long a step may take for the prompts that ride in it


@dataclass(frozen=True, slots=True)
class JobOptions:
    """`pack_tokens` of prompts in a pack at most; `depth` packs of a micro-batch on their way at most.

    `share`: while sequences wait, a pack takes so many times its share of all prompts, b · P / s̄ tokens, in
    place of what the scheduler's rule gives.
    """

    pack_tokens: int = 512
    depth: int = 4
    share: float | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """`tokens` of answers in `seconds`; `busy`, seconds by resource; `ended`, when each sequence was."""

    seconds: Seconds
    tokens: int
    packs: int
    busy: Mapping[str, Seconds]
    ended: tuple[float, ...]
    decisions: tuple[tuple[float, Decision], ...]
    events: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def simulate_job(
    cluster: Cluster,
    model: ModelSizes,
    layout: Layout,
    sequences: Iterable[tuple[int, int]],
    *,
    options: JobOptions | None = None,
    conditions: Conditions | None = None,
    decider: Decider | None = None,
) -> JobResult:
    """The job of `sequences`, each tokens of its prompt and of its answer, in that order.

    Every slot holds any sequence: what a layout reserves is the planner's business. `decider` is asked
    whenever a pack with decode rows is back.
    Raises: ValueError for a length below 1, without sequences, and as `simulate_steps` does.
    """
    return _Job(cluster, model, layout, sequences, options or JobOptions(), conditions, decider).run()


@dataclass(slots=True, eq=False)
class _Sequence:
    number: int
    unread: int  # tokens of the prompt that were not sent yet
    left: int  # tokens of the answer to come
    context: int = 0  # tokens that were sent


@dataclass(slots=True, eq=False)
class _MicroBatch:
    capacity: int
    seated: int = 0
    flights: int = 0
    ready: list[_Sequence] = field(default_factory=list)  # decode, and are not on their way
    reading: deque[_Sequence] = field(default_factory=deque)
    decodes: int = 0  # rows on their way


@dataclass(slots=True, eq=False)
class _Flight:
    batch: _MicroBatch
    rows: list[_Sequence]
    read: list[_Sequence]  # whose prompt ends with this pack
    passage: Passage


class _Job:
    def __init__(
        self,
        cluster: Cluster,
        model: ModelSizes,
        layout: Layout,
        sequences: Iterable[tuple[int, int]],
        options: JobOptions,
        conditions: Conditions | None,
        decider: Decider | None,
    ) -> None:
        self._line = Line(cluster, model, layout, conditions)
        self._options = options
        self._decider = decider
        self._slots = layout.batch
        self._watch = Watch(Decision(layout.ways, layout.micro_batches), layout.batch)
        self._waiting = deque(_Sequence(number, *lengths) for number, lengths in enumerate(sequences))
        if not self._waiting or any(one.unread < 1 or one.left < 1 for one in self._waiting):
            raise ValueError("a job has sequences, with prompts and answers of a token at least")
        self._tokens = sum(one.left for one in self._waiting)
        mean = [
            sum(values) / len(self._waiting) for values in zip(*map(_lengths, self._waiting), strict=True)
        ]
        self._prompts_an_answer: float = mean[0] / mean[1]
        self._context, self._prompt_context = mean[0] + mean[1] / 2, mean[0] / 2
        self._ended = [0.0] * len(self._waiting)
        self._live = 0
        self._batches: list[_MicroBatch] = []
        self._regroup(layout.micro_batches)
        self._flying: list[tuple[float, int, _Flight]] = []
        self._packs = 0
        self._decisions = [(0.0, self._watch.decision)]

    def run(self) -> JobResult:
        now = 0.0
        self._decide(now)
        self._launch_all(now)
        while self._flying:
            now, _, flight = heappop(self._flying)
            self._take(now, flight)
            if flight.rows:
                self._decide(now)
            self._launch_all(now)
        assert not self._live, "a job ends with all its sequences"
        busy = {one.name: Seconds(one.busy) for one in self._line.resources()}
        return JobResult(
            Seconds(now),
            self._tokens,
            self._packs,
            busy,
            tuple(self._ended),
            tuple(self._decisions),
            self._line.events + self._packs,
        )

    # What is set.

    @property
    def _ways(self) -> Sequence[Way]:
        return self._watch.decision.ways

    def _decide(self, now: float) -> None:
        if self._decider is None:
            return
        before = self._watch.decision
        after = self._watch.ask(self._decider, Seconds(now))
        if after != before:
            self._decisions.append((now, after))
            self._regroup(after.micro_batches)

    def _regroup(self, wanted: int) -> None:
        """Cut the slots into so many micro-batches; who sits in one too many moves when its rows are back."""
        self._figures: dict[int, tuple[float, float]] = {}
        self._chunks: dict[int, int] = {}
        self._wanted = wanted
        while len(self._batches) < wanted:
            self._batches.append(_MicroBatch(0))
        for number, batch in enumerate(self._batches):
            batch.capacity = _share(self._slots, wanted, number)

    # What comes back.

    def _take(self, now: float, flight: _Flight) -> None:
        batch = flight.batch
        batch.flights -= 1
        batch.decodes -= len(flight.rows)
        self._watch.note(flight.passage)
        for sequence in (*flight.rows, *flight.read):
            sequence.left -= 1
            if sequence.left:
                batch.ready.append(sequence)
            else:
                batch.seated -= 1
                self._live -= 1
                self._ended[sequence.number] = now

    # What leaves.

    def _launch_all(self, now: float) -> None:
        """As long as there is one: the next pack of the micro-batch with the fewest on their way."""
        while any(self._launch(now, one) for one in sorted(self._batches, key=lambda one: one.flights)):
            pass

    def _launch(self, now: float, batch: _MicroBatch) -> bool:
        if batch.flights >= self._options.depth:
            return False
        while self._waiting and batch.seated < batch.capacity and self._live < self._slots:
            batch.reading.append(self._waiting.popleft())
            batch.seated += 1
            self._live += 1
        rows: list[_Sequence] = []
        if batch.ready and not batch.decodes:
            self._spread(batch)
            rows, batch.ready = batch.ready, []
        if not rows and (not batch.reading or (batch.flights and len(self._flying) >= self._window())):
            return False
        self._send(now, batch, rows)
        return True

    def _send(self, now: float, batch: _MicroBatch, rows: list[_Sequence]) -> None:
        budget = self._chunk(len(rows)) if batch.reading else 0
        read: list[_Sequence] = []
        tokens, keys = 0, 0.0
        while budget > tokens and batch.reading:
            sequence = batch.reading[0]
            count = min(budget - tokens, sequence.unread)
            tokens += count
            keys += count * (sequence.context + count / 2)
            sequence.unread -= count
            sequence.context += count
            if not sequence.unread:
                read.append(batch.reading.popleft())
        context = sum(one.context for one in rows) / len(rows) if rows else 0.0
        for sequence in rows:
            sequence.context += 1
        load = Load(len(rows), context, tokens, keys / tokens if tokens else 0.0)
        passage = self._line.send(now, self._line.times(load, self._ways, len(rows) + len(read)))
        batch.flights += 1
        batch.decodes += len(rows)
        self._packs += 1
        heappush(self._flying, (passage.back, self._packs, _Flight(batch, rows, read, passage)))

    # How many, how large.

    def _costs(self, rows: int) -> tuple[float, float]:
        """(cycle, loop) of a pack of so many decode rows."""
        found = self._figures.get(rows)
        if found is None:
            load = Load(rows, self._context)
            found = self._figures[rows] = self._line.figures(self._line.times(load, self._ways))
        return found

    def _window(self) -> int:
        """Little's law, as the scheduler has it: what fills the pipe, and one more."""
        cycle, loop = self._costs(max(1, self._slots // self._wanted))
        least = self._wanted
        return min(max(math.ceil(loop / cycle) + 1, least), least * self._options.depth)

    def _chunk(self, own: int) -> int:
        """Prompt tokens beside `own` decode rows: as many as stretch a pack to STRETCH times its cycle, or
        to a share of the loop."""
        most = self._options.pack_tokens
        rows = own or max(max(len(one.ready), one.decodes) for one in self._batches)
        if not rows:
            return most
        if self._options.share is not None and self._waiting:
            return min(most, math.ceil(self._options.share * rows * self._prompts_an_answer))
        found = self._chunks.get(rows)
        if found is None:
            cycle, loop = self._costs(rows)
            limit = max(STRETCH * cycle, loop / self._wanted)
            low, high = 0, most
            while low < high:
                middle = (low + high + 1) // 2
                load = Load(rows, self._context, middle, self._prompt_context)
                if self._line.figures(self._line.times(load, self._ways))[0] <= limit:
                    low = middle
                else:
                    high = middle - 1
            found = self._chunks[rows] = min(max(low, LEAST_CHUNK), most)
        return found

    def _spread(self, batch: _MicroBatch) -> None:
        """Sequences above the micro-batch's share, or all of them where fewer micro-batches are a shorter
        step, move to others that have room and leave with their next rows."""
        surplus = batch.seated - batch.capacity
        others = [one for one in self._batches if one is not batch]
        if not self._waiting and self._dissolves(batch):
            surplus = batch.seated
            others = [one for one in others if one.seated]
        for other in sorted(others, key=lambda one: one.seated):
            while surplus > 0 and batch.ready and other.seated < other.capacity:
                other.ready.append(batch.ready.pop())
                other.seated += 1
                batch.seated -= 1
                surplus -= 1

    def _dissolves(self, batch: _MicroBatch) -> bool:
        live = [one for one in self._batches if one.seated]
        if len(live) < 2 or len(batch.ready) < batch.seated or batch.seated > min(one.seated for one in live):
            return False
        rest = sum(one.capacity - one.seated for one in live if one is not batch)
        return rest >= batch.seated and self._best_count(sum(one.seated for one in live), len(live)) < len(
            live
        )

    def _best_count(self, rows: int, most: int) -> int:
        """Of micro-batches for so many rows: the shortest step, the fewest of equal ones."""

        def step(count: int) -> float:
            cycle, loop = self._costs(-(-rows // count))
            return max(count * cycle, loop)

        return min(range(1, most + 1), key=step)


def _lengths(sequence: _Sequence) -> tuple[int, int]:
    return sequence.unread, sequence.left


def _share(slots: int, count: int, number: int) -> int:
    """Of the slots, the part of one micro-batch; parts differ by one at most, none is left over."""
    return slots // count + (number < slots % count) if number < count else 0
