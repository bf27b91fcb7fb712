"""When each answer of a job is complete, by what pays and without guesses: the paper's figure 12, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from xml.sax.saxutils import escape

from bbquic.model.directory import ModelDirectory
from bench.common import median
from bench.guessing.home import Mode, Told, Work
from bench.guessing.jobs import BATCH, QUICK, QUICK_ROUND_TRIP, RATE, ROUND_TRIP, check_same_job, prompts
from bench.guessing.nodes import RealNodes

ANSWER = 96  # tokens at most
MODES: tuple[Mode, ...] = ("off", "auto")
NAMES = {"off": "without guesses", "auto": "with guesses where they pay"}
COLOURS = {"off": "#ee8866", "auto": "#4477aa"}  # Paul Tol's
WIDTH, HEIGHT, LEFT, TOP, GAP = 470, 300, 60, 96, 90  # pixels: of a panel, and around it


@dataclass(frozen=True, slots=True)
class Times:
    """Of one job, in the order of prompts: seconds from its start to each answer's end, and from the answer's
    first token to its last."""

    ended: tuple[float, ...]
    lasted: tuple[float, ...]

    @classmethod
    def of(cls, told: Told) -> Times:
        return cls(
            tuple(line.ended for line in told.lines), tuple(line.ended - line.began for line in told.lines)
        )


def completion(nodes: RealNodes, directory: ModelDirectory, *, quick: bool) -> dict[Mode, Times]:
    """A job of both kinds of prompts in turn, whose finished rows are refilled at once, either way.

    Raises: AssertionError where a token differs.
    """
    pairs = zip(prompts(directory, "quoting"), prompts(directory, "ordinary"), strict=True)
    mixed = tuple(chain.from_iterable(pairs))
    nodes.at(RATE, QUICK_ROUND_TRIP if quick else ROUND_TRIP)
    told = {}
    for mode in MODES:
        work = Work(
            mixed[: QUICK if quick else None], 3 if quick else ANSWER, QUICK if quick else BATCH, mode
        )
        told[mode] = nodes.run(work)
    check_same_job(told["off"], told["auto"])
    return {mode: Times.of(told[mode]) for mode in MODES}


def show(found: Mapping[Mode, Times]) -> str:
    """A line for each of the two."""
    return "\n".join(
        f"{NAMES[mode]}: {len(times.ended)} answers in {max(times.ended):.1f} s, half of them by "
        f"{median(times.ended):.1f} s; one takes {median(times.lasted):.1f} s (median), "
        f"{max(times.lasted):.1f} s at most"
        for mode, times in found.items()
    )


def draw(found: Mapping[Mode, Times]) -> str:
    """The picture: answers complete by time, and how long each took."""
    count = len(found["off"].ended)
    caption = (
        f"{count} answers of SmolLM2-135M on two nodes, {RATE:.0f} Mbit/s and {ROUND_TRIP:.0f} ms apart, "
        f"{BATCH} rows: when they are complete"
    )
    ended = {mode: times.ended for mode, times in found.items()}
    lasted = {mode: times.lasted for mode, times in found.items()}
    left = _panel(0, "seconds since the job began", "answers complete", ended)
    right = _panel(
        1, "seconds from an answer's first token to its last", "answers that took no longer", lasted
    )
    body = [_text(14, 28, caption, size=15), *_legend(), *left, *right]
    width, height = 2 * WIDTH + LEFT + GAP + 30, TOP + HEIGHT + 60
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif">'
    )
    return "\n".join((head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *body, "</svg>\n"))


def _legend() -> list[str]:
    parts, x = [], LEFT
    for mode in MODES:
        parts.append(f'<rect x="{x}" y="42" width="14" height="14" fill="{COLOURS[mode]}"/>')
        parts.append(_text(x + 20, 53, NAMES[mode]))
        x += 190
    return parts


def _panel(place: int, x_name: str, y_name: str, series: Mapping[Mode, Sequence[float]]) -> list[str]:
    """Each series as a staircase: how many of its values are at most x."""
    left, bottom = LEFT + place * (WIDTH + GAP), TOP + HEIGHT
    count = max(map(len, series.values()))
    most = max(map(max, series.values()))
    across, up = WIDTH / most, HEIGHT / count
    parts = [
        f'<path d="M{left} {TOP} V{bottom} H{left + WIDTH}" fill="none" stroke="#333333"/>',
        _text(left + WIDTH / 2, bottom + 36, x_name, anchor="middle"),
        _text(left - 8, TOP - 8, y_name, anchor="start"),
    ]
    for value in _ticks(most):
        x = left + value * across
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(_text(x, bottom + 16, f"{value:g}", anchor="middle"))
    parts += [_text(left - 8, bottom - at * up + 4, f"{at:g}", anchor="end") for at in _ticks(count)]
    for mode, values in series.items():
        path = [f"M{left} {bottom}"]
        for number, value in enumerate(sorted(values), 1):
            path.append(f"H{left + value * across:.1f} V{bottom - number * up:.1f}")
        colour = COLOURS[mode]
        parts.append(f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 up to it, eight at most."""
    sizes = (factor * 10.0**power for power in range(-3, 7) for factor in (1, 2, 5))
    step = next(size for size in sizes if most / size <= 8)
    return [number * step for number in range(int(most / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#000000" font-size="{size}">'
        f"{escape(text)}</text>"
    )
