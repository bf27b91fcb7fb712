"""The simulation: it equals the formulas where these are exact, loses nothing, and sees no future."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.plan.breakeven import Way
from bbquic.plan.build import WAYS, Setting, circulating
from bbquic.plan.cluster import (
    COMMAND,
    AttentionCost,
    Cluster,
    CodecSpeed,
    Curve,
    JobShape,
    Layout,
    LinkProfile,
    ModelSizes,
    NodeProfile,
    PlannedStage,
)
from bbquic.plan.controller import Line as LineOf
from bbquic.plan.cost import Load, MemoryOptions, circulating_step
from bbquic.plan.decider import LAG, Decision, Seen
from bbquic.plan.instance import place_of
from bbquic.plan.line import Line
from bbquic.plan.predict import predict
from bbquic.plan.simulate import simulate_steps
from bbquic.plan.simulate_job import JobOptions, simulate_job
from bbquic.plan.speculation import Trees
from bbquic.plan.varying import Conditions, Varying
from bbquic.units import Bytes, BytesPerSecond, Seconds

MBIT = 1e6 / 8
MODEL = ModelSizes(
    name="small",
    blocks=12,
    hidden=1024,
    intermediate=4096,
    vocabulary=32000,
    value_bytes=2,
    block_weights=Bytes(1 << 20),
    embed_weights=Bytes(1 << 20),
    head_weights=Bytes(1 << 20),
    kv_bytes=Bytes(1024),
)
JOB = JobShape(sequences=1000, prompt=100.0, output=50.0, longest=50.0, slot=256)


def node(name: str, each: float = 1e-3, *, lanes: float = 0.0) -> NodeProfile:
    """`each` seconds a block of 16 rows; `lanes`, seconds a byte of either codec's ends."""
    return NodeProfile(
        name=name,
        mlp=Curve(((1.0, each / 2), (32.0, each * 1.5))),
        attention=AttentionCost(each / 50, each / 100, each / 5000),
        embed=Curve(((1.0, 1e-5), (2.0, 2e-5))),
        head=Curve(((1.0, 2e-3), (64.0, 4e-3))),
        memory=Bytes(1 << 40),
        overhead=Seconds(2e-4),
        codecs={
            Way.H8: CodecSpeed(0.75, lanes, 1.5 * lanes),
            Way.REC: CodecSpeed(0.65, 4 * lanes, 3 * lanes),
        },
        to_host=BytesPerSecond(5e9),
    )


def link(rate: float = 100.0, delay: float = 0.02) -> LinkProfile:
    return LinkProfile(BytesPerSecond(rate * MBIT), Seconds(delay))


def chain(nodes: list[NodeProfile], hops: list[LinkProfile], legs: LinkProfile | None = None) -> Cluster:
    """Links in one direction from each node to the next, and the command's with both ends."""
    legs = legs or link(1000.0, 0.005)
    links = {(a.name, b.name): hop for (a, b), hop in zip(pairwise(nodes), hops, strict=True)}
    links |= {(COMMAND, one.name): legs for one in nodes} | {(one.name, COMMAND): legs for one in nodes}
    links[(nodes[-1].name, nodes[0].name)] = legs
    return Cluster(tuple(nodes), links)


def layout_of(cluster: Cluster, blocks: list[int], batch: int, micro_batches: int, ways: list[Way]) -> Layout:
    firsts = [sum(blocks[:place]) for place in range(len(blocks))]
    stages = [
        PlannedStage(one.name, first, first + held)
        for one, first, held in zip(cluster.nodes, firsts, blocks, strict=True)
    ]
    return Layout(tuple(stages), batch, micro_batches, tuple(ways))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Cluster, Layout]:
    count = draw(st.integers(1, 4))
    speeds = st.floats(1e-4, 1e-2)
    lanes = st.floats(0, 1e-7)
    nodes = [node(f"n{place}", draw(speeds), lanes=draw(lanes)) for place in range(count)]
    hops = [link(draw(st.floats(5, 500)), draw(st.floats(0, 0.1))) for _ in range(count - 1)]
    cluster = chain(nodes, hops, link(1000.0, draw(st.floats(0, 0.1))))
    cuts = sorted(draw(st.sets(st.integers(1, MODEL.blocks - 1), min_size=count - 1, max_size=count - 1)))
    blocks = [b - a for a, b in pairwise([0, *cuts, MODEL.blocks])]
    batch = draw(st.integers(1, 64))
    ways = [draw(st.sampled_from(WAYS)) for _ in range(count - 1)]
    layout = layout_of(cluster, blocks, batch, draw(st.integers(1, min(batch, 8))), ways)
    return cluster, replace(layout, coordinator=draw(st.sampled_from([COMMAND, nodes[0].name])))


def by_formula(cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """(cycle, loop) from the arrays that searches use."""
    at_stage = layout.coordinator != COMMAND
    setting = Setting(layout.batch, layout.micro_batches, at_stage)
    instance = circulating(cluster, MODEL, JOB, setting, MemoryOptions())
    count = len(layout.stages)
    busy = [
        float(instance.busy[place, place_of(place, count), stage.blocks])
        for place, stage in enumerate(layout.stages)
    ]
    cycle, loop = max(busy), sum(busy) + float(instance.lead[0]) + float(instance.back[0, count - 1])
    for place, way in enumerate(layout.ways):
        at = WAYS.index(way), place, place + 1
        cycle, loop = max(cycle, float(instance.hop_busy[at])), loop + float(instance.hop_passes[at])
    return cycle, loop


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_equal_packs_take_exactly_the_step_of_the_formula(drawn: tuple[Cluster, Layout]) -> None:
    cluster, layout = drawn
    step = simulate_steps(cluster, MODEL, JOB, layout).step
    cycle, loop = by_formula(cluster, layout)
    assert step == pytest.approx(circulating_step(layout.micro_batches, cycle, loop), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(drawn=layouts(), guesses=st.floats(0, 16), kept=st.floats(0, 1), each=st.sampled_from([0.0, 1e-3]))
def test_trees_take_exactly_the_step_that_is_predicted(
    drawn: tuple[Cluster, Layout], guesses: float, kept: float, each: float
) -> None:
    """Outer legs are no resource to a prediction, so they are wide here."""
    cluster, layout = drawn
    links = {
        pair: replace(one, rate=BytesPerSecond(1e12)) if COMMAND in pair else one
        for pair, one in cluster.links.items()
    }
    cluster = replace(cluster, links=links)
    trees = Trees(guesses, guesses * kept, 1 + guesses * kept / 2, LineOf(each, each / 4))
    predicted = predict(cluster, MODEL, JOB, layout, trees=trees)
    simulated = simulate_steps(cluster, MODEL, JOB, layout, trees=trees)
    assert predicted.step / trees.committed == pytest.approx(simulated.step, rel=1e-3)
    assert predicted.tokens_per_second == pytest.approx(layout.batch / simulated.step, rel=1e-3)


def test_a_prediction_without_trees_is_one_of_trees_without_guesses() -> None:
    cluster = chain([node("a"), node("b")], [link()])
    layout = layout_of(cluster, [6, 6], 16, 2, [Way.RAW])
    assert predict(cluster, MODEL, JOB, layout) == predict(cluster, MODEL, JOB, layout, trees=Trees())
    half = predict(cluster, MODEL, JOB, layout, trees=Trees(1, 1, 2.0))
    assert half.job_time < predict(cluster, MODEL, JOB, layout).job_time


def test_one_micro_batch_takes_the_loop_and_many_take_the_bottleneck_s_time() -> None:
    nodes = [node("a", 1e-3), node("b", 3e-3)]
    cluster = chain(nodes, [link(200, 0.03)])
    alone = layout_of(cluster, [6, 6], 16, 1, [Way.RAW])
    assert simulate_steps(cluster, MODEL, JOB, alone).step == pytest.approx(by_formula(cluster, alone)[1])
    many = replace(alone, micro_batches=16)
    cycle, loop = by_formula(cluster, many)
    assert 16 * cycle > loop
    assert simulate_steps(cluster, MODEL, JOB, many).step == pytest.approx(16 * cycle)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.1, 10)), min_size=1, max_size=5),
    st.floats(0, 20),
    st.floats(0, 50),
)
def test_what_varies_does_its_amount_exactly(
    pieces: list[tuple[float, float]], start: float, amount: float
) -> None:
    times = [sum(length for length, _ in pieces[:place]) for place in range(len(pieces))]
    varying = Varying(tuple((time, value) for time, (_, value) in zip(times, pieces, strict=True)))
    end = varying.ends(start, amount)
    edges = sorted({start, end, *(time for time in times if start < time < end)})
    done = sum((b - a) * varying.at(a) for a, b in pairwise(edges))
    assert done == pytest.approx(amount, abs=1e-9)


@pytest.mark.parametrize("points", [(), ((0.0, 0.0),), ((1.0, 1.0), (1.0, 2.0)), ((0.0, math.nan),)])
def test_rates_that_stand_still_or_go_back_in_time_are_refused(
    points: tuple[tuple[float, float], ...],
) -> None:
    with pytest.raises(ValueError, match=r"times rise|above 0|at least"):
        Varying(points)


def two_nodes(micro_batches: int = 4, rate: float = 40.0) -> tuple[Cluster, Layout]:
    cluster = chain([node("a"), node("b")], [link(rate)])
    return cluster, layout_of(cluster, [6, 6], 32, micro_batches, [Way.RAW])


def test_each_phase_of_a_rate_runs_at_the_pace_of_that_rate() -> None:
    cluster, layout = two_nodes()
    rates = [400.0, 20.0, 100.0]
    trace = Varying(tuple((100.0 * place, rate * MBIT) for place, rate in enumerate(rates)))
    conditions = Conditions(rates={("a", "b"): trace})
    got = simulate_steps(cluster, MODEL, JOB, layout, until=Seconds(300.0), conditions=conditions)
    for place, rate in enumerate(rates):
        alone = chain(list(cluster.nodes), [link(rate)])
        step = simulate_steps(alone, MODEL, JOB, layout).step
        tokens = got.tokens_between(100.0 * place + 5, 100.0 * (place + 1))
        assert tokens == pytest.approx(95 * layout.batch / step, rel=0.02)


def test_a_node_at_half_its_speed_is_a_node_of_half_the_speed() -> None:
    cluster, layout = two_nodes(rate=1000.0)
    slowed = Conditions(speeds={"b": Varying(((0.0, 0.5),))})
    b = cluster.node("b")
    slow = replace(
        b,
        mlp=b.mlp.scaled(2),
        attention=AttentionCost(2 * b.attention.fixed, 2 * b.attention.row, 2 * b.attention.key),
        head=b.head.scaled(2),
        overhead=Seconds(2 * b.overhead),
    )
    other = Cluster((cluster.nodes[0], slow), cluster.links)
    expected = simulate_steps(other, MODEL, JOB, layout).step
    assert simulate_steps(cluster, MODEL, JOB, layout, conditions=slowed).step == pytest.approx(expected)
    assert expected > simulate_steps(cluster, MODEL, JOB, layout).step


@dataclass
class Scripted:
    """Decides `after` from a time on, and keeps what it saw."""

    before: Decision
    after: Decision
    change: float
    seen: list[Seen] = field(default_factory=list)

    def decide(self, seen: Seen) -> Decision:
        self.seen.append(seen)
        return self.before if seen.now < self.change else self.after


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8))
def test_after_m_changed_no_row_is_lost_and_the_step_is_that_of_the_new_m(before: int, after: int) -> None:
    cluster, layout = two_nodes(before)
    decider = Scripted(Decision(layout.ways, before), Decision(layout.ways, after), 2.0)
    got = simulate_steps(cluster, MODEL, JOB, layout, until=Seconds(20.0), decider=decider)
    step = simulate_steps(cluster, MODEL, JOB, replace(layout, micro_batches=after)).step
    assert got.tokens_between(5.0, 20.0) == pytest.approx(15 * layout.batch / step, rel=0.03)


def test_a_decider_sees_a_new_rate_only_once_messages_that_met_it_are_back() -> None:
    cluster, layout = two_nodes(micro_batches=3)
    trace = Varying(((0.0, 400 * MBIT), (10.0, 20 * MBIT)))
    decision = Decision(layout.ways, layout.micro_batches)
    decider = Scripted(decision, decision, 0.0)
    simulate_steps(
        cluster,
        MODEL,
        JOB,
        layout,
        until=Seconds(20.0),
        conditions=Conditions(rates={("a", "b"): trace}),
        decider=decider,
    )
    rates = [(seen.now, seen.hops[0].rate) for seen in decider.seen if seen.hops[0].rate is not None]
    assert decider.seen[0].hops[0].rate is None
    assert all(rate == pytest.approx(400 * MBIT) for now, rate in rates if now < 10.0)
    late = [rate for now, rate in rates if now >= 10.0]
    known = next(place for place, rate in enumerate(late) if rate == pytest.approx(20 * MBIT))
    assert LAG <= known + 1 <= LAG + layout.micro_batches + 1


def test_a_way_that_is_decided_holds_from_the_next_pack_on() -> None:
    cluster, layout = two_nodes(rate=20.0)
    raw, packed = (Decision((way,), layout.micro_batches) for way in (Way.RAW, Way.REC))
    decider = Scripted(raw, packed, 10.0)
    got = simulate_steps(cluster, MODEL, JOB, layout, until=Seconds(40.0), decider=decider)
    steps = [
        simulate_steps(cluster, MODEL, JOB, replace(layout, ways=one.ways)).step for one in (raw, packed)
    ]
    assert steps[1] < steps[0]
    assert got.tokens_between(15.0, 40.0) == pytest.approx(25 * layout.batch / steps[1], rel=0.03)
    ways = [seen.hops[0].way for seen in decider.seen]
    assert ways == sorted(ways, key=lambda way: way is Way.REC)
    assert [decision for _, decision in got.decisions] == [raw, packed]


def test_a_link_or_a_codec_that_is_missing_is_refused() -> None:
    cluster, layout = two_nodes()
    with pytest.raises(ValueError, match="no link from a to b"):
        simulate_steps(Cluster(cluster.nodes, {}), MODEL, JOB, replace(layout, coordinator="a"))
    bare = Cluster((cluster.nodes[0], replace(cluster.nodes[1], codecs={})), cluster.links)
    with pytest.raises(ValueError, match="do not both know"):
        simulate_steps(bare, MODEL, JOB, replace(layout, ways=(Way.H8,)))


# Whole jobs.


def loop_of(cluster: Cluster, layout: Layout, load: Load) -> float:
    line = Line(cluster, MODEL, layout)
    return line.figures(line.times(load, layout.ways))[1]


lengths = st.lists(st.tuples(st.integers(1, 700), st.integers(1, 40)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(layouts(), lengths)
def test_a_job_ends_with_every_sequence_and_beats_no_bound(
    drawn: tuple[Cluster, Layout], sequences: list[tuple[int, int]]
) -> None:
    cluster, layout = drawn
    got = simulate_job(cluster, MODEL, layout, sequences)
    assert got.tokens == sum(answer for _, answer in sequences)
    assert all(0 < time <= got.seconds for time in got.ended)
    assert max(got.busy.values()) <= got.seconds * (1 + 1e-9)
    loop = loop_of(cluster, layout, Load(1, 0.0))
    for (_, answer), ended in zip(sequences, got.ended, strict=True):
        assert ended >= (answer - 1) * loop * (1 - 1e-9)


def test_a_long_job_runs_at_the_formula_s_pace() -> None:
    cluster, layout = two_nodes(rate=200.0)
    job = replace(JOB, sequences=400, prompt=40.0, output=100.0)
    steady = job.sequences * job.output / layout.batch * simulate_steps(cluster, MODEL, job, layout).step
    varied = [(40, 50 + 100 * (number % 2)) for number in range(400)]
    assert simulate_job(cluster, MODEL, layout, varied).seconds == pytest.approx(steady, rel=0.1)


def test_slots_stand_empty_where_packs_take_less_than_their_share_of_prompts() -> None:
    cluster, layout = two_nodes(rate=200.0)
    sequences = [(200, 50)] * 100
    starved, fed = (
        simulate_job(cluster, MODEL, layout, sequences, options=JobOptions(share=share)).seconds
        for share in (0.5, 1.5)
    )
    assert starved > 1.3 * fed


def test_in_the_tail_fewer_micro_batches_are_a_shorter_step() -> None:
    """Where the bottleneck has a fixed cost a pack, the last rows travel together, not one in each."""
    cluster, layout = two_nodes(micro_batches=8, rate=1000.0)
    slow = [replace(one, overhead=Seconds(0.05)) for one in cluster.nodes]
    cluster = Cluster(tuple(slow), cluster.links)
    sequences = [(5, 10 if number % 4 else 100) for number in range(32)]
    got = simulate_job(cluster, MODEL, layout, sequences)
    loop = loop_of(cluster, layout, Load(8, 50.0))
    assert got.seconds < 1.3 * 100 * loop


def test_a_decider_changes_m_in_a_job_and_the_job_still_ends() -> None:
    cluster, layout = two_nodes(micro_batches=4)
    sequences = [(30, 1 + number % 50) for number in range(150)]
    for after in (1, 2, 7):
        decider = Scripted(Decision(layout.ways, 4), Decision((Way.H8,), after), 3.0)
        got = simulate_job(cluster, MODEL, layout, sequences, decider=decider)
        assert got.tokens == sum(answer for _, answer in sequences)
        assert len(got.decisions) == 2


@pytest.mark.parametrize("sequences", [[], [(0, 5)], [(5, 0)]])
def test_a_job_without_tokens_is_refused(sequences: list[tuple[int, int]]) -> None:
    cluster, layout = two_nodes()
    with pytest.raises(ValueError, match="a token at least"):
        simulate_job(cluster, MODEL, layout, sequences)
