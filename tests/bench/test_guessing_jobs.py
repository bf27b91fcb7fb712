"""Jobs of a real model with and without guesses: what is compared, what is predicted, and what is drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from bench.common import ROOT
from bench.guessing.completion import Times, draw, show
from bench.guessing.home import Line, Pass, Told, Work
from bench.guessing.jobs import Gain, check_equal, check_same_job
from bench.guessing.real import Point, Steady, calibrated, on_link
from msgspec.structs import replace

from bbquic.plan.speculation import PLAIN, Trees, row_rate
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.timing import StageTiming
from bbquic.units import Seconds

SVG = "{http://www.w3.org/2000/svg}"
POINT = Point(20, 50, 4, 8, "quoting")


def timing(node: str, compute: float, sent: int) -> StageTiming:
    """A stage that does nothing but compute."""
    end = round(compute * 1e6)
    return StageTiming(node, 0.0, (0, 0, 0, 0, 0, end, end, end, end, end), sent, sent, 0.0)


def passes(tokens: int, committed: int, count: int, step: float) -> list[Pass]:
    """Of four rows on two stages that take 20 ms and 2 ms a token each."""
    timings = tuple(timing(node, 0.02 + 0.002 * tokens, 1000 * tokens) for node in ("a", "b"))
    took = 0.04 + 0.004 * tokens + 0.001
    return [
        Pass(place * step, place * step + took, 4, tokens, committed, False, timings)
        for place in range(count)
    ]


def told(lines: tuple[Line, ...] = (), of: tuple[Pass, ...] = (), seconds: float = 1.0) -> Told:
    return Told(seconds, lines, of, Drafts(seconds=0.5), ())


def test_a_prediction_has_the_costs_of_a_near_pipeline_and_the_link_s_rate_and_distance() -> None:
    runs = [Steady(4, passes(size, 4, 8, 1.0), Seconds(0.0)) for size in (4, 20)]
    measured = on_link(calibrated(runs), POINT)
    plain, wide = row_rate(measured, 4, 1, PLAIN), row_rate(measured, 4, 1, Trees(4, 4, 3))
    wire = 1000 * 4 * 1.031 * 8 / 20e6
    assert 1 / plain == pytest.approx(0.04 + 0.016 + 0.001 + wire + 0.05, rel=1e-3)
    assert 3 / wide == pytest.approx(0.04 + 0.08 + 0.001 + 5 * wire + 0.05, rel=1e-3)


def test_steady_passes_are_those_of_all_rows_behind_the_prompts() -> None:
    prompt = replace(passes(100, 4, 1, 1.0)[0], reads=True)
    of = (prompt, *passes(12, 8, 6, 0.2), replace(passes(9, 5, 1, 1.0)[0], rows=3))
    steady = Steady.of(Work(((1,),) * 4, 8, 4, "always"), told(of=of))
    assert len(steady.passes) == 5
    assert steady.committed == 2
    assert steady.given == 2
    assert steady.rate == pytest.approx(8 / 0.2)
    assert steady.drafting == 0.5 / 8


def test_answers_that_differ_are_named_and_so_is_one_that_is_longer() -> None:
    one, other, longer = Line((1, 2), 0, 1), Line((1, 3), 0, 1), Line((1, 2, 3), 0, 1)
    check_same_job(told((one, other)), told((one, other)))
    check_equal(told((one,)), told((longer,)))
    with pytest.raises(AssertionError, match="line 2: guesses change a token"):
        check_equal(told((one, one)), told((one, other)))
    with pytest.raises(AssertionError, match="line 1: guesses change where"):
        check_same_job(told((one,)), told((longer,)))


def test_a_median_of_seven_is_within_its_rounds_by_98_per_cent() -> None:
    found = Gain((0.9, 1.2, 1.3, 1.1, 1.0, 1.4, 1.5), (10.0,) * 7, 1.5, ())
    assert found.ratio == 1.2
    assert found.sureness == pytest.approx(1 - 2 / 128)
    assert "x1.200 (0.900 to 1.500 with 98.4%) of 10.0 tok/s" in str(found)


def test_completion_times_are_drawn_as_one_staircase_a_mode_and_panel() -> None:
    lines = tuple(Line((1,), number, 2.0 * number + 1) for number in range(6))
    slow = Times.of(told(lines))
    quick = Times(tuple(each / 2 for each in slow.ended), tuple(each / 2 for each in slow.lasted))
    picture = ElementTree.fromstring(draw({"off": slow, "auto": quick}))
    stairs = [path.get("d", "") for path in picture.iter(f"{SVG}path") if path.get("stroke-width")]
    assert [path.count("H") for path in stairs] == [6] * 4
    assert "6 answers in 11.0 s, half of them by 6.0 s" in show({"off": slow, "auto": quick})


@pytest.mark.parametrize("kind", ["ordinary", "quoting"])
def test_the_benches_prompts_are_job_files(kind: str) -> None:
    lines = (ROOT / "data" / f"{kind}_prompts.jsonl").read_text().splitlines()
    contents = [json.loads(line)["messages"][0]["content"] for line in lines]
    assert len(set(contents)) == 12
