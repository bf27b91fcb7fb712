"""The transport against stock aioquic and against the ideal, side by side in one run.

`python -m bench.transport [--rounds N] [--quick] [--bars]`. METHODOLOGY.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.common import append_result, median, print_bars, spread
from bench.loopback import Bulk, Loopback
from bench.wan import WanUnavailable
from bench.wan.hosts import check_available
from bench.wire import cells as wire_cells
from bench.wire.cells import Wire

STACKS = ("ours", "stock")


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything: rounds a side, and megabytes a transfer, fewer for the slower side so that both
    take about as long."""

    rounds: int
    ours: int
    stock: int
    messages: int  # over links, counted, a cell and stack
    bulks: int
    only: tuple[str, ...] | None = None  # names of cells; None: all


FULL = Size(rounds=7, ours=60, stock=12, messages=20, bulks=3)
QUICK = Size(rounds=1, ours=3, stock=1, messages=2, bulks=1, only=("loopback_bulk", "long_silence"))


@dataclass
class Report:
    """What cells have measured: ratios by the names that bars have, and everything for the results file."""

    measured: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def loopback_bulk(report: Report, size: Size) -> None:
    """Megabytes at once between two processes, rounds of the two stacks alternating; the first round of each,
    in which windows open, is not counted."""
    amounts = {"ours": size.ours, "stock": size.stock}
    bulks: dict[str, list[Bulk]] = {stack: [] for stack in STACKS}
    with Loopback("ours") as ours, Loopback("stock") as stock:
        for _ in range(size.rounds + 1):
            for stack, loopback in (("ours", ours), ("stock", stock)):
                bulks[stack].append(loopback.transfer(amounts[stack]))
    counted = {stack: rounds[1:] for stack, rounds in bulks.items()}
    for stack, rounds in counted.items():
        figures = {
            "mbit": spread([bulk.mbit for bulk in rounds]),
            "send_cpu_s_per_gb": spread([bulk.send_cost for bulk in rounds]),
            "receive_cpu_s_per_gb": spread([bulk.receive_cost for bulk in rounds]),
        }
        report.details[f"loopback_bulk_{stack}"] = figures
        shown = [f"{name} {value['median']:.4g}" for name, value in figures.items()]
        print(f"loopback_bulk {stack}: {', '.join(shown)}")
    report.measured |= {
        "loopback_bulk_vs_stock": _ratio(counted, lambda bulk: bulk.mbit),
        "loopback_send_cpu_vs_stock": _ratio(counted, lambda bulk: bulk.send_cost),
        "loopback_receive_cpu_vs_stock": _ratio(counted, lambda bulk: bulk.receive_cost),
    }


def _ratio(rounds: dict[str, list[Bulk]], figure: Callable[[Bulk], float]) -> float:
    ours, stock = (median([figure(bulk) for bulk in rounds[stack]]) for stack in STACKS)
    return ours / stock


def over_links(report: Report, size: Size) -> None:
    """The cells on emulated links; left out, and said so, where there can be none."""
    try:
        check_available()
    except WanUnavailable as error:
        print(f"no emulated links here: {error}")
        return
    wire = Wire(messages=size.messages, bulks=size.bulks)
    for cell in wire_cells.CELLS:
        if size.only is None or cell.__name__ in size.only:
            cell(wire)
    report.measured |= wire.measured
    report.details |= wire.details


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"counted rounds a side ({FULL.rounds})")
    parser.add_argument("--only", help="cells by name, a,b: loopback_bulk, or those of bench.wire.cells")
    parser.add_argument("--quick", action="store_true", help="one small round: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    if args.rounds is not None:
        size = replace(size, rounds=args.rounds)
    if args.only is not None:
        size = replace(size, only=tuple(args.only.split(",")))
    report = Report()
    if size.only is None or loopback_bulk.__name__ in size.only:
        loopback_bulk(report, size)
    over_links(report, size)
    for name, value in report.measured.items():
        print(f"{name}: {value:.3g}")
    if not args.quick:
        append_result("transport", {"measured": report.measured, **report.details})
    return 0 if not args.bars or print_bars("transport", report.measured) else 1


if __name__ == "__main__":
    sys.exit(main())
