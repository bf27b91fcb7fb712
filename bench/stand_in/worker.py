"""A stage that computes nothing: it waits as long as its cost table says and sends recorded activations."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

from bbquic.errors import PlanRefused
from bbquic.runtime.device import now
from bbquic.runtime.placement import PLAIN, Placement
from bbquic.runtime.protocol import PackHeader, PlanHeader, Stage
from bbquic.runtime.sequence import TextStreamFactory
from bbquic.runtime.stage import Computed, Output, Staged, StageWorker
from bbquic.runtime.trees import onward, verdicts
from bbquic.units import Bytes
from bench.stand_in.activations import SHORT, Pool
from bench.stand_in.bounds import BYTES_PER_VALUE
from bench.stand_in.coordinator import NoText
from bench.stand_in.cost import MODEL, StandIn
from bench.stand_in.guesses import GUESSED, OTHER


class Timer:
    """Waits without using the processor, and learns by how much the system wakes it late."""

    SHARE = 0.1  # of a new overshoot in the estimate
    MOST = 1e-3  # seconds; a longer overshoot is a busy machine, which no estimate foresees

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._overshoot = 0.0  # seconds, exponentially averaged

    def wait(self, seconds: float, since: float) -> None:
        """Return `seconds` after `since` (a moment of the clock), on average."""
        began = self._clock()
        asked = since + seconds - self._overshoot - began
        if asked <= 0:
            return
        self._sleep(asked)
        late = min(self._clock() - began - asked, self.MOST)
        self._overshoot += self.SHARE * (late - self._overshoot)


class StandInWorker:
    """One stage's stand-in. Its tokens end no answer; guesses are right as often as it pretends."""

    def __init__(self, stage: Stage, pool: Pool, pretends: StandIn, *, embeds: bool, heads: bool) -> None:
        self.stage = stage
        self._pool = pool
        self._cost = pretends.cost
        self._accepts = pretends.accepts
        self._random = Random(pretends.seed)
        self._embeds = embeds
        self._heads = heads
        self._timer = Timer()

    @property
    def weights_bytes(self) -> Bytes:
        return Bytes(0)

    @property
    def arena_bytes(self) -> Bytes:
        """It stores no keys."""
        return Bytes(0)

    def body_length(self, pack: PackHeader) -> int:
        return 0 if self._embeds else pack.token_count * self._pool.hidden * BYTES_PER_VALUE

    def is_light_in(self, pack: PackHeader) -> bool:
        """Never, as on a GPU: each lane has its thread."""
        return False

    def is_light_out(self, pack: PackHeader) -> bool:
        return False

    def stage_in(self, pack: PackHeader, body: bytes | memoryview, placement: Placement = PLAIN) -> Staged:
        moment = now()
        return Staged(None, moment)

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[Any, ...] = ()) -> Computed:
        began = now()
        self._timer.wait(self._cost(pack.token_count), began.at)
        return Computed(None, began, now())

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output:
        """A view of the pool, or tokens: nothing is copied."""
        if self._heads:
            tokens, paths = verdicts(pack, self._chosen)
            return Output(tokens, b"", now().at, paths)
        hidden = self._pool.next_slice(onward(pack).token_count).reshape(-1).view("u1").data
        return Output(None, hidden, now().at)

    def _chosen(self, place: int) -> int:
        return GUESSED if self._random.random() < self._accepts else OTHER

    def relieve(self) -> str:
        return "it holds nothing that it could give up"


class StandInLoader:
    """Makes stand-ins from plans; keeps the pool of activations for the next plan of the same size."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    @property
    def held_bytes(self) -> Bytes:
        return Bytes(self._pool.nbytes if self._pool is not None else 0)

    def load(self, plan: PlanHeader, stage: Stage, report: Callable[[str], None]) -> StageWorker:
        """Raises: PlanRefused for a plan of a real model, or in a dtype that was not recorded."""
        if plan.model != MODEL or plan.dtype not in SHORT:
            raise PlanRefused(f"a stand-in has no model {plan.model} in {plan.dtype}")
        wanted = StandIn.of_config(plan.manifest.config)
        pool = self._pool
        if (
            pool is None
            or (pool.dtype, pool.hidden) != (plan.dtype, wanted.hidden)
            or (pool.most_rows < wanted.most_rows)
        ):
            report("widening activations")
            pool = self._pool = Pool(plan.dtype, wanted.hidden, wanted.most_rows)
        embeds, heads = stage == plan.stages[0], stage == plan.stages[-1]
        return StandInWorker(stage, pool, wanted, embeds=embeds, heads=heads)

    def text(self, plan: PlanHeader, report: Callable[[str], None]) -> TextStreamFactory:
        return NoText
