"""A trace's file: whole at every moment, in order, and no lane in two places at once."""

from __future__ import annotations

import json
import random
import resource
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from clock_helpers import Clock, timing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbquic.errors import ConfigError
from bbquic.runtime import trace as trace_module
from bbquic.runtime.clocks import MAX_DRIFT, ClockEstimate
from bbquic.runtime.observer import Launch, Passage
from bbquic.runtime.trace import TraceWriter
from bbquic.units import Bytes, Seconds

NODES = ("home-a", "cloud-b")
START = Seconds(0.0)
Event = dict[str, Any]


def passages(count: int, seed: int, clocks: tuple[Clock, ...]) -> list[Passage]:
    """Packs of three micro-batches through stages that compute one at a time, in simulated time."""
    draw = random.Random(seed)
    free = [0.0] * len(clocks)  # from when on a stage's device is
    inbound = [0.0] * len(clocks)  # and its inbound lane
    ready = [0.0] * 3
    made = []
    for number in range(count):
        batch = number % 3
        launched = now = ready[batch]
        timings = []
        for place, clock in enumerate(clocks):
            now += draw.uniform(0.001, 0.05)
            wait = max(0.0, inbound[place] - now)
            inbound[place] = now + wait + 0.0015
            began = max(inbound[place], free[place])
            took = draw.uniform(0.005, 0.03)
            lanes = (wait, 0.001, 0.0005, began - inbound[place], took, 0.0, 0.001, 0.002, 0.0)
            timings.append(timing(NODES[place], clock, now, lanes, to_wire=0.001))
            free[place] = began + took
            now = began + took + 0.003
        ready[batch] = now + 0.02
        launch = Launch(Seconds(launched), 8, 8 + number, Bytes(100), ())
        made.append(Passage(batch, number // 3, launch, tuple(timings), Seconds(ready[batch]), 8))
    return made


def estimates(clocks: tuple[Clock, ...], now: float, draw: random.Random) -> tuple[ClockEstimate, ...]:
    """As good as over the internet: milliseconds off, each time by others."""
    return tuple(
        ClockEstimate(
            Seconds(now),
            Seconds(clock.true_offset(now) + draw.uniform(-0.02, 0.02)),
            Seconds(0.02),
            0.0,
            MAX_DRIFT,
        )
        for clock in clocks
    )


def written(path: Path, count: int, seed: int) -> list[Event]:
    clocks = (Clock(5e4, 5e-5), Clock(-3.0, -5e-5))
    draw = random.Random(seed)
    writer = TraceWriter(path, NODES, START)
    for passage in passages(count, seed, clocks):
        writer.record(passage, estimates(clocks, passage.came, draw))
        json.loads(path.read_text())  # whole, whenever somebody looks or the run is killed
    writer.close()
    assert writer.trouble is None
    events: list[Event] = json.loads(path.read_text())
    return events


def by_track(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.integers(1, 60), st.integers(0, 2**32))
def test_slices_of_one_lane_never_overlap_though_the_clocks_are_guessed(
    tmp_path: Path, count: int, seed: int
) -> None:
    for slices in by_track(written(tmp_path / "trace.json", count, seed)).values():
        slices.sort(key=lambda event: float(event["ts"]))
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_every_pack_is_on_every_track_with_its_figures(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", 30, 1)
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    assert len(computed) == 60
    assert computed[0]["args"] == {
        "micro_batch": 0,
        "step": 0,
        "rows": 8,
        "tokens": 8,
        "raw": 1000,
        "sent": 500,
    }
    kinds = {event["cat"] for event in events if event["ph"] == "b"}
    assert kinds == {
        "step",
        "receive",
        "send",
        "flight coordinator -> home-a",
        "flight home-a -> cloud-b",
        "flight cloud-b -> coordinator",
    }


def test_what_begins_ends_and_not_before(tmp_path: Path) -> None:
    begun: dict[tuple[int, str, int], Event] = {}
    for event in written(tmp_path / "trace.json", 30, 2):
        if event["ph"] == "b":
            key = event["pid"], event["name"], event["id"]
            assert key not in begun
            begun[key] = event
        elif event["ph"] == "e":
            start = begun.pop((event["pid"], event["name"], event["id"]))
            assert start["cat"] == event["cat"]
            assert event["ts"] >= start["ts"]
    assert not begun


def test_processes_and_tracks_have_names(tmp_path: Path) -> None:
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"]
        for event in written(tmp_path / "trace.json", 1, 3)
        if event["ph"] == "M"
    }
    assert names[1, 0, "process_name"] == {"name": "coordinator"}
    assert names[3, 0, "process_name"] == {"name": "cloud-b"}
    assert names[2, 4, "thread_name"] == {"name": "compute"}


def test_a_run_without_a_pack_leaves_a_whole_trace(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", NODES, START)
    before = json.loads(writer.path.read_text())
    writer.close()
    writer.close()
    assert json.loads(writer.path.read_text()) == before


def test_a_pack_of_before_the_clocks_are_known_is_left_out(tmp_path: Path) -> None:
    clocks = (Clock(0.0), Clock(0.0))
    writer = TraceWriter(tmp_path / "trace.json", NODES, START)
    writer.record(passages(1, 0, clocks)[0], (None, None))
    writer.close()
    assert all(event["ph"] == "M" for event in json.loads(writer.path.read_text()))


def test_a_file_that_cannot_be_made_is_an_error_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the trace"):
        TraceWriter(tmp_path / "nowhere" / "trace.json", NODES, START)


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    writer = TraceWriter(Path("/dev/full"), NODES, START)
    assert writer.trouble is not None
    assert "No space left" in writer.trouble
    writer.record(passages(1, 0, (Clock(0.0), Clock(0.0)))[0], (None, None))
    writer.close()


def test_a_trace_whose_disk_fills_up_on_the_way_is_whole_up_to_there(tmp_path: Path) -> None:
    clocks = (Clock(0.0), Clock(0.0))
    writer = TraceWriter(tmp_path / "trace.json", NODES, START)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # the kernel writes up to there, then refuses, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        for passage in passages(100, 0, clocks):
            writer.record(passage, estimates(clocks, passage.came, random.Random(0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    writer.close()
    assert writer.trouble is not None
    assert "ends early" in writer.trouble
    assert len(json.loads(writer.path.read_text())) > 100


def test_a_trace_that_no_viewer_would_open_ends_early_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "MOST_BYTES", Bytes(100_000))
    clocks = (Clock(0.0), Clock(0.0))
    writer = TraceWriter(tmp_path / "trace.json", NODES, START)
    for passage in passages(300, 0, clocks):
        writer.record(passage, estimates(clocks, passage.came, random.Random(0)))
    writer.close()
    assert writer.trouble is not None
    assert writer.path.stat().st_size < 200_000
    assert len(json.loads(writer.path.read_text())) > 100
