"""One run of a replay: what to run, and what its passes tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bbquic.units import Seconds
from bench.common import median
from bench.stand_in.cost import CostTable, StandIn
from bench.stand_in.observed import Passed

# The last passes of a micro-batch are not counted: others may have ended, and the pipeline run empty.
TAIL = 2


CodecName = Literal["auto", "raw", "H8", "REC"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A pipeline of stand-ins and its load: `batch` sequences of `steps` tokens, not all of which count.

    Raises: ValueError where hosts or costs are not one a stage.
    """

    blocks: tuple[int, ...]  # of each stage
    stand_in: StandIn
    dtype: str
    batch: int
    micro_batches: int
    warm_up: int
    counted: int
    codec: CodecName = "raw"  # raw: what the bounds are made for
    hosts: tuple[str, ...] = ()  # of each stage; none: the cluster's first ones
    costs: tuple[CostTable, ...] = ()  # of each stage; none: each has the stand-in's own
    longest: float | None = None  # seconds after which a run is ended, whatever its steps
    most: int | None = (
        None  # micro-batches that a live job may go up to from `micro_batches`; none: they stay
    )
    guesses: int = 0  # of each row, at most where `adapts`: then as many as pay
    adapts: bool = False
    answer: int | None = None  # tokens; none: one a step

    def __post_init__(self) -> None:
        for given in (self.hosts, self.costs):
            if given and len(given) != len(self.blocks):
                raise ValueError(f"{len(given)} hosts or costs for {len(self.blocks)} stages")

    @property
    def tokens(self) -> int:
        """Of an answer, at most."""
        return self.answer or self.steps

    @property
    def steps(self) -> int:
        return self.warm_up + self.counted + TAIL

    def stand_ins(self) -> tuple[StandIn, ...]:
        """What each stage pretends to be."""
        return tuple(replace(self.stand_in, cost=cost) for cost in self.costs) or (
            (self.stand_in,) * len(self.blocks)
        )


@dataclass(frozen=True, slots=True)
class Accounting:
    """Median seconds of each part of a step; `hop_1` leads to stage 1, the last one to the coordinator."""

    parts: dict[str, float]
    step: Seconds  # median, of the same passes

    @property
    def total(self) -> Seconds:
        return Seconds(sum(self.parts.values()))

    @property
    def error(self) -> float:
        """Share of the step by which its parts miss it."""
        return abs(self.total / self.step - 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell's figures."""

    step: Seconds  # median time between a sequence's tokens
    steps: tuple[float, ...]
    tokens_per_second: float  # of the counted time as a whole
    accounting: Accounting


def measure(cell: Cell, passes: Sequence[Passed]) -> Measured:
    """Figures of a run. A step lasts from a micro-batch's tokens to its next ones."""
    steps: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    rate = 0.0
    for following in _by_micro_batch(cell, passes).values():
        before, counted = following[cell.warm_up - 1], following[cell.warm_up : cell.warm_up + cell.counted]
        took = counted[-1].received - before.received
        rate += sum(one.tokens for one in counted) / took
        for after in counted:
            steps.append(after.received - before.received)
            for name, seconds in _parts(before, after).items():
                parts[name].append(seconds)
            before = after
    accounting = Accounting({name: median(values) for name, values in parts.items()}, Seconds(median(steps)))
    return Measured(accounting.step, tuple(steps), rate, accounting)


def tokens_between(passes: Sequence[Passed], began: float, ended: float) -> float:
    """Tokens a second that came back between two moments of the hosts' clock."""
    return sum(one.tokens for one in passes if began <= one.received < ended) / (ended - began)


def _by_micro_batch(cell: Cell, passes: Sequence[Passed]) -> dict[int, list[Passed]]:
    """Raises: AssertionError where a micro-batch has not every pass that the cell asked for."""
    found: dict[int, list[Passed]] = defaultdict(list)
    for one in passes:
        found[one.micro_batch].append(one)
    assert len(found) == cell.micro_batches, f"{sorted(found)} of {cell.micro_batches} micro-batches ran"
    for micro_batch, following in found.items():
        following.sort(key=lambda one: one.step)
        assert len(following) >= cell.steps, (
            f"micro-batch {micro_batch}: {len(following)} of {cell.steps} passes"
        )
    return found


def _parts(before: Passed, after: Passed) -> dict[str, float]:
    """Where the time between two tokens of a micro-batch went, from the notes of all that it passed.

    Moments of different hosts are compared as they are: on one machine the hosts share a clock.
    """
    parts = {"coordinator": after.sent - before.received}
    left = after.sent
    for place, timing in enumerate(after.timings, 1):
        parts[f"hop_{place}"] = timing.arrived - left
        for name, seconds in timing.parts._asdict().items():
            parts[name] = parts.get(name, 0.0) + seconds
        left = timing.arrived + timing.parts.total
    parts[f"hop_{len(after.timings) + 1}"] = after.received - left
    return parts
