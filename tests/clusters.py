"""Clusters, models and jobs in round figures, and random ones, for tests of planning."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from bbquic.plan.breakeven import Way
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
from bbquic.units import Bytes, BytesPerSecond, Seconds


def small_model(blocks: int = 4, *, tied: bool = False) -> ModelSizes:
    """Weights of 1,000 bytes a block, KV of 10 a token; hidden states of 200 bytes."""
    return ModelSizes(
        name="small",
        blocks=blocks,
        hidden=100,
        intermediate=10,
        vocabulary=10,
        value_bytes=2,
        block_weights=Bytes(1000),
        embed_weights=Bytes(400),
        head_weights=Bytes(500),
        kv_bytes=Bytes(10),
        tied=tied,
    )


def simple_node(name: str, *, block: float = 0.01, memory: int = 10**9, **more: object) -> NodeProfile:
    """`block` seconds a block and pack, whatever is in it."""
    figures: dict[str, object] = {
        "mlp": Curve(((1, block),)),
        "attention": AttentionCost(0.0, 0.0, 0.0),
        "embed": Curve(((1, 0.0),)),
        "head": Curve(((1, 0.0),)),
        "memory": Bytes(memory),
    }
    return NodeProfile(name=name, **(figures | more))  # type: ignore[arg-type]


def link(rate: float = 1e6, delay: float = 0.0) -> LinkProfile:
    return LinkProfile(BytesPerSecond(rate), Seconds(delay))


def mesh(
    nodes: tuple[NodeProfile, ...],
    rate: float = 1e6,
    delay: float = 0.0,
    other: Mapping[tuple[str, str], LinkProfile | None] | None = None,
) -> Cluster:
    """Every node and the command joined by like links, but for `other` ones; None: that one is missing."""
    names = [COMMAND, *(node.name for node in nodes)]
    links: dict[tuple[str, str], LinkProfile | None] = {
        (a, b): link(rate, delay) for a in names for b in names if a != b
    }
    links |= other or {}
    return Cluster(nodes, {pair: one for pair, one in links.items() if one is not None})


def random_node(random: Random, name: str, *, memory: tuple[int, int] = (12_000, 50_000)) -> NodeProfile:
    speed = 10 ** random.uniform(-1, 1)
    offloads = random.random() < 0.5
    beside = Random(speed)  # what came later changes none of the rest
    curve = Curve(((1, 0.001 * speed), (4, 0.0015 * speed), (16, 0.004 * speed)))
    attention = AttentionCost(0.0002 * speed, 0.00005 * speed, 2e-6 * speed)
    speeds = {
        way: CodecSpeed(random.uniform(0.6, 0.9), random.uniform(0, 3e-7), random.uniform(0, 3e-7))
        for way in (Way.H8, Way.REC)
        if random.random() < 0.7
    }
    return NodeProfile(
        name=name,
        mlp=curve,
        attention=attention,
        embed=Curve(((1, 0.0001 * speed),)),
        head=Curve(((1, 0.0005 * speed), (8, 0.002 * speed))),
        memory=Bytes(random.randint(*memory)),
        overhead=Seconds(random.uniform(0, 0.001)),
        attention_host=AttentionCost(0.001 * speed, 0.0005 * speed, 1e-5 * speed) if offloads else None,
        host_memory=Bytes(random.randint(0, 20_000) if offloads else 0),
        offloads=offloads,
        host_beside=beside.random() < 0.5,
        attention_prompt=beside.choice([None, AttentionCost(1e-4, 2e-5 * speed, 1e-6 * speed)]),
        to_host=BytesPerSecond(random.uniform(1e6, 1e8)) if random.random() < 0.5 else None,
        to_device=BytesPerSecond(random.uniform(1e6, 1e8)) if random.random() < 0.5 else None,
        codecs=speeds,
        price=random.choice([None, 0.5, 2.0]),
    )


def random_cluster(random: Random, count: int, *, missing: float = 0.1) -> Cluster:
    """Nodes of unlike speed and memory, links of unlike rate and distance, some of them missing."""
    nodes = tuple(random_node(random, f"n{number}") for number in range(count))
    names = [COMMAND, *(node.name for node in nodes)]
    links = {
        (a, b): link(10 ** random.uniform(4, 7), random.uniform(0, 0.03))
        for a in names
        for b in names
        if a != b and random.random() > missing
    }
    return Cluster(nodes, links)


def small_job(sequences: int = 8, *, prompt: float = 4, output: float = 8, slot: int = 20) -> JobShape:
    return JobShape(sequences, prompt, output, longest=2 * output, slot=slot)
