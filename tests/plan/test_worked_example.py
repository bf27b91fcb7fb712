"""The worked example of docs/planning.md, figure by figure."""

from __future__ import annotations

import pytest

from bbquic.plan.breakeven import Way
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import (
    COMMAND,
    AttentionCost,
    Cluster,
    Curve,
    JobShape,
    Layout,
    LinkProfile,
    ModelSizes,
    NodeProfile,
    PlannedStage,
)
from bbquic.plan.cost import MemoryOptions, held_memory
from bbquic.plan.predict import Kind, predict
from bbquic.plan.search import search
from bbquic.units import Bytes, BytesPerSecond, Seconds

NOTHING = Curve(((1, 0.0),))
MODEL = ModelSizes(
    name="example",
    blocks=12,
    hidden=1000,
    intermediate=4000,
    vocabulary=1,
    value_bytes=2,
    block_weights=Bytes(1_000_000_000),
    embed_weights=Bytes(0),
    head_weights=Bytes(0),
    kv_bytes=Bytes(1),
)
JOB = JobShape(sequences=32, prompt=0.0, output=100.0, longest=100.0, slot=112)
MEMORY = MemoryOptions(share=1.0)
LINK = LinkProfile(BytesPerSecond(12.5e6), Seconds(0.020))


def node(name: str, block: float, memory: float) -> NodeProfile:
    attention = AttentionCost(0.0, 0.0, 0.0)
    return NodeProfile(name, Curve(((1, block),)), attention, NOTHING, NOTHING, Bytes(int(memory)))


def cluster() -> Cluster:
    beside = held_memory(MODEL, MEMORY, blocks=8, batch=32, rows=32, slot=112, embeds=True, heads=False)
    home = node("home", 0.002, beside.device)
    names = (COMMAND, "home", "cloud")
    links = {(a, b): LINK for a in names for b in names if a != b}
    return Cluster((home, node("cloud", 0.003, 1e12)), links)


def layout(micro_batches: int, home: int = 8) -> Layout:
    stages = (PlannedStage("home", 0, home), PlannedStage("cloud", home, 12))
    return Layout(stages, 32, micro_batches, (Way.RAW,), "home")


@pytest.mark.parametrize(
    ("micro_batches", "home", "cycle", "loop", "step"),
    [(1, 8, 16.0, 73.3, 73.3), (4, 8, 16.0, 69.3, 69.3), (5, 8, 16.0, 69.1, 80.0), (5, 7, 15.0, 70.1, 75.0)],
)
def test_the_figures_are_those_of_the_text(
    micro_batches: int, home: int, cycle: float, loop: float, step: float
) -> None:
    found = predict(cluster(), MODEL, JOB, layout(micro_batches, home), MEMORY)
    assert found.cycle * 1e3 == pytest.approx(cycle, abs=0.05)
    assert found.loop * 1e3 == pytest.approx(loop, abs=0.15)  # the text leaves out the tokens' own bytes
    assert found.step * 1e3 == pytest.approx(step, abs=0.15)


def test_the_search_finds_what_the_text_finds() -> None:
    options = SearchOptions(memory=MEMORY, nodes=("home", "cloud"), ordered=True, batch=32, at_stage=True)
    plan = search(cluster(), MODEL, JOB, options)
    assert plan.layout == layout(4)
    assert plan.prediction.tokens_per_second == pytest.approx(462, abs=1)
    assert plan.prediction.limit.kind is Kind.LOOP
