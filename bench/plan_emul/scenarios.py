"""The scenes in which planners choose. Rates of E6 are the paper's; computes and delays are assumed."""

from __future__ import annotations

from collections.abc import Sequence

from bbquic.plan.cluster import JobShape
from bench.plan_emul.scene import HOME, Pair, Scene, joined, machine, model
from bench.stand_in.paper import KV_SHAPES, tables
from bench.wan import Link

JOB = JobShape(sequences=64, prompt=0, output=64, longest=64, slot=256)
E6_DELAYS = {frozenset({"ca", "nj"}): 35.0, frozenset({"ca", "can"}): 38.0, frozenset({"nj", "can"}): 8.0}
# LLaMA-30B's 41.45 ms for 20 blocks, as the paper has it over three states; the A100 reads its memory at
# twice the speed of an RTX 4090, which is what bounds decoding.
E6_BLOCK_MS = {"ca": 1.04, "nj": 2.07, "can": 2.07}
E6_MEMORY_GB = {"ca": 40.0, "nj": 24.0, "can": 24.0}


def e6() -> Scene:
    """California, New Jersey and Canada, on the paper's table 3; LLaMA-30B, which no one of them holds."""
    rates = tables()["e6"]["mbps"]
    links: dict[Pair, Link] = {}
    for pair, rate in rates.items():
        source, target = pair.split("-")
        links[source, target] = Link(rate_mbps=rate, delay_ms=E6_DELAYS[frozenset({source, target})])
    heads, size = KV_SHAPES["llama_30b"]
    sizes = model("llama_30b", 60, 6656, block_mb=1065, kv_bytes=4 * heads * size, ends_mb=426)
    nodes = [machine(name, E6_BLOCK_MS[name], memory_gb=E6_MEMORY_GB[name]) for name in E6_BLOCK_MS]
    job = JobShape(sequences=64, prompt=0, output=64, longest=64, slot=128)
    return Scene("e6", sizes, tuple(nodes), {**links, **_homes(nodes[1].name, E6_BLOCK_MS)}, job)


def _homes(near: str, names: Sequence[str] | dict[str, float]) -> dict[Pair, Link]:
    """The command sits at one of the nodes' places, on a line of its own."""
    return joined(*((HOME, name, 100, 5 if name == near else 40) for name in names))


def slow_node() -> Scene:
    """Three like nodes and one ten times as slow: whoever gives it blocks waits for it."""
    names = ("a", "b", "c", "d")
    nodes = tuple(machine(name, 15.0 if name == "b" else 1.5, memory_gb=7) for name in names)
    links = joined(*((one, other, 100, 15) for one in names for other in names if one < other))
    sizes = model("slow", 32, 4096, block_mb=400, kv_bytes=4096, ends_mb=260)
    return Scene("slow_node", sizes, nodes, {**links, **_homes("a", names)}, JOB)


def far_memory() -> Scene:
    """One node could hold the whole model, but is slow and behind a slow link."""
    nodes = (
        machine("a", 1.5, memory_gb=11),
        machine("big", 5.0, memory_gb=64),
        machine("c", 1.5, memory_gb=11),
    )
    links = joined(("a", "c", 100, 15), ("a", "big", 20, 40), ("c", "big", 20, 40))
    sizes = model("far", 32, 4096, block_mb=400, kv_bytes=4096, ends_mb=260)
    return Scene("far_memory", sizes, nodes, {**links, **_homes("a", ("a", "big", "c"))}, JOB)


def two_clouds() -> Scene:
    """Two nodes in clouds, well joined, and three in homes behind their lines; the clouds do not suffice."""
    homes = {"h1": (2.0, 30.0, 15.0), "h2": (3.0, 20.0, 25.0), "h3": (5.0, 50.0, 12.0)}  # ms, Mbit/s, ms
    nodes = (
        machine("c1", 1.0, memory_gb=8),
        machine("h1", homes["h1"][0], memory_gb=8),
        machine("c2", 1.2, memory_gb=8),
        machine("h2", homes["h2"][0], memory_gb=10),
        machine("h3", homes["h3"][0], memory_gb=12),
    )
    links = joined(("c1", "c2", 200, 10))
    for home, (_, up, delay) in homes.items():
        for cloud in ("c1", "c2"):
            links[home, cloud] = Link(rate_mbps=up, delay_ms=delay)
            links[cloud, home] = Link(rate_mbps=4 * up, delay_ms=delay)
        for other, (_, _, more) in homes.items():
            if other != home:
                links[home, other] = Link(rate_mbps=up, delay_ms=delay + more)
    sizes = model("clouds", 40, 4096, block_mb=400, kv_bytes=4096, ends_mb=260)
    return Scene("two_clouds", sizes, nodes, {**links, **_homes("h1", [node.name for node in nodes])}, JOB)


def all_scenarios() -> tuple[Scene, ...]:
    return e6(), slow_node(), far_memory(), two_clouds()


def far_command() -> Scene:
    """Two nodes near one another, neither of which holds all, and the command 80 ms from both."""
    links = joined(("a", "b", 100, 10), (HOME, "a", 50, 80), (HOME, "b", 50, 80))
    sizes = model("place", 24, 4096, block_mb=400, kv_bytes=4096)
    nodes = (machine("a", 1.5, memory_gb=7), machine("b", 1.5, memory_gb=7))
    return Scene("far_command", sizes, nodes, links, JOB)
