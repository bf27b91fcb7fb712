"""The views, drawn to memory or to a real pseudo-terminal."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from bbquic.cli.figures import plain_line
from bbquic.cli.render import (
    LiveView,
    PlainView,
    View,
    draw_cluster,
    draw_job,
    make_console,
    make_view,
    print_error,
    print_note,
    print_summary,
    showing,
)
from bbquic.errors import BBQuicError, ConfigError
from bbquic.runtime.accounting import Loop
from bbquic.runtime.telemetry import (
    ClusterStatistics,
    FirstTokens,
    HopStatistics,
    JobStatistics,
    NodeStatistics,
    StageStatistics,
)
from bbquic.runtime.timing import Hop, Parts
from bbquic.units import Bytes, BytesPerSecond, Seconds

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

SPLIT = Parts(*map(Seconds, (0.001, 0.002, 0.0, 0.045, 0.0, 0.003, 0.009)))
LOOP = Loop(
    Seconds(0.1),
    (SPLIT,),
    (
        Hop(Seconds(0), Seconds(0.02), Seconds(0.001), Bytes(9), Bytes(9), None),
        Hop(Seconds(0), Seconds(0.02), Seconds(0.001), Bytes(9), Bytes(9), None),
    ),
)
JOB = JobStatistics(
    done=412,
    total=1000,
    decode_tokens_per_second=38.2,
    in_flight_sequences=16,
    eta=Seconds(200),
    waiting_for="node berlin: its answer to step 12",
    hops=(
        HopStatistics(
            *("here", "paris", "0-14", Seconds(0.012), Bytes(12_000_000), 99, BytesPerSecond(1.2e6)),
            *(BytesPerSecond(25e6), False, 0.001, Bytes(18_000_000), Seconds(0.001), Seconds(0.0213)),
            *(Seconds(0.0004), 0.05, "H8", "H8 leaves 67%"),
        ),
        HopStatistics("paris", "berlin", "15-29", Seconds(0.031), Bytes(9_000_000), 99, None),
        HopStatistics("berlin", "here", None, None, Bytes(0), 0, None),
    ),
    stages=(
        StageStatistics("paris", 0, 14, Seconds(0.045), Seconds(0.001), 0.93, SPLIT, (0, 2, 0, 1)),
        StageStatistics("berlin", 15, 29, None, None, None),
    ),
    loop=LOOP,
    first_tokens=FirstTokens(99, Seconds(0.8), Seconds(2.1)),
    limit="paris: compute busy 93 % (45.0 ms a step)",
    decisions=("the oldest", "2 micro-batches in place of 4", "2 micro-batches, 61 ms a step"),
)


def terminal(*, width: int = 100, colours: bool = False) -> Console:
    system = "truecolor" if colours else None
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=system)  # type: ignore[arg-type]


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(job: JobStatistics, width: int) -> str:
    console = terminal(width=width)
    console.print(draw_job(job, "answers.jsonl", width))
    return text_of(console)


def ticks(count: int) -> Callable[[float], Awaitable[None]]:
    """A pause that takes no time, and cancels the task that pauses once it has done so `count` times."""
    left = count

    async def pause(_: float) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise asyncio.CancelledError
        await asyncio.sleep(0)

    return pause


def live(source: Callable[[], JobStatistics], console: Console, **more: Any) -> LiveView:
    return LiveView(lambda width: draw_job(source(), "", width), console, **more)


def lines(source: Callable[[], JobStatistics]) -> Callable[[], list[str]]:
    return lambda: [plain_line(source())]


def all_of(terminal: int) -> str:
    """What was written to a pseudo-terminal whose other end is closed."""
    output = b""
    try:
        while part := os.read(terminal, 1 << 16):
            output += part
    except OSError:  # Linux's way to say that it was all
        pass
    return output.decode()


def run_to_its_end(view: View) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(view.run())


# A frame


def test_a_wide_frame_shows_all_that_is_known() -> None:
    frame = drawn(JOB, 100)
    for words in (
        "answers.jsonl",
        "412 of 1,000 (41 %)",
        "3 min 20 s left",
        "38.2 tok/s generated",
        "16 in flight",
    ):
        assert words in frame
    assert "waiting for node berlin: its answer to step 12" in frame
    assert "limit: paris: compute busy 93 % (45.0 ms a step)" in frame
    assert "decided: 2 micro-batches in place of 4" in frame
    assert "decided: 2 micro-batches, 61 ms a step" in frame
    assert "the oldest" not in frame
    assert "first token 0.8 s (95 %: 2.1 s)" in frame
    rows = [line.split() for line in frame.splitlines() if "->" in line]
    hop = "here -> paris 25.0 MB/s 12.0 ms 0.1 % 1.2 MB/s 5 % 12.0 MB H8 1.50 21.3 ±0.4 ms"
    assert " ".join(rows[0]) == hop
    assert rows[1][:3] == ["paris", "->", "berlin"]
    assert rows[2][:3] == ["berlin", "->", "here"]
    stage = next(line for line in frame.splitlines() if line.startswith("paris   0-14"))
    assert " ".join(stage.split()) == "paris 0-14 60.0 ms d....CCCCCCCCCCCCCCCCCCe 0 2 0 1 93 % 7 %"
    assert "step 100 ms ~~~" in frame
    assert "C compute" in frame


def test_a_frame_needs_no_colour() -> None:
    assert "\x1b" not in drawn(JOB, 100)


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 25, 12])
def test_no_line_of_a_frame_is_wider_than_the_terminal(width: int) -> None:
    assert max(len(line) for line in drawn(JOB, width).splitlines()) <= width


def test_a_narrow_frame_keeps_the_hops_and_drops_columns() -> None:
    header = next(line for line in drawn(JOB, 45).splitlines() if line.startswith("hop"))
    assert "link" in header
    assert "rtt" in header
    assert "ratio" not in header
    assert sum("->" in line for line in drawn(JOB, 45).splitlines()) == 3 + 1  # hops, and why one compresses


def test_a_job_whose_length_is_not_known_yet_has_no_bar() -> None:
    frame = drawn(replace(JOB, total=None, eta=None), 80)
    assert frame.startswith("412 lines")


def test_an_empty_job_can_be_drawn() -> None:
    assert "0 of 0" in drawn(JobStatistics(total=0), 80)


def test_names_cannot_steer_the_terminal_or_the_drawing() -> None:
    evil = "\x1b[2J[bold]:smile:\r"
    job = replace(JOB, waiting_for=evil, hops=(replace(JOB.hops[0], source=evil),))
    frame = drawn(job, 100)
    assert "\x1b" not in frame
    assert "\r" not in frame
    assert "[bold]:smile:" in frame


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**9), st.none() | st.integers(0, 10**9), st.integers(1, 200), st.text(max_size=30))
def test_any_job_can_be_drawn_at_any_width(done: int, total: int | None, width: int, name: str) -> None:
    job = replace(JOB, done=done, total=total, waiting_for=name)
    drawn(job, width)


def node(name: str, **more: Any) -> NodeStatistics:
    return NodeStatistics(name, "127.0.0.1:1", **more)


CLUSTER = ClusterStatistics(
    (
        node(
            "paris",
            activity="computing micro-batch 1, step 7",
            since=Seconds(0.1),
            job="0" * 16,
            rtt=Seconds(0.012),
            offset=Seconds(0.0123),
            uncertainty=Seconds(0.0004),
            stage=JOB.stages[0],
            hop=JOB.hops[0],
        ),
        node("berlin", trouble="no answer for 10 s\x1b[2J"),
    ),
    (("0" * 16, "paris: compute busy 93 %"),),
)


@pytest.mark.parametrize("width", [160, 100, 60, 25])
def test_a_cluster_is_drawn_with_those_that_do_not_answer(width: int) -> None:
    console = terminal(width=width)
    console.print(draw_cluster(CLUSTER, width))
    frame = text_of(console)
    assert "\x1b" not in frame
    assert max(len(line) for line in frame.splitlines()) <= width
    assert "paris" in frame
    if width >= 100:
        assert "does not answer: no answer for 10 s" in frame
        assert "+12.3 ±0.4 ms" in frame
        assert "paris: compute busy 93 %" in frame
        assert "computing micro-batch 1, step 7" in frame


# The live view


def test_a_live_view_redraws_and_gives_the_cursor_back_when_it_is_cancelled() -> None:
    console = terminal()
    counts = iter(range(100))
    run_to_its_end(live(lambda: replace(JOB, done=next(counts)), console, pause=ticks(3)))
    output = text_of(console)
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    for count in range(5):  # at the start, after each pause, and as it ends
        assert f" {count} of 1,000" in output


def test_a_live_view_ends_on_the_last_figures() -> None:
    console = terminal()
    counts = iter(range(100))
    run_to_its_end(live(lambda: replace(JOB, done=next(counts)), console, pause=ticks(0)))
    assert " 1 of 1,000" in text_of(console)[text_of(console).index(" 0 of 1,000") :]


def test_a_live_view_gives_the_cursor_back_when_its_source_fails() -> None:
    console = terminal()
    frames = [JOB, JOB]
    with pytest.raises(IndexError):
        asyncio.run(live(frames.pop, console, pause=ticks(9)).run())
    assert text_of(console).rindex(SHOW_CURSOR) > text_of(console).rindex(HIDE_CURSOR)


def test_a_live_view_follows_the_terminal_when_it_is_resized() -> None:
    console = terminal(width=100)

    def source() -> JobStatistics:
        console.width = 30
        return JOB

    run_to_its_end(live(source, console, pause=ticks(1)))
    last = text_of(console)[text_of(console).rindex("412 of") :]
    assert "berlin" in last
    assert "ratio" not in last


def test_a_live_view_writes_to_a_real_terminal_and_leaves_standard_output_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = os.openpty()
    try:
        with os.fdopen(theirs, "w") as screen:
            console = Console(file=screen, width=100, height=40)
            assert console.is_terminal
            run_to_its_end(live(lambda: JOB, console, pause=ticks(1)))
        output = all_of(ours)
    finally:
        os.close(ours)
    assert "412 of 1,000" in output
    assert SHOW_CURSOR in output
    assert capfd.readouterr().out == ""


# The plain view


def test_a_plain_view_prints_a_line_after_each_interval() -> None:
    out = io.StringIO()
    counts = iter(range(100))
    run_to_its_end(PlainView(lines(lambda: replace(JOB, done=next(counts))), out, pause=ticks(3)))
    assert out.getvalue() == "".join(f"{plain_line(replace(JOB, done=n))}\n" for n in range(3))


def test_a_plain_view_pauses_as_long_as_it_is_told() -> None:
    asked = []

    async def pause(seconds: float) -> None:
        asked.append(seconds)
        raise asyncio.CancelledError

    run_to_its_end(PlainView(lines(lambda: JOB), io.StringIO(), interval=Seconds(30), pause=pause))
    assert asked == [30]


def test_a_plain_view_without_an_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="interval"):
        PlainView(lines(lambda: JOB), io.StringIO(), interval=Seconds(0))


def test_a_view_whose_reader_went_away_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    fd = io.FileIO(writer, "w")
    try:
        out = io.TextIOWrapper(fd, write_through=True)
        asyncio.run(PlainView(lines(lambda: JOB), out, pause=ticks(1)).run())
        out.detach()
    finally:
        fd.close()


# Choosing, and running beside the work


def test_off_a_terminal_the_view_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_view(lambda: JOB), PlainView)


def test_on_a_terminal_the_view_is_live_unless_lines_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    try:
        with os.fdopen(theirs, "w") as screen:
            monkeypatch.setattr(sys, "stderr", screen)
            assert isinstance(make_view(lambda: JOB), LiveView)
            assert isinstance(make_view(lambda: JOB, plain=True), PlainView)
            monkeypatch.setenv("TERM", "dumb")
            assert isinstance(make_view(lambda: JOB), PlainView)
    finally:
        os.close(ours)


def test_a_view_is_shown_for_as_long_as_the_body_runs() -> None:
    console = terminal()

    async def body() -> None:
        started = asyncio.Event()

        def source() -> JobStatistics:
            started.set()
            return JOB

        async with showing(live(source, console)):
            await started.wait()
            assert SHOW_CURSOR not in text_of(console)

    asyncio.run(body())
    assert text_of(console).rindex(SHOW_CURSOR) > text_of(console).rindex(HIDE_CURSOR)


def test_a_body_that_fails_gets_its_error_and_the_cursor_back() -> None:
    console = terminal()

    async def body() -> None:
        async with showing(live(lambda: JOB, console)):
            await asyncio.sleep(0)
            raise ConfigError("no")

    with pytest.raises(ConfigError):
        asyncio.run(body())
    assert SHOW_CURSOR in text_of(console)


# Single lines


def test_an_error_is_a_sentence_and_a_hint() -> None:
    console = make_console(io.StringIO())
    print_error(BBQuicError("peers.toml has no peer [b]'paris'[/b]", hint="add it"), console)
    assert text_of(console) == "error: peers.toml has no peer [b]'paris'[/b]\nhint: add it\n"


def test_an_error_without_a_hint_is_a_sentence() -> None:
    console = make_console(io.StringIO())
    print_error(BBQuicError("it broke"), console)
    assert text_of(console) == "error: it broke\n"


def test_an_error_is_one_line_whatever_a_peer_put_in_it() -> None:
    console = make_console(io.StringIO())
    print_error(BBQuicError("said: \x1b[31m\nhint: run this"), console)
    assert text_of(console).count("\n") == 1
    assert "\x1b" not in text_of(console)


def test_long_lines_are_left_whole_for_those_who_copy_or_search_them() -> None:
    console = make_console(io.StringIO())
    print_note("word " * 100, console)
    assert text_of(console).count("\n") == 1


def test_a_summary_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(JOB, "answers.jsonl")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "answered 412 of 1,000 lines" in captured.err
    assert "unfinished: 588 left; run the same command again to go on" in captured.err


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True)
    print_error(BBQuicError("it broke"), console)
    assert "\x1b[31m" not in text_of(console)
    assert "\x1b[1;31m" not in text_of(console)
    assert "error:" in text_of(console)
