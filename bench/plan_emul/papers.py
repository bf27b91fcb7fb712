"""The paper's tables predicted from its own inputs, by its equations and by the circulating model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from bbquic.plan.breakeven import Way
from bbquic.plan.build import Setting, circulating, pipeline, serial
from bbquic.plan.cluster import (
    COMMAND,
    AttentionCost,
    Cluster,
    Curve,
    JobShape,
    LinkProfile,
    ModelSizes,
    NodeProfile,
)
from bbquic.plan.cost import MemoryOptions
from bbquic.plan.instance import Instance, Objective, evaluate
from bbquic.units import Bytes, BytesPerSecond
from bench.stand_in.cost import FIXED_SHARE
from bench.stand_in.paper import ENVIRONMENTS, MODELS, Experiment, experiment

MICRO_BATCHES = 2  # of 16 rows: the paper's


@dataclass(frozen=True, slots=True)
class Row:
    """Steps in seconds: the paper's, without and with micro-batches (nan: not published), and predictions."""

    name: str
    published: float
    published_two: float
    equation_1: float
    equation_4: float
    circulating_one: float
    circulating_two: float

    def __str__(self) -> str:
        one, two = self.published, self.published_two
        return (
            f"{self.name}: {one * 1e3:.0f} ms published; eq. 1 {_against(self.equation_1, one)}, circulating "
            f"{_against(self.circulating_one, one)} | M=2 {_shown(two)} published; eq. 4 "
            f"{_against(self.equation_4, two)}, circulating {_against(self.circulating_two, two)}"
        )


def _against(predicted: float, published: float) -> str:
    error = "" if math.isnan(published) else f" ({predicted / published - 1:+.0%})"
    return f"{predicted * 1e3:.0f}{error}"


def _shown(seconds: float) -> str:
    return "not" if math.isnan(seconds) else f"{seconds * 1e3:.0f} ms"


def tables() -> Iterator[Row]:
    for name in MODELS:
        for environment in ENVIRONMENTS:
            yield row(experiment(name, environment))


def row(e: Experiment) -> Row:
    """One experiment: computes as published, links as stated with the delays that its tables imply."""
    cluster, model = _cluster(e), _model(e)

    def step(instance: Instance, objective: Objective) -> float:
        return evaluate(instance, objective, tuple(range(len(e.blocks))), e.blocks).value

    def ours(micro_batches: int) -> float:
        job = JobShape(e.batch, prompt=0, output=128, longest=128, slot=128)
        setting = Setting(e.batch, micro_batches, at_stage=True, ways=(Way.RAW,))
        return step(circulating(cluster, model, job, setting, MemoryOptions()), Objective.CIRCULATING)

    return Row(
        e.name,
        e.paper_step,
        e.batch / e.paper_tokens_per_s_microbatch,
        step(serial(cluster, model, e.batch, 0), Objective.SUM),
        step(pipeline(cluster, model, e.batch, MICRO_BATCHES, 0), Objective.PIPELINE),
        ours(1),
        ours(MICRO_BATCHES),
    )


def _cluster(e: Experiment) -> Cluster:
    names = [f"n{number}" for number in range(len(e.blocks))]
    zero = Curve(((0, 0.0),))
    nodes = tuple(
        NodeProfile(
            name,
            mlp=Curve(((0, FIXED_SHARE * e.compute / blocks), (e.batch, e.compute / blocks))),
            attention=AttentionCost(0.0, 0.0, 0.0),
            embed=zero,
            head=zero,
            memory=Bytes(10**12),
        )
        for name, blocks in zip(names, e.blocks, strict=True)
    )
    link = LinkProfile(BytesPerSecond(e.rate_mbps * 1e6 / 8), e.delay)
    return Cluster(nodes, dict.fromkeys(permutations((*names, COMMAND), 2), link))


def _model(e: Experiment) -> ModelSizes:
    nothing = Bytes(0)
    return ModelSizes(
        e.model, sum(e.blocks), e.hidden, 4 * e.hidden, 32000, 2, nothing, nothing, nothing, Bytes(1)
    )
