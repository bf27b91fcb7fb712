"""One node's pulse: questions matched with answers, and a stage's work as differences of its reports."""

from __future__ import annotations

import pytest

from bbquic.runtime.heartbeat import REPORT_WINDOW, Pulse, work_between
from bbquic.runtime.protocol import PongHeader
from bbquic.runtime.timing import StageReport
from bbquic.units import Seconds


def report(steps: int, *, job: str = "a" * 16, compute: float = 0.0, sent: int = 0) -> StageReport:
    parts = (0.0, 0.0, 0.0, compute, 0.0, 0.0, 0.0)
    return StageReport(job, 0, 4, 2, steps, parts, 0.1 * steps, 2 * sent, sent, (0, 1, 0, 0), "b", None)


def pong(number: int, received: float, stage: StageReport | None = None) -> PongHeader:
    return PongHeader(number, "computing", 0.0, 0, received, received + 0.001, stage)


def test_an_answer_tells_round_trip_and_clock() -> None:
    pulse = Pulse()
    asked = pulse.ping(Seconds(10.0))
    pulse.take(pong(asked.number, 1010.02), Seconds(10.061))
    assert pulse.rtt == pytest.approx(0.06)
    clock = pulse.estimate(Seconds(10.061))
    assert clock is not None
    assert clock.offset == pytest.approx(999.99, abs=0.001)


def test_an_answer_that_was_not_asked_for_here_says_nothing_of_the_clock() -> None:
    pulse = Pulse()
    pulse.ping(Seconds(10.0))
    pulse.take(pong(1, 5.0), Seconds(10.1))  # such as a late one of before the job began
    assert pulse.estimate(Seconds(10.1)) is None
    assert pulse.last is not None
    assert pulse.last.activity == "computing"


def test_a_repeated_answer_is_taken_once() -> None:
    pulse = Pulse()
    asked = pulse.ping(Seconds(0.0))
    pulse.take(pong(asked.number, 50.0), Seconds(0.1))
    pulse.take(pong(asked.number, 50.0), Seconds(9.0))
    assert pulse.rtt == pytest.approx(0.099)


def test_questions_without_an_answer_are_forgotten_in_the_end() -> None:
    pulse = Pulse()
    for second in range(10_000):
        pulse.ping(Seconds(second))
    assert len(pulse._asked) <= 64


def test_work_is_the_difference_of_two_reports_by_the_nodes_own_clock() -> None:
    pulse = Pulse()
    for second in range(3):
        asked = pulse.ping(Seconds(second))
        stage = report(10 * second, compute=0.5 * second, sent=1000 * second)
        pulse.take(pong(asked.number, 700.0 + 2 * second, stage), Seconds(second + 0.1))
    work = pulse.work
    assert work is not None
    assert work.elapsed == pytest.approx(4.0)  # ours says 2 s; theirs is what the parts were timed by
    assert (work.steps, work.sent, work.raw) == (20, 2000, 4000)
    assert work.busy == pytest.approx(0.25)
    assert work.split is not None
    assert work.split.compute == pytest.approx(0.05)


def test_reports_of_another_job_or_a_stage_begun_anew_are_not_compared() -> None:
    second = Seconds(1.0)
    assert work_between(report(5), report(6, job="b" * 16), second) is None
    assert work_between(report(5), report(4), second) is None
    assert work_between(report(5), report(6), Seconds(0.0)) is None
    still = work_between(report(5), report(5), second)
    assert still is not None
    assert still.split is None


def test_a_pulse_keeps_the_reports_of_its_window_and_drops_those_of_a_job_that_ended() -> None:
    pulse = Pulse()
    for second in range(100):
        pulse.take(pong(0, float(second), report(second)), Seconds(second))
    assert pulse.work is not None
    assert pulse.work.elapsed <= REPORT_WINDOW + 1
    pulse.take(pong(0, 100.0), Seconds(100.0))
    assert pulse.work is None
    assert pulse.report is None
