"""The best layout for a job: batch, micro-batches, the coordinator's place, nodes, order and blocks. Pure.

Every pair of batch and micro-batches with a place for the coordinator is a setting, and gives an instance.
A lower bound on each says which cannot be better than what is known; the others are solved by `paths`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bbquic.plan.bounds import least_step
from bbquic.plan.build import Setting, Tables
from bbquic.plan.candidates import SearchOptions, allowed, batches, settings
from bbquic.plan.cluster import COMMAND, Cluster, JobShape, Layout, ModelSizes, PlannedStage
from bbquic.plan.cost import MemoryOptions, StageMemory, stage_memory, steady_time
from bbquic.plan.impossible import refusal
from bbquic.plan.instance import FIRST, LAST, Assignment, Instance, Objective, evaluate, place_of
from bbquic.plan.partition import best_partition
from bbquic.plan.partition import solve as partition
from bbquic.plan.paths import best_path
from bbquic.plan.predict import Prediction, dollars_per_million, layout_memory, predict
from bbquic.plan.terms import levels, sums

TIE = 0.001  # times that differ by less are equal; then fewer nodes, a smaller B and M, the command's process
EXACT_NODES = 8  # up to here every setting that may be best is solved
MOST_SOLVED = 24  # beyond: as many settings are solved, those first that look best by the order found so far
GAIN = 0.005  # and less than that, which `paths` takes seconds to work out, is not looked for
MOST_SWEEPS = 4  # orders that are tried in all settings


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout and what is to be expected of it. `memory` by stage; `cost`: dollars per million tokens, None
    where no used node has a price."""

    layout: Layout
    prediction: Prediction
    memory: tuple[StageMemory, ...]
    left_out: tuple[str, ...]
    cost: float | None


def search(
    cluster: Cluster,
    model: ModelSizes,
    job: JobShape,
    options: SearchOptions | None = None,
    *,
    among: Sequence[Setting] | None = None,
    start: Sequence[str] = (),
) -> Plan:
    """The plan with the least `cost.steady_time`, of all settings or of those it may choose `among`.

    `start`: an order of nodes that is likely good, which makes the search faster, and no other.
    Up to EXACT_NODES nodes no setting is passed over that could be better; whether each is solved exactly is
    `paths`' matter. Raises: ConfigError on options that contradict the cluster, PlanImpossible where nothing
    fits.
    """
    options = options or SearchOptions()
    usable = allowed(cluster, model, options)
    problem = _Problem(usable, model, job, options)
    best = problem.best(settings(job, options) if among is None else among, problem.numbers(start))
    if best is None:
        raise refusal(usable, model, job, options, _largest_batch(problem))
    assignment = best.assignment if options.split else problem.balanced(best)
    layout = layout_of(usable, model, job, options.memory, best.setting, assignment)
    return plan_of(cluster, model, job, options.memory, layout)


def layout_of(
    cluster: Cluster,
    model: ModelSizes,
    job: JobShape,
    memory: MemoryOptions,
    setting: Setting,
    assignment: Assignment,
) -> Layout:
    """An assignment, whose numbers are the cluster's nodes, as a layout. Its stages must fit."""
    stages: list[PlannedStage] = []
    for position, (number, blocks) in enumerate(zip(assignment.order, assignment.blocks, strict=True)):
        node, place = cluster.nodes[number], place_of(position, len(assignment.order))
        held = stage_memory(
            node,
            model,
            memory,
            blocks=blocks,
            batch=setting.batch,
            micro_batches=setting.micro_batches,
            slot=job.slot,
            embeds=bool(place & FIRST),
            heads=bool(place & LAST),
        )
        assert held is not None, f"{node.name} does not hold the {blocks} blocks it was given"
        first = stages[-1].stop if stages else 0
        stages.append(PlannedStage(node.name, first, first + blocks, held[1]))
    return Layout(
        tuple(stages),
        setting.batch,
        setting.micro_batches,
        tuple(setting.ways[way] for way in assignment.ways),
        stages[0].node if setting.at_stage else COMMAND,
    )


def plan_of(
    cluster: Cluster, model: ModelSizes, job: JobShape, memory: MemoryOptions, layout: Layout
) -> Plan:
    """Any layout with what is to be expected of it."""
    prediction = predict(cluster, model, job, layout, memory)
    return Plan(
        layout,
        prediction,
        layout_memory(model, job, layout, memory),
        tuple(node.name for node in cluster.nodes if node.name not in layout.nodes),
        dollars_per_million(cluster, layout, prediction.tokens_per_second),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """A solution of a setting; `time` is the objective in seconds of the job."""

    setting: Setting
    assignment: Assignment
    time: float

    @property
    def rank(self) -> tuple[int, int, int, bool]:
        """Among equals."""
        setting = self.setting
        return len(self.assignment.order), setting.batch, setting.micro_batches, setting.at_stage


class _Problem:
    """One search: settings with their bounds, and the solutions found so far."""

    def __init__(self, cluster: Cluster, model: ModelSizes, job: JobShape, options: SearchOptions) -> None:
        self.cluster, self.model, self.job, self.options = cluster, model, job, options
        self.tables = Tables.of(cluster, model)
        self._bounds: dict[Setting, float] = {}
        self._looks: dict[Setting, float] = {}  # what settings were estimated at, by orders found elsewhere
        self._found: list[_Found] = []
        self._least = float("inf")
        self._swept: set[tuple[int, ...]] = set()

    def numbers(self, names: Sequence[str]) -> tuple[int, ...]:
        """Of those of these nodes that may be used."""
        known = {node.name: number for number, node in enumerate(self.cluster.nodes)}
        return tuple(known[name] for name in names if name in known)

    def best(self, among: Sequence[Setting], start: tuple[int, ...] = ()) -> _Found | None:
        for one in among:
            bound = self._time(one, least_step(self.instance(one)))
            if bound < float("inf"):
                self._bounds[one] = bound
        if start and not self.options.given:
            self._sweep(start)
        solved = 0
        while (setting := self._next()) is not None:
            if self._found and not self._exact and solved >= MOST_SOLVED:
                break
            del self._bounds[setting]
            self._solve(setting)
            solved += 1
        if not self._found:
            return None
        equal = [one for one in self._found if one.time <= self._limit]
        return self._fewer(min(equal, key=lambda one: (one.rank, one.time)))

    def instance(self, setting: Setting) -> Instance:
        made = self.tables.circulating(self.job, setting, self.options.memory)
        return _all_in_order(made) if self.options.given else made

    @property
    def _exact(self) -> bool:
        return self.options.given or len(self.cluster.nodes) <= EXACT_NODES

    @property
    def _limit(self) -> float:
        return self._least * (1 + TIE)

    def _time(self, setting: Setting, step: float) -> float:
        return steady_time(self.job, setting.batch, step)

    def _next(self) -> Setting | None:
        """Of the settings that may still be best, the one that looks best."""
        hopeful = [setting for setting, bound in self._bounds.items() if bound <= self._limit]
        return min(hopeful, key=lambda one: self._looks.get(one, self._bounds[one]), default=None)

    def _solve(self, setting: Setting) -> None:
        instance = self.instance(setting)
        if self.options.split is not None:
            order = tuple(range(instance.nodes))
            solved: Assignment | None = evaluate(instance, Objective.CIRCULATING, order, self.options.split)
        elif self.options.given:
            solved = best_partition(instance, Objective.CIRCULATING)
        else:
            below = self._limit if self._exact else self._least * (1 - GAIN)
            solved = best_path(instance, Objective.CIRCULATING, bound=below / self._time(setting, 1.0))
        if solved is not None and self._keep(setting, solved) and not self.options.given:
            self._sweep(solved.order)

    def _keep(self, setting: Setting, solved: Assignment) -> bool:
        """Whether it is the best so far."""
        time = self._time(setting, solved.value)
        if time > self._limit or time == float("inf"):
            return False
        better = time < self._least
        self._least = min(self._least, time)
        self._found.append(_Found(setting, solved, time))
        return better

    def _sweep(self, order: tuple[int, ...]) -> None:
        """An order that is good in one setting, tried in the others: cheap, and it bounds them well."""
        if order in self._swept or len(self._swept) >= MOST_SWEEPS:
            return
        self._swept.add(order)
        for setting in [one for one, bound in self._bounds.items() if bound <= self._limit]:
            solved = _along(self.instance(setting), order)
            if solved is not None:
                self._looks[setting] = min(
                    self._looks.get(setting, np.inf), self._time(setting, solved.value)
                )
                self._keep(setting, solved)

    def _fewer(self, best: _Found) -> _Found:
        """The same setting on fewer of the nodes, while that is as good."""
        if self.options.given:
            return best
        instance, order = self.instance(best.setting), best.assignment.order
        blocks = dict(zip(order, best.assignment.blocks, strict=True))
        for node in sorted(order, key=lambda one: (blocks[one], one)):
            rest = tuple(one for one in order if one != node)
            solved = self._solve_with(instance, rest, self._limit / self._time(best.setting, 1.0))
            if solved is not None:
                return self._fewer(_Found(best.setting, solved, self._time(best.setting, solved.value)))
        return best

    def balanced(self, best: _Found) -> Assignment:
        """Of the splits of this order that are as good, the one with the shortest cycle.

        Where the loop is the limit, many are as good; but packs that come in bunches wait less where the
        busiest has time to spare.
        """
        order, limit = best.assignment.order, best.assignment.value * (1 + TIE)
        part = self.instance(best.setting).permuted(list(order))
        chosen = best.assignment
        bottlenecks = levels(part)
        low, high = 0, int(np.searchsorted(bottlenecks, chosen.cycle))
        while low < high:
            middle = (low + high) // 2
            found = partition(sums(part, float(bottlenecks[middle])))
            places, blocks = found.trace() if found is not None and found.value <= limit else ((), ())
            if len(places) == len(order):
                chosen = evaluate(part, Objective.CIRCULATING, places, blocks)
                high = middle
            else:
                low = middle + 1
        return replace(chosen, order=order)

    def _solve_with(self, instance: Instance, nodes: tuple[int, ...], bound: float) -> Assignment | None:
        """Of these nodes alone, something below the bound; beyond EXACT_NODES in this order alone."""
        if not nodes:
            return None
        if len(nodes) <= EXACT_NODES:
            numbers = sorted(nodes)
            part = instance.permuted(numbers)
            return _renumbered(best_path(part, Objective.CIRCULATING, bound=bound), numbers)
        solved = _along(instance, nodes)
        return solved if solved is not None and solved.value < bound else None


def _along(instance: Instance, order: Sequence[int]) -> Assignment | None:
    """The best along this order, where nodes may be skipped."""
    solved = best_partition(instance, Objective.CIRCULATING, order)
    return None if solved is None or solved.value == float("inf") else solved


def _renumbered(solved: Assignment | None, nodes: Sequence[int]) -> Assignment | None:
    if solved is None or solved.value == float("inf"):
        return None
    order = tuple(nodes[number] for number in solved.order)
    return Assignment(order, solved.blocks, solved.ways, solved.value, solved.cycle, solved.loop)


def _all_in_order(instance: Instance) -> Instance:
    """The same where every node has to be used, in the order of their numbers: no other hop exists, and each
    place is its own node's."""
    count = instance.nodes
    hops = np.full((count, count), np.inf)
    hops[np.arange(count - 1), np.arange(1, count)] = 0.0
    places = np.full((count, 4, 1), np.inf)
    for node in range(count):
        places[node, place_of(node, count)] = 0.0
    return Instance(
        instance.busy + places,
        instance.passes + places,
        instance.hop_busy + hops,
        instance.hop_passes + hops,
        instance.lead,
        instance.back,
        instance.micro_batches,
    )


def _largest_batch(problem: _Problem) -> int | None:
    """Where a batch was given that does not fit: the largest that does. Smaller ones are tried first of all,
    for they cost nothing."""
    job, options = problem.job, problem.options
    if options.batch is None:
        return None
    for batch in reversed(batches(job, replace(options, batch=None))):
        smaller = replace(options, batch=batch)
        if batch < options.batch:
            again = _Problem(problem.cluster, problem.model, job, smaller)
            if again.best(settings(job, smaller)) is not None:
                return batch
    return None
