"""The others' placements: what their papers say, and always something that fits."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, permutations, product

import pytest
from bench.baselines import even, helix, petals
from bench.baselines.even import placement as even_placement
from bench.baselines.helix import Flow, chains, solve
from bench.baselines.petals import Span, route, spans
from bench.baselines.settle import MEMORY, Placement, block_seconds, usual_load
from bench.plan_sim.clusters import GB, MBIT, Case, cases, profile, shape
from bench.plan_sim.compare import OURS, planner, run

from bbquic.plan.cluster import COMMAND, Cluster, Layout, LinkProfile
from bbquic.plan.cost import held_memory
from bbquic.plan.predict import layout_memory
from bbquic.units import Bytes, BytesPerSecond, Seconds

needs_scipy = pytest.mark.skipif(
    find_spec("scipy") is None, reason="Helix' program is solved by scipy, which is the extra `bench`"
)
TINY = shape("tiny", 4, 1024, 4096, 8000, 8)


def assert_fits(case: Case, layout: Layout) -> None:
    assert layout.stages[0].first == 0
    assert layout.stages[-1].stop == case.model.blocks
    assert all(a.stop == b.first for a, b in pairwise(layout.stages))
    assert len(set(layout.nodes)) == len(layout.nodes)
    for stage, held in zip(layout.stages, layout_memory(case.model, case.job, layout, MEMORY), strict=True):
        assert held.device <= case.cluster.node(stage.node).memory * MEMORY.share


def some_cases() -> list[Case]:
    return list(cases(3))


def test_layouts_of_even_and_petals_are_whole_and_fit_in_memory() -> None:
    found = 0
    for case in some_cases():
        for policy in (even, petals):
            layout = policy(case.cluster, case.model, case.job)
            if layout is not None:
                assert_fits(case, layout)
                found += 1
    assert found >= 3


def small(blocks: list[int], speeds: list[float] | None = None, *, rate: float = 100.0) -> Case:
    """Nodes by blocks that fit with 16 sequences, at any place, and by GB/s of memory; all links alike."""
    (usual,) = cases(1)
    job = replace(usual.job, sequences=16)
    nodes = []
    for number, (held, speed) in enumerate(zip(blocks, speeds or [200.0] * len(blocks), strict=True)):
        needs = held_memory(
            TINY, MEMORY, blocks=held, batch=16, rows=16, slot=job.slot, embeds=True, heads=True
        ).device
        nodes.append(profile(f"n{number}", TINY, speed * GB, needs / MEMORY.share + 1e6))
    names = [COMMAND, *(node.name for node in nodes)]
    link = LinkProfile(BytesPerSecond(rate * MBIT), Seconds(0.02))
    links = {(a, b): link for a, b in product(names, names) if a != b}
    return Case("small", Cluster(tuple(nodes), links), TINY, job)


def test_even_gives_blocks_by_memory_in_the_order_of_the_nodes() -> None:
    (case,) = cases(1)
    nodes = tuple(
        replace(node, memory=Bytes(int(memory * 1000 * GB)))
        for node, memory in zip(case.cluster.nodes, (2, 1, 1), strict=False)
    )
    found = even_placement(Cluster(nodes, case.cluster.links), case.model, case.job)
    quarter = case.model.blocks // 4
    assert found == Placement(("n0", "n1", "n2"), (2 * quarter, quarter, quarter))


def test_even_gives_no_node_more_than_fits_and_nothing_where_all_are_too_small() -> None:
    (case,) = cases(1)
    big, tiny = replace(case.cluster.nodes[0], memory=Bytes(int(500 * GB))), case.cluster.nodes[1]
    alone = Cluster((big, replace(tiny, memory=Bytes(1))), case.cluster.links)
    assert even_placement(alone, case.model, case.job) == Placement(("n0",), (case.model.blocks,))
    none = Cluster((replace(tiny, memory=Bytes(1)),), case.cluster.links)
    assert even(none, case.model, case.job) is None


def test_a_server_that_joins_petals_takes_the_blocks_that_are_served_worst() -> None:
    case = small([2, 2, 2], [100.0, 400.0, 200.0])
    found = {span.server: (span.first, span.stop) for span in spans(case.cluster, case.model, case.job, 16)}
    assert found["n0"] == (0, 2)  # nobody is there: the first span of all
    assert found["n1"] == (2, 4)  # the blocks without a server
    assert found["n2"] == (0, 2)  # n0 is the slower one


def test_petals_client_takes_the_fastest_chain_of_all() -> None:
    """Against every chain there is, each server in one stretch."""
    source = random.Random(7)
    for _ in range(20):
        case = small([4, 4, 4, 4], [source.uniform(20, 400) for _ in range(4)])
        delays = {pair: Seconds(source.uniform(0.001, 0.02)) for pair in case.cluster.links}
        links = {pair: replace(link, delay=delays[pair]) for pair, link in case.cluster.links.items()}
        cluster = Cluster(case.cluster.nodes, links)
        held = []
        for node in cluster.nodes:
            first = source.randrange(TINY.blocks)
            held.append(Span(node.name, first, source.randint(first + 1, TINY.blocks), 1.0))
        found = route(cluster, case.model, case.job, held)
        best = min(every_chain(held), key=lambda one: seconds(cluster, case, one), default=None)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert seconds(cluster, case, found) == pytest.approx(seconds(cluster, case, best))


def every_chain(held: list[Span]) -> list[Placement]:
    found = []
    for count in range(1, len(held) + 1):
        for chain in permutations(held, count):
            for blocks in product(range(1, TINY.blocks + 1), repeat=count):
                firsts = [sum(blocks[:place]) for place in range(count)]
                ends = zip(chain, firsts, blocks, strict=True)
                if sum(blocks) == TINY.blocks and all(
                    span.first <= first and first + size <= span.stop for span, first, size in ends
                ):
                    found.append(Placement(tuple(span.server for span in chain), blocks))
    return found


def seconds(cluster: Cluster, case: Case, chain: Placement) -> float:
    load = usual_load(case.job)
    size = load.tokens * case.model.hidden * case.model.value_bytes * 1.031
    compute = sum(
        blocks * block_seconds(cluster.node(name), case.job)
        for name, blocks in zip(chain.nodes, chain.blocks, strict=True)
    )
    hops = [cluster.links[pair] for pair in pairwise(chain.nodes)]
    ends = cluster.links[COMMAND, chain.nodes[0]], cluster.links[chain.nodes[-1], COMMAND]
    out = (24 * load.rows + 4 * load.tokens) * 1.031 / ends[0].rate + ends[0].delay
    back = 24 * load.rows * 1.031 / ends[1].rate + ends[1].delay
    return out + back + compute + sum(hop.delay + size / hop.rate for hop in hops)


def test_chains_of_a_flow_are_those_that_carry_it_from_the_first_block_to_the_last() -> None:
    flow = Flow(
        held={"a": (0, 3), "b": (2, 4), "c": (0, 4)},
        edges={
            (COMMAND, "a"): 2.0,
            ("a", "b"): 2.0,
            ("b", COMMAND): 2.0,
            (COMMAND, "c"): 1.0,
            ("c", COMMAND): 1.0,
        },
        value=3.0,
        seconds=0.0,
        proven=True,
    )
    assert list(chains(flow, 4)) == [Placement(("a", "b"), (3, 1)), Placement(("c",), (4,))]


def too_small() -> Case:
    case = small([2, 2])
    least = TINY.blocks * TINY.block_weights
    nodes = tuple(replace(node, memory=Bytes(least // 2)) for node in case.cluster.nodes)
    return replace(case, cluster=Cluster(nodes, case.cluster.links))


def served(case: Case, blocks: int) -> float:
    node, rows = case.cluster.nodes[0], usual_load(case.job).rows
    return rows / (node.overhead + blocks * block_seconds(node, case.job))


@needs_scipy
def test_helix_finds_a_maximal_flow_that_is_known() -> None:
    """Two nodes that hold half each serve together what one of them does; one that holds all adds its own."""
    case = small([2, 2, 4], rate=1e6)
    flow = solve(case.cluster, case.model, case.job, 16)
    assert flow is not None
    assert flow.proven
    assert flow.value == pytest.approx(served(case, 2) + served(case, 4), rel=1e-4)


@needs_scipy
def test_helix_flow_is_bounded_by_the_narrowest_edge() -> None:
    case = small([2, 2], rate=1.0)
    flow = solve(case.cluster, case.model, case.job, 16)
    load = usual_load(case.job)
    edge = MBIT / (load.tokens / load.rows * TINY.hidden * TINY.value_bytes * 1.031)
    assert flow is not None
    assert edge < served(case, 2)
    assert flow.value == pytest.approx(edge, rel=1e-4)


@needs_scipy
def test_helix_layout_is_whole_and_fits() -> None:
    case = small([3, 2, 2], [50.0, 300.0, 200.0])
    layout = helix(case.cluster, case.model, case.job)
    assert layout is not None
    assert_fits(case, layout)


@needs_scipy
def test_helix_gives_nothing_where_the_model_does_not_fit() -> None:
    case = too_small()
    assert helix(case.cluster, case.model, case.job) is None


def test_petals_gives_nothing_where_servers_leave_a_block_out() -> None:
    case = too_small()
    assert petals(case.cluster, case.model, case.job) is None


def test_the_planner_is_never_behind_even_or_petals() -> None:
    for case in some_cases():
        outcome = run(case, {OURS: planner, "even": even, "petals": petals})
        for name in outcome.steady:
            assert outcome.steady[OURS] <= outcome.steady[name] * 1.001
