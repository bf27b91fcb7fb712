"""Random heterogeneous clusters, the same ones from the same seed: machines in homes and clouds.

Assumed: decode waits for a device's memory, so a block takes its weights over the memory's bandwidth, and
longer where a pack's arithmetic takes longer; a device does FLOPS_A_BYTE operations while it reads a byte.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bbquic.errors import PlanImpossible
from bbquic.plan.breakeven import Way
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import (
    COMMAND,
    AttentionCost,
    Cluster,
    CodecSpeed,
    Curve,
    JobShape,
    LinkProfile,
    ModelSizes,
    NodeProfile,
)
from bbquic.plan.search import search
from bbquic.units import Bytes, BytesPerSecond, Seconds

SEED = 20260801
GB = 1e9
MBIT = 1e6 / 8
FLOPS_A_BYTE = 80.0  # of a device's memory bandwidth; an RTX 4090 has about 160, a laptop 30
ROWS = (1, 8, 32, 128, 512, 2048)  # at which curves have points
SLOWEST, FASTEST = 60 * GB, 1500 * GB  # bytes a second of memory: a laptop to a data centre's card
CODECS = ((Way.H8, 0.75, 2.2e9), (Way.REC, 0.68, 0.35e9))  # size left, bytes/s of a usual machine
NEAR, FAR = 0.005, 0.1  # seconds one way: a city, the other side of the world


def shape(
    name: str, blocks: int, hidden: int, intermediate: int, vocabulary: int, kv_heads: int
) -> ModelSizes:
    """A Llama in bfloat16 with heads of 128."""
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * 128
    ends = 2 * vocabulary * hidden
    return ModelSizes(
        name=name,
        blocks=blocks,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        value_bytes=2,
        block_weights=Bytes(2 * (attention + 3 * hidden * intermediate)),
        embed_weights=Bytes(ends),
        head_weights=Bytes(ends),
        kv_bytes=Bytes(2 * 2 * kv_heads * 128),
    )


MODELS = (
    shape("7B", 32, 4096, 11008, 32000, 32),
    shape("8B", 32, 4096, 14336, 128256, 8),
    shape("13B", 40, 5120, 13824, 32000, 40),
    shape("30B", 60, 6656, 17920, 32000, 52),
    shape("70B", 80, 8192, 28672, 128256, 8),
)
JOBS = (
    JobShape(sequences=1024, prompt=64.0, output=128.0, longest=128.0, slot=256),
    JobShape(sequences=768, prompt=256.0, output=128.0, longest=256.0, slot=640),
    JobShape(sequences=384, prompt=512.0, output=64.0, longest=128.0, slot=896),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What a planner is asked."""

    name: str
    cluster: Cluster
    model: ModelSizes
    job: JobShape


def cases(count: int, seed: int = SEED) -> Iterator[Case]:
    """`count` cases that some layout fits."""
    source = random.Random(seed)
    number = 0
    while number < count:
        case = _case(f"cluster {number}", source)
        if _fits(case):
            number += 1
            yield case


def _fits(case: Case) -> bool:
    options = SearchOptions(batch=1, micro_batches=1)
    try:
        search(case.cluster, case.model, case.job, options)
    except PlanImpossible:
        return False
    return True


def _case(name: str, source: random.Random) -> Case:
    model, job = source.choice(MODELS), source.choice(JOBS)
    nodes = tuple(machine(f"n{number}", model, source) for number in range(source.randint(3, 8)))
    return Case(name, Cluster(nodes, links([node.name for node in nodes], source)), model, job)


def machine(name: str, model: ModelSizes, source: random.Random) -> NodeProfile:
    """Memory 4 to 80 GB; speeds over 25 times; a faster machine usually has more memory, not always."""
    bandwidth = _between(SLOWEST, FASTEST, source)
    place = math.log(bandwidth / SLOWEST) / math.log(FASTEST / SLOWEST)
    spread = min(1.0, max(0.0, place + source.gauss(0, 0.35)))
    return profile(name, model, bandwidth, 4 * GB * 20**spread, _between(0.5, 2.0, source))


def profile(
    name: str, model: ModelSizes, bandwidth: float, memory: float, processor: float = 1.0
) -> NodeProfile:
    """A machine by its memory's bandwidth, bytes a second; `processor`, its codecs' speed in usual ones."""
    flops = bandwidth * FLOPS_A_BYTE
    hidden = 2 * model.hidden * model.value_bytes

    def products(weights: float) -> Curve:
        return Curve(tuple((rows, max(weights / bandwidth, weights * rows / flops) + 2e-5) for rows in ROWS))

    return NodeProfile(
        name=name,
        mlp=products(model.block_weights),
        attention=AttentionCost(2e-5, hidden / bandwidth, model.kv_bytes / bandwidth),
        embed=Curve(((1, 1e-5), (512, 1e-5 + 512 * hidden / bandwidth))),
        head=products(model.head_weights),
        memory=Bytes(int(memory)),
        overhead=Seconds(1e-3),
        codecs={
            way: CodecSpeed(ratio, 1 / (speed * processor), 0.7 / (speed * processor))
            for way, ratio, speed in CODECS
        },
    )


def links(names: list[str], source: random.Random) -> dict[tuple[str, str], LinkProfile]:
    """Sites on a map: delay by distance, NEAR to FAR; a site's lines are 20 to 500 Mbit/s, a home's way up
    slower than its way down; a link has what the narrower end leaves, less a little."""
    sites = {name: (source.random(), source.random()) for name in (COMMAND, *names)}
    down = {name: _between(50, 500, source) for name in sites}
    up = {
        name: rate if source.random() < 0.5 else max(20.0, rate * _between(0.2, 1.0, source))
        for name, rate in down.items()
    }
    found = {}
    for a, (ax, ay) in sites.items():
        for b, (bx, by) in sites.items():
            if a != b:
                delay = NEAR + (FAR - NEAR) * math.hypot(ax - bx, ay - by) / math.sqrt(2)
                rate = max(20.0, min(up[a], down[b]) * source.uniform(0.8, 1.0))
                found[a, b] = LinkProfile(BytesPerSecond(rate * MBIT), Seconds(delay))
    return found


def _between(low: float, high: float, source: random.Random) -> float:
    """Even in its logarithm."""
    return math.exp(source.uniform(math.log(low), math.log(high)))
