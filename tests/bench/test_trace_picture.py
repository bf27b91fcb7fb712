"""A trace as a picture: well-formed, every pack in it, and bubbles where a device had nothing to do."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from bench.trace_picture import draw, main, read_trace

from bbquic.runtime.clocks import ClockEstimate
from bbquic.runtime.observer import Launch, Passage
from bbquic.runtime.timing import StageTiming
from bbquic.runtime.trace import TraceWriter
from bbquic.units import Bytes, Seconds

SVG = "{http://www.w3.org/2000/svg}"
CLOCK = ClockEstimate(Seconds(0), Seconds(0), Seconds(0), 0.0, 0.0)
MARKS = (100, 200, 5_000, 5_000, 8_000, 38_000, 38_500, 39_000, 43_000, 43_500)  # computes for 30 ms


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten steps of two micro-batches over two stages; each stage computes 60 ms of every 100."""
    writer = TraceWriter(tmp_path / "trace.json", ["home-a", "<cloud&b>"], Seconds(0.0))
    for number in range(20):
        at = number * 0.05
        timings = tuple(
            StageTiming(node, at + place * 0.06 + 0.01, MARKS, 100, 50, 0.001)
            for place, node in enumerate(("home-a", "<cloud&b>"))
        )
        launch = Launch(Seconds(at), 8, 8, Bytes(90), ())
        writer.record(
            Passage(number % 2, number // 2, launch, timings, Seconds(at + 0.13), 8), (CLOCK, CLOCK)
        )
    writer.close()
    return writer.path


def test_a_picture_is_made_by_one_command(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    assert main([str(trace), str(picture), "--window", "250", "--start", "200", "--title", "a <title>"]) == 0
    root = ElementTree.fromstring(picture.read_text())
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert "a <title>" in words
    assert "home-a: compute" in words
    assert "<cloud&b>: compute" in words
    assert "flight home-a -> <cloud&b>" in words
    assert "bubble 20 ms" in words
    assert "mb 0, step 3" in words


def test_the_window_holds_what_happened_in_it(trace: Path) -> None:
    read = read_trace(json.loads(trace.read_text()))
    compute = next(track for track in read.tracks if track.name == "compute")
    assert len(compute.slices) == 20
    root = ElementTree.fromstring(draw(read, 0.0, 100.0, ""))
    tips = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert sum(tip.startswith("bubble: 18") for tip in tips) == 1, "before the first pack"
    assert not any("step 5" in tip for tip in tips)


def test_an_event_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        read_trace([{"ph": "s", "pid": 1}])
