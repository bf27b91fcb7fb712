"""The transport against stock aioquic and against the ideal, side by side in one run.

`python -m bench.transport [--rounds N] [--quick] [--bars]`. METHODOLOGY.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common import append_result, median, print_bars, spread
from bench.loopback import Bulk, Loopback

STACKS = ("ours", "stock")


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything: rounds a side, and megabytes a transfer, fewer for the slower side so that both
    take about as long."""

    rounds: int
    ours: int
    stock: int


FULL = Size(rounds=7, ours=60, stock=12)
QUICK = Size(rounds=1, ours=3, stock=1)


@dataclass
class Report:
    """What cells have measured: ratios by the names that bars have, and everything for the results file."""

    measured: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


Cell = Callable[[Report, Size], None]


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


CELLS: tuple[Cell, ...] = (loopback_bulk,)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"counted rounds a side ({FULL.rounds})")
    parser.add_argument("--quick", action="store_true", help="one small round: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    if args.rounds is not None:
        size = Size(args.rounds, size.ours, size.stock)
    report = Report()
    for cell in CELLS:
        cell(report, size)
    for name, value in report.measured.items():
        print(f"{name}: {value:.3g}")
    if not args.quick:
        append_result("transport", {"measured": report.measured, **report.details})
    return 0 if not args.bars or print_bars("transport", report.measured) else 1


if __name__ == "__main__":
    sys.exit(main())
