"""A trace of `bbquic generate --trace` as a picture: `python -m bench.trace_picture TRACE OUT.svg`.

A row for each lane of each stage and for each hop, in the order in which a pack meets them; a slice for each
micro-batch and step, in a fill of its micro-batch; what a stage's device did not compute is marked as bubble.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LABELS, CHART, MARGIN = 190, 1110, 14  # pixels: the names' column, the time axis, around both
ROW, SUB_ROW = 24, 15  # pixels: a lane; each of those that a hop's overlapping flights are put in
LETTER = 6.2  # pixels: a letter of a label
LEAST_SLICE, LEAST_BUBBLE = 0.3, 3.0  # pixels; smaller ones are not drawn
TOUCH = 0.005  # milliseconds: moments are whole microseconds, so that neighbours may seem to overlap
LEAST_LANE = 0.002  # of the window: lanes used less (copies on a CPU) are left out
FILLS = ("#4477aa", "#ee8866", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#999933", "#bbbbbb")  # Paul Tol's
DARK = {"#4477aa", "#228833", "#aa3377"}  # fills that want white letters


@dataclass(frozen=True, slots=True)
class Slice:
    """A pack on a track, in milliseconds."""

    began: float
    ended: float
    micro_batch: int
    step: int


@dataclass(frozen=True, slots=True)
class Track:
    process: int
    name: str
    slices: tuple[Slice, ...]

    @property
    def is_flight(self) -> bool:
        return self.name.startswith("flight ")


@dataclass(frozen=True, slots=True)
class Trace:
    """Tracks in the order in which a pack meets them, and the processes' names."""

    processes: dict[int, str]
    tracks: tuple[Track, ...]


def read_trace(events: Sequence[dict[str, Any]]) -> Trace:
    """The slices of a trace by track. Raises: ValueError for what `--trace` does not write."""
    processes, lanes = {}, {}
    found: dict[tuple[int, int, str], list[Slice]] = {}
    begun: dict[tuple[int, str, int], dict[str, Any]] = {}
    for event in events:
        kind, process = event["ph"], event["pid"]
        if kind == "M":
            if event["name"] == "process_name":
                processes[process] = event["args"]["name"]
            elif event["name"] == "thread_name":
                lanes[process, event["tid"]] = event["args"]["name"]
        elif kind == "X":
            name = lanes[process, event["tid"]]
            key = (process, event["tid"], name)
            found.setdefault(key, []).append(_slice(event, event["ts"] + event["dur"]))
        elif kind == "b":
            begun[process, event["name"], event["id"]] = event
        elif kind == "e":
            start = begun.pop((process, event["name"], event["id"]))
            order = {"step": -1, "receive": 1, "send": 90}.get(event["name"], 99)
            found.setdefault((process, order, event["name"]), []).append(_slice(start, event["ts"]))
        else:
            raise ValueError(f"an event of kind {kind!r}")
    tracks = (
        Track(key[0], key[2], tuple(sorted(found[key], key=lambda s: s.began))) for key in sorted(found)
    )
    return Trace(processes, tuple(tracks))


def _slice(event: dict[str, Any], ended: float) -> Slice:
    args = event["args"]
    return Slice(event["ts"] / 1e3, ended / 1e3, args["micro_batch"], args["step"])


def draw(trace: Trace, start: float, window: float, title: str) -> str:
    """The SVG of `window` milliseconds from `start` on."""
    scale = CHART / window
    body: list[str] = []
    y = MARGIN + 40.0
    drawn_process = 0
    for track in trace.tracks:
        inside = [one for one in track.slices if one.ended > start and one.began < start + window]
        used = sum(min(one.ended, start + window) - max(one.began, start) for one in inside)
        if track.name == "step" or (used < LEAST_LANE * window and track.name != "compute"):
            continue
        if track.process != drawn_process and not track.is_flight:
            y += 8
            drawn_process = track.process
        rows = _rows(inside) or [[]]
        height = SUB_ROW if track.is_flight else ROW
        label = track.name if track.is_flight else f"{trace.processes[track.process]}: {track.name}"
        body.append(_text(MARGIN + LABELS - 8, y + height / 2 + 4, label, anchor="end"))
        for row in rows:
            body += _row(track, row, start, window, y, height, scale)
            y += height + 2
    axis = _axis(start, window, MARGIN + 40.0, y, scale)
    legend, bottom = _legend(trace, y + 34)
    head = _text(MARGIN, MARGIN + 14, title, size=15)
    return _document([head, *axis, *body, *legend], bottom + MARGIN)


def _row(
    track: Track, slices: Iterable[Slice], start: float, window: float, y: float, height: float, scale: float
) -> list[str]:
    parts = []
    free = start  # up to here the lane is drawn
    left = MARGIN + LABELS
    for one in slices:
        began, ended = max(one.began, start), min(one.ended, start + window)
        if track.name == "compute" and began > free:
            parts.append(
                _bubble(left + (free - start) * scale, y, (began - free) * scale, height, began - free)
            )
        free = max(free, ended)
        if (ended - began) * scale >= LEAST_SLICE:
            parts.append(_box(one, left + (began - start) * scale, y, (ended - began) * scale, height))
    if track.name == "compute" and free < start + window:
        rest = start + window - free
        parts.append(_bubble(left + (free - start) * scale, y, rest * scale, height, rest))
    return parts


def _rows(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices on as few rows as keep them apart."""
    rows: list[list[Slice]] = []
    for one in slices:
        row = next((row for row in rows if row[-1].ended <= one.began + TOUCH), None)
        if row is None:
            rows.append([one])
        else:
            row.append(one)
    return rows


def _box(one: Slice, x: float, y: float, width: float, height: float) -> str:
    fill = FILLS[one.micro_batch % len(FILLS)]
    label = next(
        (text for text in (f"mb {one.micro_batch}, step {one.step}", f"{one.micro_batch}:{one.step}",
                           f"{one.micro_batch}") if len(text) * LETTER < width - 2),
        "",
    )  # fmt: skip
    colour = "#ffffff" if fill in DARK else "#000000"
    words = _text(x + width / 2, y + height / 2 + 4, label, anchor="middle", colour=colour) if label else ""
    tip = f"micro-batch {one.micro_batch}, step {one.step}: {one.ended - one.began:.2f} ms"
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{height}" fill="{fill}" stroke="#333333" stroke-width="0.4"/>{words}</g>'
    )


def _bubble(x: float, y: float, width: float, height: float, duration: float) -> str:
    if width < LEAST_BUBBLE:
        return ""
    label = next((text for text in (f"bubble {duration:.0f} ms", "bubble") if len(text) * LETTER < width), "")
    words = (
        _text(x + width / 2, y + height / 2 + 4, label, anchor="middle", colour="#555555") if label else ""
    )
    return (
        f'<g><title>bubble: {duration:.2f} ms</title><rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{height}" fill="url(#bubble)" stroke="#999999" stroke-width="0.4"/>{words}</g>'
    )


def _axis(start: float, window: float, top: float, bottom: float, scale: float) -> list[str]:
    step = next(
        size for power in range(-3, 7) for size in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if window / size <= 12
    )  # fmt: skip
    parts = []
    for number in range(int(window / step) + 1):
        x = MARGIN + LABELS + number * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#dddddd"/>')
        parts.append(_text(x, bottom + 14, f"{number * step:g} ms", anchor="middle"))
    return parts


def _legend(trace: Trace, y: float) -> tuple[list[str], float]:
    numbers = sorted({one.micro_batch for track in trace.tracks for one in track.slices})
    parts, x = [], float(MARGIN + LABELS)
    for number in numbers[: len(FILLS)]:
        fill = FILLS[number % len(FILLS)]
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{fill}" stroke="#333333"/>')
        parts.append(_text(x + 20, y + 11, f"micro-batch {number}"))
        x += 115
    parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="url(#bubble)" stroke="#999999"/>')
    parts.append(_text(x + 20, y + 11, "bubble"))
    return parts, y + 20


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = "#000000", size: int = 11
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">'
        f"{escape(words)}</text>"
    )


def _document(parts: Sequence[str], height: float) -> str:
    width = LABELS + CHART + 3 * MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" font-family="sans-serif">\n'
        '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#cccccc" stroke-width="2"/></pattern></defs>\n'
        f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>\n'
    )
    return head + "\n".join(part for part in parts if part) + "\n</svg>\n"


def middle(trace: Trace, window: float) -> float:
    """Where a window lies in the middle of the trace, at which a job neither begins nor ends."""
    ends = [one.ended for track in trace.tracks for one in track.slices]
    return max(0.0, (max(ends, default=window) - window) / 2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.trace_picture", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--window", type=float, default=500.0, metavar="MS", help="how much to show")
    parser.add_argument("--start", type=float, metavar="MS", help="from where on; default: the middle")
    parser.add_argument("--title", default="")
    given = parser.parse_args(arguments)
    if given.window <= 0:
        parser.error("--window is above 0")
    trace = read_trace(json.loads(given.trace.read_text()))
    start = middle(trace, given.window) if given.start is None else given.start
    title = given.title or f"{given.trace.name}: {given.window:g} ms from {start:.0f} ms on"
    given.picture.write_text(draw(trace, start, given.window, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
