"""How many guesses N each micro-batch makes now: speculate where E[a] / step is above that without. Pure.

A choice is a number for each micro-batch, and worth the tokens of a round over its length: the resource that
all of them together keep longest, or the longest loop. So one that differs from the others has to pay for
what they wait for it. What a change would gain - all to one number, or one micro-batch to another - is summed
as evidence, as it is for the number of micro-batches (`controller`). The paper's figure 6 comes out of it:
fewer guesses win first, none where none win.

What is not in use is tried now and then, a pass at a time, on account: each pass earns a small share of
itself (`TRIES`), and a trial pays what it lost, measured in passes. One that gains pays itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bbquic.plan.acceptance import Acceptance, Outcome
from bbquic.plan.controller import NOTHING, Evidence, Line, Measured, seconds
from bbquic.plan.speculation import PLAIN, TREE_TOKENS, Trees, times_with_trees
from bbquic.units import Seconds

LEVELS = (0, 1, 2, 4, 8, 16, 32)
TRIES = 0.0025  # of a pass: what each one earns for trials
MOST_SAVED = 1.0  # passes, of such earnings
FIRST = 2.0  # passes that trials may lose before the first has earned anything
KNOWN = 12.0  # rows before what was accepted is evidence
PRESENT = 3  # steps after which a micro-batch that asked for nothing is not there any more
KEPT = 8  # reasons for changes


@dataclass(frozen=True, slots=True)
class Situation:
    """The pipeline for plain rows, its micro-batches, and the drafter's time for one of them by guesses."""

    measured: Measured
    count: int
    drafting: Line = NOTHING


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of a number of guesses: what a pass commits a row, and how long a step is."""

    rows: int
    trees: Trees
    times: tuple[float, ...]  # s, of each resource
    loop: Seconds
    cycle: Seconds  # of all micro-batches, one after the other, if they are alike

    @property
    def step(self) -> Seconds:
        return max(self.cycle, self.loop)

    @property
    def committed(self) -> float:
        return self.trees.committed

    @property
    def rate(self) -> float:
        return self.trees.committed / self.step

    def loses(self, committed: float, level: Forecast, count: int) -> float:
        """Passes at `level` that one pass of this is worth less, where it commits so many tokens a row.

        In a full pipeline a pack that is longer holds up the others, half of them in simulations; in an
        empty one itself alone.
        """
        held_up = 1 + (count - 1) / 2 * min(1.0, level.cycle / level.loop)
        longer = max((self.loop - level.loop) * held_up, self.step - level.step)
        return longer / level.step - (committed / level.committed - 1)


def forecasts(
    situation: Situation, rows: int, acceptance: Acceptance, levels: Sequence[int]
) -> dict[int, Forecast]:
    """For micro-batches of so many rows, by guesses. Raises: IndexError above `acceptance.most`."""
    committed, sizes, kept = acceptance.committed(), acceptance.sizes(), acceptance.kept
    found = {}
    for level in levels:
        drafting = situation.drafting.by(level) if level else NOTHING
        trees = Trees(sizes[level], kept * sizes[level], committed[level], drafting)
        times = tuple(times_with_trees(situation.measured, rows, trees))
        cycle, loop = situation.count * max(times), sum(times) + situation.measured.latency
        found[level] = Forecast(rows, trees, times, Seconds(loop), Seconds(cycle))
    return found


def together(chosen: Sequence[Forecast]) -> float:
    """Tokens a second of micro-batches that do as is chosen for each, round after round."""
    shared = max(map(sum, zip(*(one.times for one in chosen), strict=True)))
    tokens = sum(one.rows * one.committed for one in chosen)
    return tokens / max(shared, *(one.loop for one in chosen))


@dataclass(frozen=True, slots=True)
class Trial:
    """A pass of another number of guesses than the level's."""

    guesses: int
    of: Forecast
    level: Forecast
    count: int  # of micro-batches


def _tests() -> tuple[Evidence, ...]:
    """One that is quick with large gains, one that is sure of small ones. A change costs nothing by itself:
    it takes less than one of the number of micro-batches."""
    return Evidence(0.02, 0.8), Evidence(0.003, 1.5)


@dataclass(slots=True)
class _State:
    """One micro-batch's."""

    acceptance: Acceptance
    level: int = 0
    found: Mapping[int, Forecast] = field(default_factory=dict)  # as it last was
    turn: int = 0  # then
    evidence: tuple[Evidence, ...] = field(default_factory=_tests)  # for doing other than the others
    account: float = FIRST  # passes that trials may lose
    trial: Trial | None = None


class Speculator:
    """`draft.drafter.Speculation` for a job with one drafter."""

    def __init__(self, situation: Callable[[], Situation | None], most: int = LEVELS[-1]) -> None:
        """`situation` as it is measured now, None while it is not; `most` guesses at most."""
        self._situation = situation
        self._levels = tuple(level for level in LEVELS if level <= most)
        self._most = self._levels[-1]
        self._general = Acceptance(self._most)
        self._states: dict[int, _State] = {}
        self._outcomes: list[Outcome] = []
        self._evidence = _tests()  # for all doing alike
        self._turn = 0
        self._reasons: deque[str] = deque(maxlen=KEPT)

    def guesses(self, micro_batch: int, rows: int) -> int:
        """For each of the `rows` that decode in the micro-batch's next pack; 0: none."""
        situation = self._situation()
        if situation is None or not situation.measured.stages or rows < 1:
            return 0
        state = self._state(micro_batch)
        levels = [level for level in self._levels if level * rows <= TREE_TOKENS]
        found = forecasts(situation, rows, state.acceptance, levels)
        if found[0].step <= 0:
            return 0
        state.level = min(state.level, levels[-1])
        self._turn += 1
        state.found, state.turn = found, self._turn
        if state.acceptance.rows >= KNOWN or self._general.rows >= KNOWN:
            self._look(micro_batch, situation.count)
        return self._trial(state, found, situation.count)

    def saw(self, outcome: Outcome) -> None:
        """A row's, of the micro-batch that `noted` is told of next."""
        self._outcomes.append(outcome)

    def noted(self, micro_batch: int, rows: int, guesses: int, committed: int) -> None:
        """What came of a pack: with that many `guesses` asked for, its rows had `committed` tokens
        together."""
        state = self._state(micro_batch)
        seen, self._outcomes = self._outcomes, []
        if rows < 1:
            return
        state.acceptance.learn(seen)
        self._general.learn(seen)
        state.account = min(state.account + TRIES, MOST_SAVED)
        trial, state.trial = state.trial, None
        if trial is not None and trial.guesses == guesses:
            state.account -= trial.of.loses(committed / rows, trial.level, trial.count)

    def decisions(self) -> tuple[str, ...]:
        """Changes of late with their reasons, and how it is now; the newest last."""
        situation = self._situation()
        if situation is None or not self._states:
            return tuple(self._reasons)
        levels = sorted({state.level for state in self._states.values()})
        now = " and ".join(f"{level}" if level else "no" for level in levels)
        rate = self._general.right()[0]
        return (*self._reasons, f"{now} guesses a row; of first guesses {rate:.0%} are right")

    @property
    def typical(self) -> Trees:
        """What rows are just now, on average over micro-batches."""
        if not self._states:
            return PLAIN
        levels = [state.level for state in self._states.values()]
        sizes, committed = self._general.sizes(), self._general.committed()
        given = sum(sizes[level] for level in levels) / len(levels)
        return Trees(
            given, self._general.kept * given, sum(committed[level] for level in levels) / len(levels)
        )

    def _state(self, micro_batch: int) -> _State:
        """One that is new does as the others."""
        state = self._states.get(micro_batch)
        if state is None:
            newest = max(self._states.values(), key=lambda one: one.turn, default=None)
            level = 0 if newest is None else newest.level
            state = self._states[micro_batch] = _State(Acceptance(self._most, self._general), level)
        return state

    def _look(self, micro_batch: int, count: int) -> None:
        """Add what each change would gain, and make the best that is proven: about once a step whether all
        should do alike, and each time whether this one should do other than they."""
        present = self._present(micro_batch, count)
        levels = [level for level in self._levels if all(level in one.found for one in present.values())]
        now = together([one.found[one.level] for one in present.values()])
        if micro_batch == min(present):
            alike = {level: together([one.found[level] for one in present.values()]) for level in levels}
            best = _proven(self._evidence, alike, now)
            if best is not None and any(one.level != best for one in present.values()):
                whose = "all micro-batches" if len(present) > 1 else f"micro-batch {micro_batch}"
                self._change(whose, self._states[micro_batch], best)
                for one in self._states.values():  # as far as its rows allowed when it last asked
                    one.level = min(best, max(one.found, default=best))
                return
        if len(present) > 1:
            state = self._states[micro_batch]
            others = [one.found[one.level] for number, one in present.items() if number != micro_batch]
            own = {level: together([*others, one]) for level, one in state.found.items()}
            best = _proven(state.evidence, own, now)
            if best is not None and best != state.level:
                self._change(f"micro-batch {micro_batch}", state, best)
                state.level = best

    def _present(self, micro_batch: int, count: int) -> dict[int, _State]:
        """Those that asked lately, of the same resources as this one: a link may have been unknown then."""
        latest, resources = self._turn - PRESENT * count, len(self._states[micro_batch].found[0].times)
        return {
            number: one
            for number, one in self._states.items()
            if one.found and one.turn > latest and len(one.found[0].times) == resources
        }

    def _change(self, whose: str, state: _State, level: int) -> None:
        self._reasons.append(_reason(whose, state.level, level, state.found))
        self._evidence = _tests()
        for one in self._states.values():
            one.evidence = _tests()

    def _trial(self, state: _State, found: dict[int, Forecast], count: int) -> int:
        """The level, or another one for a pass where the account has what that is expected to lose."""
        now = found[state.level]
        others = [level for level in self._candidates(state.level) if level in found]
        state.trial = None
        if not others:
            return state.level
        level = max(others, key=lambda one: found[one].rate)
        other = found[level]
        if state.account < max(0.0, other.loses(other.committed, now, count)):
            return state.level
        state.trial = Trial(level, other, now, count)
        return level

    def _candidates(self, level: int) -> Sequence[int]:
        """What is worth a trial: anything where nothing is guessed, else the next larger number, of whose
        last guesses nothing is known; of smaller numbers each pass tells."""
        larger = [one for one in self._levels if one > level]
        return larger if level == 0 else larger[:1]


def _proven(tests: Sequence[Evidence], rates: Mapping[int, float], now: float) -> int | None:
    """The best of what is better for sure, by its key; None: nothing is."""
    proven = []
    for key, rate in rates.items():
        sure = [test.add(key, math.log(rate / now)) for test in tests]
        if any(sure) and rate > now:
            proven.append(key)
    return max(proven, key=lambda key: rates[key], default=None)


def _reason(whose: str, before: int, after: int, found: Mapping[int, Forecast]) -> str:
    old, new = found[before], found[after]
    change = f"{_named(after)} in place of {_named(before)}" if after else "no guesses any more"
    return (
        f"{whose}: {change}, {new.committed:.2f} tokens a row in {seconds(new.step)} in "
        f"place of {old.committed:.2f} in {seconds(old.step)}"
    )


def _named(level: int) -> str:
    return {0: "none", 1: "1 guess"}.get(level, f"{level} guesses")
