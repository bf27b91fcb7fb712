"""When guessing ahead pays, and that it never costs: stand-ins and a real model on emulated links,
simulations, and the paper.

`python -m bench.speculation [--only PART,...] [--rounds N] [--quick] [--bars] [--picture PATH]`.
METHODOLOGY.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bbquic.model.fetch import fetch_model
from bbquic.model.registry import ModelMissing, resolve_model, user_cache
from bench.common import append_result, median, print_bars, spread
from bench.guessing.cells import (
    GUESSES,
    RATES,
    ROUND_TRIPS,
    STAGES,
    Place,
    crossing,
    disagreement,
    places,
    predicted_crossing,
    ran,
)
from bench.guessing.completion import completion, draw
from bench.guessing.completion import show as show_completion
from bench.guessing.home import MODEL
from bench.guessing.jobs import BATCH, RATE, ROUND_TRIP, Gain, Kind, gain
from bench.guessing.never_slower import simulated
from bench.guessing.nodes import RealNodes
from bench.guessing.papers import everything, scan, show
from bench.guessing.real import Found, break_even_points
from bench.stand_in.cluster import Cluster
from bench.wan import Link, WanUnavailable
from bench.wan.hosts import check_available
from bench.wire.cells import moderation

REAL = ("real", "gain", "quoting", "completion")  # by a real model on real nodes
PARTS = ("paper", "simulated", "break_even", "emulated", *REAL)
ADAPTING = (  # Mbit/s, ms, rows
    Place(20, 50, 32),
    Place(125, 100, 4),
    Place(250, 10, 32),
    Place(50, 50, 4),
)
PASSES = 2000  # of a simulated cell: a job of some minutes
GAINS: dict[str, Kind] = {"gain": "ordinary", "quoting": "quoting"}
START = 40  # passes of an emulated cell before those that count


@dataclass
class Report:
    """Figures by the names that bars have, and what a result keeps beside them."""

    measured: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def note_real(self, found: Sequence[Found]) -> None:
        """Break-even points of a real model."""
        self.measured["real_worst"] = max(one.error for one in found)
        self.details["real"] = [asdict(one) for one in found]

    def note_gain(self, part: str, found: Gain) -> None:
        """What a job of real nodes gains by guessing where it pays."""
        print("\n".join((f"{part}: {found}", *(f"  {reason}" for reason in found.decisions))), flush=True)
        self.measured[f"{part}_{RATE:.0f}_{ROUND_TRIP:.0f}_{BATCH}"] = found.ratio
        self.details[part] = asdict(found)


def paper(report: Report, *, quick: bool) -> None:
    """The paper's gains and choices by its own equations."""
    found = [scan("of figure 11a", overhead=False)] if quick else everything()
    for one in found:
        print(show(one))
    report.details["paper"] = [asdict(one) for one in found]


def never_slower(report: Report, *, quick: bool) -> None:
    """Simulated cells, the worst first."""
    cells = []
    for number, cell in enumerate(simulated(200 if quick else PASSES)):
        cells.append(cell)
        if quick and number == 3:
            break
    cells.sort(key=lambda cell: cell.of_best)
    for cell in cells[:8]:
        print(cell)
    report.measured["simulated_least"] = cells[0].of_best
    report.measured["simulated_of_off_least"] = min(cell.of_off for cell in cells)
    report.details["simulated"] = {"cells": len(cells), "of_best": spread([cell.of_best for cell in cells])}


class Links:
    """Stand-ins on two hosts, whose links are set for each place."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def at(self, place: Place) -> Links:
        self._cluster.set_links(rate_mbps=place.rate_mbps, delay_ms=place.rtt_ms / 2)
        return self

    def run(self, place: Place, guesses: int, *, seed: int, adapts: bool = False, warm_up: int = 3) -> Any:
        cell = place.cell(guesses, adapts=adapts, warm_up=warm_up, seed=seed)
        return ran(cell, self._cluster.run(cell))


def break_even(links: Links, report: Report, *, quick: bool) -> None:
    """Each rate, round trip and batch with and without trees, and where the two are equal."""
    rows = {}
    for place in [next(places())] if quick else places():
        links.at(place)
        off, on = links.run(place, 0, seed=1), links.run(place, place.guesses, seed=1)
        measured, expected = on.tokens_per_second / off.tokens_per_second, place.speed_up(on.committed)
        rows[place] = (measured, expected, on.committed)
        print(
            f"{place.rate_mbps:.0f} Mbit/s {place.rtt_ms:.0f} ms B={place.batch} N={place.guesses} "
            f"a={on.committed:.2f}: x{measured:.3f}, predicted x{expected:.3f} "
            f"({off.tokens_per_second:.1f} tok/s without)",
            flush=True,
        )
    errors = [abs(measured / expected - 1) for measured, expected, _ in rows.values()]
    report.measured["speed_up_worst"] = max(errors)
    report.details["break_even"] = [{**asdict(place), "found": values} for place, values in rows.items()]
    if not quick:
        report.measured["crossing_worst"] = max(
            _crossing(rows, rtt, batch) for rtt in ROUND_TRIPS for batch in GUESSES
        )


def _crossing(rows: dict[Place, tuple[float, float, float]], rtt_ms: float, batch: int) -> float:
    here = [rows[Place(rate, rtt_ms, batch)] for rate in RATES]
    committed = median([a for *_, a in here])
    found = crossing(RATES, [measured for measured, *_ in here])
    expected = predicted_crossing(rtt_ms, batch, committed)
    off = disagreement(found, expected)
    print(
        f"{rtt_ms:.0f} ms B={batch}: crosses at {found:.1f} Mbit/s, predicted {expected:.1f}, "
        f"off by {off:.0%}"
    )
    return off


def emulated(links: Links, report: Report, rounds: int) -> None:
    """Off, always on and by what pays, in turn."""
    ratios_of = {}
    for place in ADAPTING:
        links.at(place)
        found: dict[str, list[float]] = {"off": [], "on": [], "auto": []}
        for number in range(rounds):
            found["off"].append(links.run(place, 0, seed=number).tokens_per_second)
            found["on"].append(links.run(place, place.guesses, seed=number).tokens_per_second)
            auto = links.run(place, place.guesses, seed=number, adapts=True, warm_up=START)
            found["auto"].append(auto.tokens_per_second)
        better = max(("off", "on"), key=lambda mode: median(found[mode]))
        ratios = [auto / other for auto, other in zip(found["auto"], found[better], strict=True)]
        gains = [auto / off for auto, off in zip(found["auto"], found["off"], strict=True)]
        name = f"{place.rate_mbps:.0f}_{place.rtt_ms:.0f}_{place.batch}"
        ratios_of[name] = {"better": better, "ratios": spread(ratios), "over_off": spread(gains)}
        print(
            f"{place.rate_mbps:.0f} Mbit/s {place.rtt_ms:.0f} ms B={place.batch}: by what pays against "
            f"{better} {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"against off {median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})",
            flush=True,
        )
        report.measured[f"emulated_{name}"] = median(ratios)
    report.details["emulated"] = ratios_of


def on_links(parts: Sequence[str], report: Report, rounds: int, *, quick: bool) -> None:
    """The parts that need emulated links."""
    link = Link(rate_mbps=RATES[0], delay_ms=ROUND_TRIPS[0] / 2)
    with Cluster.alike(STAGES, link, moderation_us=moderation(link, STAGES - 1)) as cluster:
        links = Links(cluster)
        if "break_even" in parts:
            break_even(links, report, quick=quick)
        if "emulated" in parts and not quick:
            emulated(links, report, rounds)


def on_nodes(parts: Sequence[str], report: Report, rounds: int, picture: Path | None, *, quick: bool) -> None:
    """The parts by a real model. A quick run fetches none."""
    cache = user_cache()
    try:
        directory = resolve_model(MODEL, cache) if quick else fetch_model(MODEL, cache, print)
    except ModelMissing:
        print(f"{MODEL} is not here: nothing by a real model")
        return
    with RealNodes() as nodes:
        if "real" in parts:
            report.note_real(list(break_even_points(nodes, directory, quick=quick)))
        for part, kind in GAINS.items():
            if part in parts and not (quick and part == "quoting"):  # the same as the other
                found = gain(nodes, directory, kind, 1 if quick else rounds, quick=quick)
                report.note_gain(part, found)
        if "completion" in parts:
            times = completion(nodes, directory, quick=quick)
            print(show_completion(times), flush=True)
            report.details["completion"] = {mode: asdict(one) for mode, one in times.items()}
            if picture is not None:
                picture.write_text(draw(times), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}: a,b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one small cell of each: does it start?")
    parser.add_argument("--picture", type=Path, help="where the completion times are drawn, an SVG")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args(argv)
    parts = tuple(args.only.split(",")) if args.only else PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    report = Report()
    if "paper" in parts:
        paper(report, quick=args.quick)
    if "simulated" in parts:
        never_slower(report, quick=args.quick)
    if {"break_even", "emulated"} & set(parts):
        try:
            check_available()
            on_links(parts, report, args.rounds, quick=args.quick)
        except WanUnavailable as error:
            print(f"no emulated links here: {error}")
    if set(REAL) & set(parts):
        try:
            check_available()
            on_nodes(parts, report, args.rounds, args.picture, quick=args.quick)
        except WanUnavailable as error:
            print(f"no emulated links here: {error}")
    for bar, value in report.measured.items():
        print(f"{bar}: {value:.3g}")
    if not args.quick:
        append_result("speculation", {"measured": report.measured, "rounds": args.rounds, **report.details})
    return 0 if not args.bars or print_bars("speculation", report.measured) else 1


if __name__ == "__main__":
    sys.exit(main())
