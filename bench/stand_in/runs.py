"""What a replay asks of an experiment: the paper's batch by M, M = 1 against 2, the free batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bbquic.units import BytesPerSecond, Seconds
from bench.common import median
from bench.stand_in.bounds import Pipeline, best_micro_batches, possible
from bench.stand_in.cell import Cell, CodecName, Measured, measure
from bench.stand_in.cluster import Cluster
from bench.stand_in.cost import StandIn
from bench.stand_in.observed import Passed
from bench.stand_in.paper import Experiment

CHOICES = (1, 2, 4, 8)  # micro-batches of the paper's batch
FREE_CHOICES = (1, 2, 4, 8, 16)
DTYPE = "float16"  # as the paper's messages

# The free batch is the largest whose steps the bench can wait for. Over a link that is never idle, tokens/s
# hardly depend on the batch beyond that.
LONGEST_FREE_STEP = Seconds(4.0)


@dataclass(frozen=True, slots=True)
class Size:
    """Passes of each micro-batch in a run, not counted and counted, and pairs of runs."""

    warm_up: int = 3
    counted: int = 10
    pairs: int = 7
    free_warm_up: int = 2
    free_counted: int = 3


@dataclass(frozen=True, slots=True)
class Run:
    """A cell that ran, beside its bound."""

    experiment: Experiment
    pipeline: Pipeline
    cell: Cell
    measured: Measured
    passes: Sequence[Passed]

    @property
    def bound(self) -> Seconds:
        return self.pipeline.step(self.cell.batch, self.cell.micro_batches)

    @property
    def ratio(self) -> float:
        """The measured step over its bound."""
        return self.measured.step / self.bound


class Replay:
    """An experiment on a cluster whose links are as the experiment wants them."""

    def __init__(self, cluster: Cluster, experiment: Experiment, rate: BytesPerSecond, size: Size) -> None:
        """`rate` is the link's, in bytes of IP packets a second."""
        self.experiment = experiment
        self.pipeline = experiment.pipeline(rate)
        self._cluster = cluster
        self._size = size

    @property
    def best(self) -> int:
        """The M with the shortest bound."""
        return best_micro_batches(self.pipeline, self.experiment.batch, CHOICES)

    def neighbours(self) -> list[int]:
        """M = 1, the best and those beside it."""
        near = {1, self.best // 2, self.best, self.best * 2}
        return sorted(near & set(CHOICES))

    def run(self, micro_batches: int, codec: CodecName = "raw") -> Run:
        """The paper's batch. Bounds are those of raw messages."""
        size = self._size
        return self._run(self.experiment.batch, micro_batches, size.warm_up, size.counted, codec)

    def pairs(self) -> list[tuple[Run, Run]]:
        """M = 1 and M = 2 in turn."""
        return [(self.run(1), self.run(2)) for _ in range(self._size.pairs)]

    def free(self) -> FreeRun:
        """The batch that memory for KV allows, or that the bench can wait for."""
        whole = self.experiment.free_batch()
        batch, micro_batches = self._affordable(whole)
        run = self._run(batch, micro_batches, self._size.free_warm_up, self._size.free_counted)
        return FreeRun(run, whole, _best_rate(self.pipeline, whole))

    def _affordable(self, batch: int) -> tuple[int, int]:
        """The batch, cut to what fits packs and `LONGEST_FREE_STEP`, and its best M."""
        while True:
            fitting = [m for m in FREE_CHOICES if possible(self.pipeline, batch, m)]
            if fitting:
                best = best_micro_batches(self.pipeline, batch, fitting)
                if self.pipeline.step(batch, best) <= LONGEST_FREE_STEP:
                    return batch, best
            batch = batch * 19 // 20
            assert batch, "one sequence alone takes longer than the bench waits"

    def _run(
        self, batch: int, micro_batches: int, warm_up: int, counted: int, codec: CodecName = "raw"
    ) -> Run:
        rows = -(-batch // micro_batches)
        cell = Cell(
            blocks=self.experiment.blocks,
            stand_in=StandIn(self.experiment.hidden, self.pipeline.cost, rows),
            dtype=DTYPE,
            batch=batch,
            micro_batches=micro_batches,
            warm_up=warm_up,
            counted=counted,
            codec=codec,
        )
        passes = self._cluster.run(cell)
        return Run(self.experiment, self.pipeline, cell, measure(cell, passes), passes)


@dataclass(frozen=True, slots=True)
class FreeRun:
    """A run of the free batch. `allowed` is what memory holds, `allowed_rate` its bound's tokens/s."""

    run: Run
    allowed: int
    allowed_rate: float

    @property
    def is_cut(self) -> bool:
        return self.run.cell.batch < self.allowed

    @property
    def share(self) -> float:
        """Measured tokens/s over the most that any M could give at the batch that ran."""
        return self.run.measured.tokens_per_second / _best_rate(self.run.pipeline, self.run.cell.batch)


def _best_rate(pipeline: Pipeline, batch: int) -> float:
    """Tokens/s of the best M that the protocol's limits allow; with packs of any size where none does."""
    fitting = [m for m in FREE_CHOICES if possible(pipeline, batch, m)] or list(FREE_CHOICES)
    return max(pipeline.tokens_per_second(batch, m) for m in fitting)


def cost_of_two(pairs: Sequence[tuple[Run, Run]]) -> dict[str, float]:
    """Share of tokens/s lost by M = 2 against M = 1: median of the pairs, and the least and largest, between
    which the true median lies with 98 % where there are seven."""
    lost = [1 - one.measured.step / two.measured.step for one, two in pairs]
    return {"min": min(lost), "median": median(lost), "max": max(lost)}
