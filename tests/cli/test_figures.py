"""Statistics as words: each unit at its edges, each line as it is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.cli.figures import (
    duration,
    fill,
    milliseconds,
    plain_line,
    printable,
    progress,
    share,
    size,
    summary_lines,
    throughput,
    token_rate,
)
from bbquic.runtime.accounting import Loop
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.telemetry import FirstTokens, JobStatistics
from bbquic.runtime.timing import Hop, Parts
from bbquic.units import Bytes, BytesPerSecond, Seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (86_399, "1 d 00 h"),
        (4 * 86_400 + 3 * 3600, "4 d 03 h"),
        (None, "-"),
    ],
)
def test_a_duration_has_two_units_at_the_most(seconds: float | None, text: str) -> None:
    assert duration(None if seconds is None else Seconds(seconds)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00004, "0.0 ms"), (0.0123, "12.3 ms"), (0.09996, "100 ms"), (2.5, "2,500 ms"), (None, "-")],
)
def test_short_times_are_in_milliseconds(seconds: float | None, text: str) -> None:
    assert milliseconds(None if seconds is None else Seconds(seconds)) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (12_345_678, "12.3 MB"),
        (5 * 10**9, "5.0 GB"),
        (7 * 10**15, "7,000.0 TB"),
    ],
)
def test_a_size_is_in_decimal_units(count: int, text: str) -> None:
    assert size(Bytes(count)) == text


def test_a_throughput_is_never_in_single_bytes() -> None:
    assert throughput(BytesPerSecond(120.0)) == "0.1 kB/s"
    assert throughput(BytesPerSecond(2_500_000.0)) == "2.5 MB/s"
    assert throughput(None) == "-"


def test_a_token_rate_keeps_a_decimal_only_where_it_tells() -> None:
    assert [token_rate(rate) for rate in (0.04, 38.21, 99.96, 1234.5)] == [
        "0.0 tok/s",
        "38.2 tok/s",
        "100 tok/s",
        "1,234 tok/s",
    ]
    assert token_rate(None) == "- tok/s"


def test_a_share_is_a_hundred_only_when_nothing_is_missing() -> None:
    assert [share(value) for value in (0.0, 0.934, 0.9999, 1.0, None)] == [
        "0 %",
        "93 %",
        "99 %",
        "100 %",
        "-",
    ]


@given(st.text())
def test_printable_text_has_no_control_character(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)


@given(st.lists(st.text(min_size=1)), st.integers(1, 40))
def test_filled_lines_hold_every_part_and_overflow_only_by_one_that_cannot_fit(
    parts: list[str], width: int
) -> None:
    lines = fill(parts, width)
    assert "  ".join(lines) == "  ".join(parts)
    assert all(len(line) <= width or line in parts for line in lines)


JOB = JobStatistics(
    done=400,
    failed=2,
    skipped=10,
    total=1000,
    prompt_tokens=12_345,
    shared_tokens=9_876,
    generated_tokens=45_678,
    tokens_per_second=130.2,
    decode_tokens_per_second=38.21,
    in_flight_sequences=16,
    elapsed=Seconds(130.2),
    eta=Seconds(200.1),
    waiting_for="node b: step 12",
    failures=(("duplicate_id", 1), ("invalid_json", 1)),
)


def test_progress_counts_what_is_settled_by_whichever_run() -> None:
    assert progress(JOB) == "412 of 1,000 (41 %)"
    assert progress(JobStatistics(done=3)) == "3 lines"
    assert progress(JobStatistics(total=0)) == "0 of 0 (100 %)"


def test_a_plain_line_says_all_that_is_known() -> None:
    assert plain_line(JOB) == (
        "progress: 412 of 1,000 (41 %), 38.2 tok/s generated, 130 tok/s with prompts, 16 in flight, "
        "2 failed, 10 had their answer, 2 min 10 s so far, 3 min 20 s left, waiting for node b: step 12"
    )


def test_a_plain_line_says_nothing_that_is_not_known() -> None:
    assert plain_line(JobStatistics()) == "progress: 0 lines, - tok/s generated, 0 in flight, 0.0 s so far"


def test_a_summary_counts_failures_by_code_and_says_how_to_go_on() -> None:
    assert summary_lines(JOB, "answers.jsonl") == [
        "answered 400 of 1,000 lines, 10 had their record before, 2 failed (1 duplicate_id, 1 invalid_json), "
        "in 2 min 10 s",
        "12,345 prompt tokens (9,876 of them shared), 45,678 generated: 351 tok/s",
        "answers: answers.jsonl",
        "unfinished: 588 left; run the same command again to go on",
    ]


def test_a_summary_of_a_finished_job_leaves_nothing_to_do() -> None:
    job = JobStatistics(done=1, total=1, elapsed=Seconds(2))
    assert summary_lines(job, "a.jsonl") == ["answered 1 of 1 line, in 2.0 s", "answers: a.jsonl"]


def test_a_summary_of_answers_to_a_pipe_does_not_promise_to_go_on() -> None:
    lines = summary_lines(JobStatistics(done=1), "standard output", resumable=False)
    assert lines[-1] == "unfinished: only a file (-o) can be gone on with"


LOOP = Loop(
    Seconds(0.1),
    (Parts(*map(Seconds, (0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.01))),),
    (
        Hop(Seconds(0), Seconds(0.03), Seconds(0.001), Bytes(9), Bytes(9), None),
        Hop(Seconds(0), Seconds(0.01), Seconds(0.001), Bytes(9), Bytes(9), None),
    ),
)


def test_first_tokens_and_the_limit_are_part_of_a_plain_line() -> None:
    job = JobStatistics(
        first_tokens=FirstTokens(9, Seconds(0.8), Seconds(2.1)), limit="home-a: compute busy 97 %\n"
    )
    line = plain_line(job)
    assert "first token 0.8 s (95 %: 2.1 s)" in line
    assert line.endswith("limit: home-a: compute busy 97 %\N{REPLACEMENT CHARACTER}")


def test_a_summary_says_where_the_average_step_went_and_what_set_the_pace() -> None:
    job = JobStatistics(
        done=1,
        total=1,
        elapsed=Seconds(2),
        loop=LOOP,
        limit="latency: much",
        first_tokens=FirstTokens(1, Seconds(1), Seconds(1)),
    )
    assert summary_lines(job, "a.jsonl") == [
        "answered 1 of 1 line, in 2.0 s",
        "time to first token: 1.0 s (95 %: 1.0 s)",
        "average step: 100 ms: compute 50 %, latency 40 %, waiting 10 %",
        "limit over the run: latency: much",
        "answers: a.jsonl",
    ]


def test_a_run_that_guesses_says_what_came_of_it() -> None:
    job = JobStatistics(
        done=1,
        total=1,
        elapsed=Seconds(10),
        drafts=Drafts(1000, 1840, 4000, 840, 1.25),
        generated_tokens=1850,
    )
    assert "1.84 tokens a pass" in plain_line(job)
    assert (
        "drafts: 1.84 tokens a pass, 840 of 4,000 guesses accepted (21 %), drafter busy 12 %"
        in summary_lines(job, "a.jsonl")
    )
    nothing = JobStatistics(elapsed=Seconds(10), drafts=Drafts())
    assert "tokens a pass" not in plain_line(nothing)
    assert "drafts: no guesses were made" in summary_lines(nothing, "a.jsonl")
