"""The plan for a whole job: never later than the best pace, as far as simulation tells."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import COMMAND, Cluster, Curve, JobShape
from bbquic.plan.finalists import search_job, sequences
from bbquic.plan.search import search
from bbquic.plan.simulate_job import simulate_job
from clusters import link, mesh, simple_node, small_model


def some_cluster(random: Random) -> Cluster:
    nodes = tuple(
        simple_node(name, block=random.uniform(0.002, 0.03)) for name in "abcd"[: random.randint(2, 4)]
    )
    names = [COMMAND, *(node.name for node in nodes)]
    other = {
        (a, b): link(random.uniform(2e5, 2e6), random.uniform(0.001, 0.05))
        for a in names
        for b in names
        if a != b
    }
    return mesh(nodes, other=other)


@pytest.mark.parametrize("seed", range(12))
def test_the_job_never_ends_later_than_with_the_best_pace(seed: int) -> None:
    random = Random(seed)
    cluster, model = some_cluster(random), small_model()
    job = JobShape(sequences=24, prompt=8.0, output=12.0, longest=20.0, slot=32)
    steady, whole = search(cluster, model, job), search_job(cluster, model, job)
    lengths = sequences(job, job.sequences)
    times = [simulate_job(cluster, model, one.layout, lengths).seconds for one in (steady, whole)]
    assert times[1] <= times[0]


def test_where_the_tail_is_most_of_the_job_a_shorter_way_around_is_taken() -> None:
    each_row = Curve(((1, 0.001), (101, 0.101)))
    nodes = (simple_node("near", mlp=each_row), simple_node("other", mlp=each_row))
    far = {("near", "other"): link(1e7, 0.019), ("other", "near"): link(1e7, 0.019)}
    cluster, model = mesh(nodes, rate=1e9, other=far), small_model()
    job = JobShape(sequences=64, prompt=1.0, output=4.0, longest=400.0, slot=416)
    assert len(search(cluster, model, job).layout.stages) == 2
    assert len(search_job(cluster, model, job).layout.stages) == 1


def test_what_is_given_stays_as_given() -> None:
    cluster, model = some_cluster(Random(3)), small_model()
    job = JobShape(sequences=24, prompt=8.0, output=12.0, longest=20.0, slot=32)
    names = tuple(node.name for node in cluster.nodes)
    ordered = SearchOptions(nodes=names, ordered=True, batch=4)
    found = search_job(cluster, model, job, ordered).layout
    assert (found.nodes, found.batch) == (names, 4)
    split = SearchOptions(nodes=names[:2], ordered=True, split=(1, 3))
    assert [stage.blocks for stage in search_job(cluster, model, job, split).layout.stages] == [1, 3]


@pytest.mark.parametrize(("output", "longest"), [(10.0, 10.0), (10.0, 15.0), (10.0, 80.0)])
def test_sequences_have_the_means_of_the_job(output: float, longest: float) -> None:
    job = JobShape(sequences=500, prompt=7.4, output=output, longest=longest, slot=128)
    made = sequences(job, 500)
    assert {prompt for prompt, _ in made} == {7}
    assert fmean(answer for _, answer in made) == pytest.approx(output, rel=0.06)
    assert max(answer for _, answer in made) <= longest
