"""Blocks, order and subset: exhaustive search is the oracle on small ones, a hidden chain on large ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bbquic.plan import paths
from bbquic.plan.instance import Assignment, Instance, Objective, evaluate, value_of
from bbquic.plan.partition import best_partition
from bbquic.plan.paths import best_path
from layouts import SIZES, every_value, planted_instance, random_instance

INFINITE = float("inf")
each_objective = pytest.mark.parametrize("objective", list(Objective))


def check(instance: Instance, objective: Objective, found: Assignment | None, best: float, what: str) -> None:
    """A solution is as good as the best, is what it says it is, and needs nothing that is not there."""
    if found is None:
        assert best == INFINITE, what
        return
    assert found.value == pytest.approx(best, rel=1e-9, abs=1e-9), what
    assert found == evaluate(instance, objective, found.order, found.blocks), what
    assert len(set(found.order)) == len(found.order), what
    assert sum(found.blocks) == instance.blocks, what
    assert min(found.blocks) >= 1, what
    assert found.loop < INFINITE, what


@each_objective
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_nothing_that_can_be_tried_beats_what_is_found(objective: Objective, size: tuple[int, int]) -> None:
    """1,044 instances in all, 58 a size and objective: of each the best path and those of three orders."""
    rng = np.random.default_rng(1)
    solved = 0
    for number in range(58):
        instance, what = random_instance(rng, *size), f"instance {number}"
        values = every_value(instance, objective)
        best = min(values.values(), default=INFINITE)
        check(instance, objective, best_path(instance, objective), best, what)
        check(instance, objective, best_path(instance, objective, bound=best * 1.01 + 0.01), best, what)
        assert best_path(instance, objective, bound=best) is None or best == INFINITE, what
        solved += best < INFINITE
        for _ in range(3):
            order = rng.permutation(instance.nodes)[: rng.integers(1, instance.nodes + 1)].tolist()
            within = min((values[used] for used in values if in_order(used, order)), default=INFINITE)
            check(instance, objective, best_partition(instance, objective, order), within, f"{what}, {order}")
    assert solved >= 20  # the others have no solution


def in_order(used: tuple[int, ...], order: list[int]) -> bool:
    return list(used) == [node for node in order if node in used]


@each_objective
def test_the_heuristic_finds_solutions_and_mostly_the_best(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    instances = [random_instance(rng, *SIZES[number % len(SIZES)]) for number in range(60)]
    exact = [best_path(instance, objective) for instance in instances]
    monkeypatch.setattr(paths, "EXACT_NODES", 0)
    best_ones = 0
    for number, (instance, best) in enumerate(zip(instances, exact, strict=True)):
        found = best_path(instance, objective)
        if found is None or best is None:
            best_ones += found is best
            continue
        assert found == evaluate(instance, objective, found.order, found.blocks), f"instance {number}"
        assert found.value >= best.value * (1 - 1e-9), f"instance {number}"
        best_ones += found.value <= best.value * (1 + 1e-9)
    assert best_ones >= 57


@each_objective
def test_the_numbers_of_nodes_do_not_matter(objective: Objective) -> None:
    rng = np.random.default_rng(3)
    for nodes in (5, 6, 7, 8):
        instance = random_instance(rng, nodes, 10)
        first = best_path(instance, objective)
        for _ in range(4):
            numbers = rng.permutation(nodes).tolist()
            best = INFINITE if first is None else first.value
            renumbered = instance.permuted(numbers)
            check(renumbered, objective, best_path(renumbered, objective), best, f"{numbers}")


@each_objective
@pytest.mark.parametrize("nodes", [8, 12])
def test_a_bound_asks_for_something_better(objective: Objective, nodes: int) -> None:
    rng = np.random.default_rng(4)
    instance = planted_instance(rng, nodes, 4, 20)[0]
    best = best_path(instance, objective)
    assert best is not None
    assert best_path(instance, objective, bound=best.value) is None
    assert best_path(instance, objective, bound=best.value / 2) is None
    again = best_path(instance, objective, bound=best.value * 1.001)
    assert again is not None
    assert again.value == pytest.approx(best.value)


@each_objective
@pytest.mark.parametrize("separates", [True, False])
def test_a_hidden_chain_is_found_among_eight_nodes(objective: Objective, separates: bool) -> None:
    for seed in range(3):
        instance, cycle, loop = planted_instance(
            np.random.default_rng(seed), 8, 5, 80 if separates else 40, separates=separates
        )
        best = value_of(objective, instance.micro_batches, 5, cycle, loop)
        check(instance, objective, best_path(instance, objective), best, f"seed {seed}")


@each_objective
@pytest.mark.parametrize(("nodes", "chain", "separates"), [(16, 5, True), (24, 7, False), (70, 12, True)])
def test_what_is_found_among_many_nodes_is_near_the_hidden_best(
    objective: Objective, nodes: int, chain: int, separates: bool
) -> None:
    instance, cycle, loop = planted_instance(np.random.default_rng(6), nodes, chain, 30, separates=separates)
    best = value_of(objective, instance.micro_batches, chain, cycle, loop)
    found = best_path(instance, objective)
    assert found is not None
    assert best * (1 - 1e-9) <= found.value <= best * 1.03
    assert found == evaluate(instance, objective, found.order, found.blocks)


@each_objective
@pytest.mark.parametrize("nodes", [3, 9])
def test_where_nothing_fits_nothing_is_found(objective: Objective, nodes: int) -> None:
    """No memory, no way to or from the coordinator, memory for one block less than there are, no links."""
    plain = planted_instance(np.random.default_rng(7), nodes, 2, 12)[0]
    none = np.full_like
    short = np.where(np.arange(13) > 11 // nodes, INFINITE, plain.busy)
    for changed in (
        replace(plain, busy=none(plain.busy, INFINITE), passes=none(plain.busy, INFINITE)),
        replace(plain, lead=none(plain.lead, INFINITE)),
        replace(plain, back=none(plain.back, INFINITE)),
        replace(plain, busy=short, passes=short),
        replace(plain, hop_passes=none(plain.hop_passes, INFINITE)),
    ):
        assert best_path(changed, objective) is None
        assert best_partition(changed, objective) is None
    assert best_partition(plain, objective, []) is None
    assert best_path(plain.permuted([]), objective) is None
