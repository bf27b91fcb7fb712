"""A layout simulated pack by pack, from the same figures as `cost`: what the formulas are compared with, and
what rates that change and controllers are tried on. Pure.

`simulate_steps` has equal packs: there the step is max(M · cycle, loop) exactly, since a line of resources
that each serve first in, first out has no other circuit than a resource alone or the whole loop.
`simulate_job` in `simulate_job` has prompts and answers of given lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import Cluster, JobShape, Layout, ModelSizes
from bbquic.plan.cost import load_of
from bbquic.plan.decider import Decider, Decision, Watch
from bbquic.plan.line import Line, PackTimes, Passage
from bbquic.plan.speculation import PLAIN, Trees
from bbquic.plan.varying import Conditions
from bbquic.units import Seconds

ROUNDS = 8  # of all micro-batches: after the second one nothing changes any more


@dataclass(frozen=True, slots=True)
class StepsResult:
    """`returns` has the time and the rows of each pack that came back; `busy`, seconds by resource."""

    batch: float
    micro_batches: int  # at the end
    returns: tuple[tuple[float, float], ...]
    busy: Mapping[str, Seconds]
    decisions: tuple[tuple[float, Decision], ...]  # the changes, with their times
    events: int

    @property
    def step(self) -> Seconds:
        """Seconds in which every sequence gets a token, at the pace of the second half. Raises: ValueError
        where less than two packs came back."""
        half = len(self.returns) // 2
        if not half:
            raise ValueError("too little came back to know a step from")
        (began, _), (ended, _) = self.returns[half - 1], self.returns[-1]
        rows = sum(count for _, count in self.returns[half:])
        return Seconds((ended - began) / rows * self.batch)

    def tokens_between(self, start: float, stop: float) -> float:
        """Tokens that came back after `start`, up to `stop`."""
        return sum(rows for time, rows in self.returns if start < time <= stop)


def simulate_steps(
    cluster: Cluster,
    model: ModelSizes,
    job: JobShape,
    layout: Layout,
    *,
    until: Seconds | None = None,
    conditions: Conditions | None = None,
    decider: Decider | None = None,
    trees: Trees = PLAIN,
) -> StepsResult:
    """Equal packs for `until` seconds, by default for a few rounds of all micro-batches.

    A pack is `cost.load_of`'s, with decode rows that are `trees`: its rows count for all that they commit.
    `decider` is asked whenever a pack is back. Where it changes M, packs give
    rows to one another as they come back, as in a job (regrouping costs nothing: KV is copied on each stage
    at the speed of its memory).
    Raises: ValueError where the layout needs a link or a codec that is not there.
    """
    return _Steps(cluster, model, job, layout, conditions, decider, trees).run(until)


class _Steps:
    def __init__(
        self,
        cluster: Cluster,
        model: ModelSizes,
        job: JobShape,
        layout: Layout,
        conditions: Conditions | None,
        decider: Decider | None,
        trees: Trees,
    ) -> None:
        self._trees = trees
        self._line = Line(cluster, model, layout, conditions)
        self._whole = load_of(job, layout.batch, 1, trees)
        self._groups = Groups(self._whole.rows, layout.micro_batches)
        self._watch = Watch(Decision(layout.ways, layout.micro_batches), layout.batch)
        self._decider = decider
        self._flying: list[tuple[float, int, int, float, Passage]] = []  # back, number, group, rows, passage
        self._sent = 0
        self._packs: dict[tuple[float, tuple[Way, ...]], PackTimes] = {}

    def run(self, until: float | None) -> StepsResult:
        returns: list[tuple[float, float]] = []
        decisions = [(0.0, self._watch.decision)]
        if self._decider is not None:
            self._decide(0.0, decisions)
            self._groups = Groups(self._whole.rows, self._groups.wanted)
        for group in range(self._groups.wanted):
            self._send(0.0, group)
        most = ROUNDS * self._groups.wanted
        while (len(returns) < most) if until is None else (self._flying[0][0] <= until):
            now, _, group, rows, passage = heappop(self._flying)
            returns.append((now, rows * self._trees.committed))
            self._watch.note(passage)
            if self._decider is not None:
                self._decide(now, decisions)
            for other in self._groups.rebalance(group):
                self._send(now, other)
        busy = {one.name: Seconds(one.busy) for one in self._line.resources()}
        return StepsResult(
            self._whole.rows,
            self._groups.wanted,
            tuple(returns),
            busy,
            tuple(decisions),
            self._line.events + len(returns),
        )

    def _decide(self, now: float, decisions: list[tuple[float, Decision]]) -> None:
        assert self._decider is not None
        before = self._watch.decision
        after = self._watch.ask(self._decider, Seconds(now))
        if after != before:
            decisions.append((now, after))
            self._groups.regroup(after.micro_batches)

    def _send(self, now: float, group: int) -> None:
        rows = self._groups.rows[group]
        passage = self._line.send(now, self._pack(rows))
        self._groups.flying.add(group)
        heappush(self._flying, (passage.back, self._sent, group, rows, passage))
        self._sent += 1

    def _pack(self, rows: float) -> PackTimes:
        ways = self._watch.decision.ways
        found = self._packs.get((rows, ways))
        if found is None:
            whole, share = self._whole, rows / self._whole.rows
            load = replace(whole, rows=rows, prompt_tokens=whole.prompt_tokens * share)
            found = self._packs[rows, ways] = self._line.times(load, ways, trees=self._trees)
        return found


class Groups:
    """Rows of micro-batches while their number changes: a pack that is back keeps its share and gives the
    rest to those below theirs, for when these leave next."""

    def __init__(self, batch: float, wanted: int) -> None:
        self.batch = batch
        self.wanted = wanted
        self.rows = [batch / wanted] * wanted  # that sit in each, those to join it included
        self.flying: set[int] = set()

    def regroup(self, wanted: int) -> None:
        """Raises: ValueError below 1."""
        if wanted < 1:
            raise ValueError(f"{wanted} micro-batches")
        self.wanted = wanted
        self.rows += [0.0] * (wanted - len(self.rows))

    def share(self, group: int) -> float:
        return self.batch / self.wanted if group < self.wanted else 0.0

    def rebalance(self, back: int) -> list[int]:
        """The pack of a group is back; the groups to send now."""
        self.flying.discard(back)
        least = 1e-9 * self.batch  # less is rounding
        for other in range(self.wanted):
            surplus = self.rows[back] - self.share(back)
            room = self.share(other) - self.rows[other]
            if other != back and surplus > least and room > least:
                moved = min(surplus, room)
                self.rows[back] -= moved
                self.rows[other] += moved
        return [group for group, rows in enumerate(self.rows) if rows > least and group not in self.flying]
