"""`bbquic plan`: what it prints, what it takes for a change, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from bbquic.cli.draw_plan import Alternative, plan_document, plan_lines
from bbquic.cli.main import app
from bbquic.cli.plan import alternative, parse_what_if
from bbquic.errors import ConfigError
from bbquic.plan.candidates import SearchOptions
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
from bbquic.runtime.planning import Question
from bbquic.units import Bytes, BytesPerSecond, Seconds

MODEL = ModelSizes(
    name="twelve",
    blocks=12,
    hidden=1024,
    intermediate=2816,
    vocabulary=32000,
    value_bytes=2,
    block_weights=Bytes(100_000_000),
    embed_weights=Bytes(65_000_000),
    head_weights=Bytes(65_000_000),
    kv_bytes=Bytes(4096),
)
JOB = JobShape(sequences=64, prompt=50.0, output=50.0, longest=80.0, slot=128)


def node(name: str, per_block: float, memory: float) -> NodeProfile:
    return NodeProfile(
        name=name,
        mlp=Curve(((1, per_block), (64, 2 * per_block))),
        attention=AttentionCost(0.0, 0.0, 0.0),
        embed=Curve(((1, 0.0),)),
        head=Curve(((1, 0.001),)),
        memory=Bytes(int(memory * 1e9)),
        price=0.5 if name == "cloud" else None,
    )


def question(**changes: object) -> Question:
    nodes = (node("home", 0.004, 1.2), node("cloud", 0.001, 1.0), node("slow", 0.5, 1.0))
    names = [COMMAND, *(one.name for one in nodes)]
    link = LinkProfile(BytesPerSecond(12.5e6), Seconds(0.02))
    cluster = Cluster(nodes, {(a, b): link for a in names for b in names if a != b})
    asked = Question(cluster, MODEL, JOB, SearchOptions(), "float16", ("home has a note",))
    return replace(asked, **changes)  # type: ignore[arg-type]  # fields by name


def test_a_plan_says_who_holds_what_how_fast_and_why() -> None:
    asked = question()
    plan = asked.answer()
    text = "\n".join(plan_lines(asked, plan, asked.explain(plan)))
    for words in (
        "twelve in float16, 12 blocks, on 2 of 3 nodes",
        "blocks 0-",
        "tokens/s generated",
        "limit: ",
    ):
        assert words in text
    assert "left out: slow: with it the job would take" in text
    assert "dollars a million generated tokens" in text
    assert "note: home has a note" in text


def test_the_document_is_json_and_has_the_same_figures() -> None:
    asked = question()
    plan = asked.answer()
    others = (Alternative("without=cloud", None, "does not fit"),)
    document = json.loads(
        json.dumps(plan_document(asked, plan, asked.explain(plan), others), allow_nan=False)
    )
    assert [stage["node"] for stage in document["plan"]["stages"]] == list(plan.layout.nodes)
    assert document["plan"]["predicted"]["step"] == plan.prediction.step
    assert document["what_if"] == [{"change": "without=cloud", "plan": None, "trouble": "does not fit"}]


def test_what_is_on_hosts_is_in_the_table_of_stages_and_in_the_document() -> None:
    asked = question(options=SearchOptions(memory=MemoryOptions(offload=0.5)))
    plan = asked.answer()
    half = plan.layout.batch // 2
    lines = plan_lines(asked, plan, asked.explain(plan))
    assert any(f"KV of {half} sequences (α 0.50) on the host" in line for line in lines)
    stage = plan_document(asked, plan, asked.explain(plan))["plan"]["stages"][0]
    assert (stage["offloaded"], stage["alpha"]) == (half, 0.5)


@pytest.mark.parametrize("share", ["-0.1", "1.1", "half"])
@pytest.mark.parametrize("command", [["plan"], ["generate", __file__]])
def test_a_share_that_is_none_is_refused(command: list[str], share: str) -> None:
    refused = CliRunner().invoke(app, [*command, "--offload", share])
    assert refused.exit_code == 2
    assert "--offload" in refused.output


@pytest.mark.parametrize(
    "text",
    ["", "faster", "link=home", "link=home:cloud", "link=home:cloud:0", "link=home:cloud:x", "link=::5",
     "link=home:cloud:inf", "without=", "add="],
)  # fmt: skip
def test_what_is_no_change_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a change") as caught:
        parse_what_if(text)
    assert "link=" in str(caught.value.hint)


def test_a_faster_link_a_missing_and_a_further_node_change_the_plan() -> None:
    asked = question()
    plan = asked.answer()
    hop = plan.layout.nodes[:2]
    faster = alternative("l", parse_what_if(f"link={hop[0]}:{hop[1]}:1000"), asked)
    fewer = alternative("w", parse_what_if("without=cloud"), asked)
    more = alternative("a", parse_what_if("add=cloud"), asked)
    assert faster.plan is not None
    assert faster.plan.prediction.steady_time <= plan.prediction.steady_time
    assert fewer.plan is not None
    assert fewer.plan.prediction.steady_time > plan.prediction.steady_time
    assert more.plan is not None
    assert more.plan.prediction.steady_time < plan.prediction.steady_time


@pytest.mark.parametrize("text", ["link=home:nobody:5", "without=nobody", "add=nobody"])
def test_a_change_of_what_is_not_there_keeps_the_plan_and_says_why(text: str) -> None:
    found = alternative(text, parse_what_if(text), question())
    assert found.plan is None
    assert "nobody" in str(found.trouble)
