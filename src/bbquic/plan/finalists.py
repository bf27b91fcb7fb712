"""The plan for a whole job: layouts with a good pace, or with a short way around, played to the end.

A job also reads its first prompts and has a tail, and there the shortest loop may beat the best pace. No
search is exact for that, so a few finalists are simulated with the scheduler's own rules. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bbquic.plan.build import Setting, Tables
from bbquic.plan.candidates import SearchOptions, allowed, settings
from bbquic.plan.cluster import COMMAND, Cluster, JobShape, Layout, ModelSizes
from bbquic.plan.instance import Assignment, Instance, Objective
from bbquic.plan.partition import best_partition
from bbquic.plan.paths import best_path
from bbquic.plan.predict import predict
from bbquic.plan.search import Plan, layout_of, plan_of, search
from bbquic.plan.simulate_job import JobOptions, simulate_job
from bbquic.units import Seconds

MOST_FINALISTS = 6  # layouts that are simulated, those that `predict.job_time` likes best
MOST_EVENTS = 120_000  # of one simulation, about a second; a longer job is cut to what that allows
GAIN = 0.01  # of the job: less does not speak against the best steady pace


@dataclass(frozen=True, slots=True)
class _Finalist:
    layout: Layout
    expected: Seconds  # `predict.job_time`


def search_job(
    cluster: Cluster,
    model: ModelSizes,
    job: JobShape,
    options: SearchOptions | None = None,
    best: Plan | None = None,
) -> Plan:
    """The plan under which the job as a whole ends first, as far as simulation tells.

    It begins with what `search` finds (`best`, where that is known) and leaves it only for one that saves
    GAIN of the job. Raises: as `search`.
    """
    options = options or SearchOptions()
    best = best or search(cluster, model, job, options)
    others = _finalists(cluster, model, job, options, best)
    if not others:
        return best
    lengths = sequences(job, _rounds(job, [best.layout, *(one.layout for one in others)]))
    rules = JobOptions(pack_tokens=options.memory.pack_tokens)
    times = {
        layout: simulate_job(cluster, model, layout, lengths, options=rules).seconds
        for layout in (best.layout, *(one.layout for one in others))
    }
    first = min(times, key=lambda layout: times[layout])
    if times[first] > (1 - GAIN) * times[best.layout]:
        return best
    return plan_of(cluster, model, job, options.memory, first)


def sequences(job: JobShape, count: int) -> list[tuple[int, int]]:
    """`count` prompts and answers in tokens: prompts of the mean that is read, answers spread up to the
    longest so that their mean is the job's, long and short ones mixed."""
    power = max(job.longest / job.output - 1, 0.0)
    golden = 0.6180339887498949  # of whose multiples the fractions are spread evenly, however many there are
    shares = ((0.5 + number * golden) % 1.0 for number in range(count))
    prompt = max(1, round(job.read))
    return [(prompt, max(1, round(job.longest * share**power))) for share in shares]


def _rounds(job: JobShape, layouts: Sequence[Layout]) -> int:
    """Sequences to simulate: the whole job, or three times the largest batch, or what MOST_EVENTS allow."""
    events = max(6 * len(one.stages) * one.micro_batches * job.output / one.batch for one in layouts)
    batch = max(one.batch for one in layouts)
    return min(job.sequences, max(3 * batch, int(MOST_EVENTS / max(events, 1e-9))))


def _finalists(
    cluster: Cluster, model: ModelSizes, job: JobShape, options: SearchOptions, best: Plan
) -> list[_Finalist]:
    """Others than the best, the most promising first."""
    usable = allowed(cluster, model, options)
    near = _near(best.layout, job, options)
    tables = Tables.of(usable, model)
    instances = {one: tables.circulating(job, one, options.memory) for one in near}
    found: dict[Layout, _Finalist] = {}
    for setting, solved in _solutions(usable, best.layout, instances, options):
        layout = layout_of(usable, model, job, options.memory, setting, solved)
        if layout == best.layout or layout in found:
            continue
        prediction = predict(cluster, model, job, layout, options.memory)
        found[layout] = _Finalist(layout, prediction.job_time)
    return sorted(found.values(), key=lambda one: one.expected)[:MOST_FINALISTS]


def _near(layout: Layout, job: JobShape, options: SearchOptions) -> list[Setting]:
    """The plan's place, its batch and those next to it, and no more than one micro-batch more than it has."""
    every = settings(job, options)
    sizes = sorted({one.batch for one in every})
    place = sizes.index(layout.batch)
    wanted = {*sizes[max(0, place - 2) : place + 2]}
    at_stage = layout.coordinator != COMMAND
    return [
        one
        for one in every
        if one.batch in wanted
        and one.at_stage == at_stage
        and one.micro_batches <= max(layout.micro_batches + 1, options.micro_batches or 1)
    ]


def _solutions(
    cluster: Cluster, best: Layout, instances: dict[Setting, Instance], options: SearchOptions
) -> Iterator[tuple[Setting, Assignment]]:
    """For each setting the best split of each order; and only the given one where that is given."""
    numbers = {node.name: place for place, node in enumerate(cluster.nodes)}
    orders = {tuple(numbers[name] for name in best.nodes)}
    if options.split is not None:
        return
    if not options.given:
        orders |= set(_short_loops(best, instances))
        orders |= {part for order in tuple(orders) for part in _parts(order)}
    for setting, instance in instances.items():
        for order in sorted(orders):
            solved = best_partition(instance, Objective.CIRCULATING, order)
            complete = not options.given or (solved is not None and len(solved.order) == len(order))
            if solved is not None and solved.value < float("inf") and complete:
                yield setting, solved


def _short_loops(best: Layout, instances: dict[Setting, Instance]) -> Iterator[tuple[int, ...]]:
    """Orders with the shortest way around, whatever it does to the pace, and with the best pace, in one
    micro-batch or as many as the plan has."""
    for setting, instance in instances.items():
        if setting.batch == best.batch and setting.micro_batches in (1, best.micro_batches):
            for objective in (Objective.SUM, Objective.CIRCULATING):
                solved = best_path(instance, objective)
                if solved is not None and solved.value < float("inf"):
                    yield solved.order


def _parts(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """An order with one node less, and each of its nodes alone."""
    for place, node in enumerate(order):
        yield (node,)
        if len(order) > 2:
            yield (*order[:place], *order[place + 1 :])
