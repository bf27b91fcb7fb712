"""Another layout in mid-job: looked for where measurements differ from the plan, weighed against the move."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import JobShape
from bbquic.plan.cost import MemoryOptions, held_memory
from bbquic.runtime.advice import Advisor, advising, differs, shown, tokens_left
from bbquic.runtime.limits import COORDINATOR
from bbquic.runtime.planning import Question
from bbquic.runtime.telemetry import HopStatistics, JobStatistics
from bbquic.units import Bytes, BytesPerSecond, Seconds
from clusters import link, mesh, simple_node, small_model

MEMORY = MemoryOptions(share=1.0)
JOB = JobShape(sequences=64, prompt=8.0, output=20.0, longest=20.0, slot=32)
LINE = 1e7  # bytes a second


def advisor() -> Advisor:
    """Three nodes of which any two hold the model; the plan takes the two that are best joined."""
    model = small_model(blocks=6)
    model = replace(model, block_weights=Bytes(10_000_000))
    held = held_memory(model, MEMORY, blocks=4, batch=8, rows=8, slot=32, embeds=True, heads=True)
    nodes = tuple(simple_node(name, block=0.01, memory=held.device) for name in ("a", "b", "c"))
    slow = {pair: link(LINE / 4, 0.01) for pair in (("a", "c"), ("c", "a"), ("b", "c"), ("c", "b"))}
    cluster = mesh(nodes, rate=LINE, delay=0.01, other=slow)
    options = SearchOptions(memory=MEMORY, batch=8, at_stage=False)
    question = Question(cluster, model, JOB, options, "bfloat16")
    return Advisor(question, question.answer(), {"a": 1e8, "b": 1e8})


def running(one: Advisor, rate: float, *, pace: float = 1.0) -> JobStatistics:
    """A job at `pace` times the planned speed whose link between its stages carries `rate`."""
    names = [COORDINATOR, *one.plan.layout.nodes, COORDINATOR]
    hops = tuple(
        HopStatistics(
            source, target, None, None, Bytes(0), 0, None,
            link_rate=BytesPerSecond(rate) if COORDINATOR not in (source, target) else None,
        )
        for source, target in pairwise(names)
    )  # fmt: skip
    return JobStatistics(
        total=64,
        done=10,
        generated_tokens=200,
        hops=hops,
        in_flight_sequences=8,
        decode_tokens_per_second=pace * one.plan.prediction.tokens_per_second,
        elapsed=Seconds(100.0),
    )


def test_a_job_that_runs_as_planned_is_let_alone() -> None:
    one = advisor()
    for seen in (running(one, LINE), running(one, LINE * 1.2, pace=0.9)):
        assert not differs(shown(seen), one.planned())


def test_a_link_or_a_pace_that_is_otherwise_is_looked_at_but_not_at_the_very_beginning() -> None:
    one = advisor()
    for seen in (running(one, LINE / 2), running(one, LINE * 2), running(one, LINE, pace=0.6)):
        assert differs(shown(seen), one.planned())
        assert not differs(shown(replace(seen, elapsed=Seconds(10.0))), one.planned())


def test_what_was_searched_for_once_is_not_searched_for_again() -> None:
    """The job may compute on the cores that a search takes."""
    one = advisor()
    looks = [running(one, LINE / 2)] * 3 + [running(one, LINE / 10)] * 3
    told: list[str] = []

    async def main() -> None:
        left = iter(looks)
        done = asyncio.Event()

        def look() -> JobStatistics:
            seen = next(left, None)
            if seen is None:
                done.set()
            return seen or looks[-1]

        task = asyncio.create_task(advising(one, look, told.append, interval=Seconds(0.0)))
        await asyncio.wait_for(done.wait(), 60)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert 1 <= len(told) <= 2  # at most once for each of the two rates


def test_a_link_that_was_never_seen_full_says_nothing() -> None:
    one = advisor()
    seen = running(one, LINE / 100)
    hops = tuple(replace(hop, rate_is_lower_bound=True) for hop in seen.hops)
    assert not differs(shown(replace(seen, hops=hops)), one.planned())
    assert one.measured_cluster(replace(seen, hops=hops)) == one.question.cluster


def test_where_the_link_collapsed_moving_repays_a_long_job_and_not_a_short_one() -> None:
    one = advisor()
    assert set(one.plan.layout.nodes) == {"a", "b"}
    seen = running(one, LINE / 1000, pace=0.05)
    long, short = one.advise(seen, 1e6), one.advise(seen, 5.0)
    assert long is not None
    assert long.repays
    assert short is not None
    assert not short.repays
    assert "in place of" in long.reason


def test_where_the_same_layout_is_still_the_best_there_is_nothing_to_say() -> None:
    one = advisor()
    assert one.advise(running(one, LINE * 3), 1e6) is None


def test_the_other_nodes_load_what_they_do_not_hold_yet() -> None:
    one = advisor()
    slow = replace(one, loading={"a": 1e4, "b": 1e4})  # bytes a second: 10 MB of a block take long
    seen = running(one, LINE / 1000, pace=0.05)
    quickly, slowly = one.advise(seen, 1e6), slow.advise(seen, 1e6)
    assert quickly is not None
    assert slowly is not None
    assert slowly.moves - quickly.moves > 10_000_000 / 1e4 * 0.9
    assert slowly.stays == quickly.stays


@pytest.mark.parametrize(("total", "expected"), [(None, 0.0), (64, 54 * 20.0), (5, 0.0)])
def test_what_is_left_is_lines_times_an_answer(total: int | None, expected: float) -> None:
    assert tokens_left(JobStatistics(total=total, done=10, generated_tokens=200), 7.0) == expected
    if total == 64:
        assert tokens_left(JobStatistics(total=total), 7.0) == 64 * 7.0
