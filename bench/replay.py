"""The paper's experiments on emulated links, with stand-ins for its GPUs, beside the physical bound.

`python -m bench.replay [--only MODEL,ENV,...] [--quick] [--bars] [--trace FILE]`. METHODOLOGY.md says
what the figures mean, and what is assumed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbquic.runtime.clocks import ClockEstimate
from bbquic.runtime.observer import Launch, Passage
from bbquic.runtime.trace import TraceWriter
from bbquic.units import Bytes, BytesPerSecond, Seconds
from bench.common import append_result, median, print_bars, spread
from bench.stand_in.activations import SHORT, widened
from bench.stand_in.cluster import Cluster
from bench.stand_in.cost import FIXED_SHARE, FULL_ROWS
from bench.stand_in.paper import ENVIRONMENTS, MODELS, OWN_DELAYS, experiment
from bench.stand_in.ratios import check_ratios
from bench.stand_in.runs import FreeRun, Replay, Run, Size, cost_of_two
from bench.wan import Link, Wan, WanUnavailable, mesh
from bench.wan.hosts import check_available
from bench.wire.cells import moderation
from bench.wire.pair import Pair

ASSUMPTION = f"assumed: t(rows) = t32 * ({FIXED_SHARE} + {1 - FIXED_SHARE:.2f} * rows / {FULL_ROWS})"
QUICK = Size(warm_up=1, counted=2, pairs=1)
BARRED = ("E3", "E4", "E5")
TRACED = ("llama_30b", "E4", 4)
PROBE = 8_000_000  # bytes of a message that measures what the machine carries


@dataclass
class Report:
    """Figures by the names that bars have, and whether they go into the results file."""

    keep: bool
    measured: dict[str, float] = field(default_factory=dict)
    worst_accounting: float = 0.0

    def add(self, kind: str, run: Run, rate: BytesPerSecond, **more: Any) -> None:
        """Print a run's row, and keep it."""
        self.worst_accounting = max(self.worst_accounting, run.measured.accounting.error)
        print(_row(kind, run, rate), flush=True)
        if self.keep:
            append_result("replay", {"kind": kind, **_figures(run, rate), **more})


def _row(kind: str, run: Run, rate: BytesPerSecond) -> str:
    e, m = run.experiment, run.measured
    batch, count = run.cell.batch, run.cell.micro_batches
    limit = run.pipeline.limit(batch, count)
    row = (
        f"{kind} {e.model} {e.environment} {rate * 8 / 1e6:.0f} Mbit/s {e.delay * 1e3:.0f} ms "
        f"B={batch} M={count}: "
        f"step {m.step * 1e3:.0f} ms, bound {run.bound * 1e3:.0f} ({limit}), x{run.ratio:.3f}; "
        f"{m.tokens_per_second:.1f} tok/s, parts off by {m.accounting.error:.1%}"
    )
    if kind != "free":
        paper = f"{e.paper_tokens_per_s:.0f} tok/s without micro-batches"
        if not math.isnan(e.paper_tokens_per_s_microbatch):
            paper += f", {e.paper_tokens_per_s_microbatch:.0f} with"
        rest = f"{e.paper_unexplained * 1e3:.0f} of its {e.paper_step * 1e3:.0f} ms unexplained"
        row += f" | paper {paper}; {rest}"
    return row


def _figures(run: Run, rate: BytesPerSecond) -> dict[str, Any]:
    e, m = run.experiment, run.measured
    with_micro_batches = e.paper_tokens_per_s_microbatch
    return {
        "model": e.model,
        "environment": e.environment,
        "rate_mbps": rate * 8 / 1e6,
        "delay_ms": e.delay * 1e3,
        "batch": run.cell.batch,
        "micro_batches": run.cell.micro_batches,
        "step_s": spread(m.steps),
        "bound_s": run.bound,
        "tokens_per_s": m.tokens_per_second,
        "parts_s": m.accounting.parts,
        "accounting_error": m.accounting.error,
        "paper": {
            "tokens_per_s": e.paper_tokens_per_s,
            "tokens_per_s_microbatch": None if math.isnan(with_micro_batches) else with_micro_batches,
            "unexplained_s": e.paper_unexplained,
        },
    }


def fastest_rate(delay_ms: float) -> BytesPerSecond:
    """What this machine carries between two hosts when no link limits it: a large message, median of 5."""
    link = Link(delay_ms=delay_ms)
    with Wan(mesh("a", "b", link=link), moderation_us=200.0) as wan, Pair(wan, "ours") as pair:
        pair.connect()
        times = [pair.send(PROBE) for _ in range(6)]
    return BytesPerSecond(PROBE / (median(times[1:]) - delay_ms / 1e3))


def check_stand_ins(hidden_sizes: Sequence[int]) -> None:
    """Raises: AssertionError where the stand-ins' messages do not compress as real ones do."""
    for hidden in hidden_sizes:
        for dtype in SHORT:
            p, h8 = check_ratios(dtype, widened(dtype, hidden, 32))
            print(f"stand-in {hidden} {dtype}: P {p:.1f} %, H8 {h8:.1f} %")


def fixed_batch(replay: Replay, rate: BytesPerSecond, report: Report, choices: Sequence[int]) -> None:
    """The paper's batch by M: the best one against its bound, and what it gains over M = 1 in E5."""
    e, runs = replay.experiment, {}
    for micro_batches in choices:
        runs[micro_batches] = replay.run(micro_batches)
        report.add("batch", runs[micro_batches], rate)
    if replay.best not in runs or 1 not in runs:
        return
    best, one = runs[replay.best], runs[1]
    if e.environment in BARRED:
        report.measured[f"step_{e.name}"] = best.ratio
    if e.environment == "E5":
        possible_gain = one.bound - best.bound
        report.measured[f"gain_{e.name}"] = (one.measured.step - best.measured.step) / possible_gain


def pairs(replay: Replay, rate: BytesPerSecond, report: Report) -> None:
    """What M = 2 costs where nothing is far away."""
    done = replay.pairs()
    for number, pair in enumerate(done):
        for run in pair:
            report.add("pair", run, rate, pair=number)
    lost = cost_of_two(done)
    name = f"two_cost_{replay.experiment.name}"
    report.measured[name] = lost["median"]
    print(
        f"{name}: {lost['median']:+.3f} of tokens/s "
        f"({lost['min']:+.3f} to {lost['max']:+.3f}, {len(done)} pairs)"
    )


def free_batch(replay: Replay, rate: BytesPerSecond, report: Report) -> None:
    """The batch that 16 GB of KV a node allow, or as much of it as the bench waits for."""
    free: FreeRun = replay.free()
    report.add("free", free.run, rate, allowed=free.allowed, allowed_tokens_per_s=free.allowed_rate)
    e = replay.experiment
    report.measured[f"free_{e.name}"] = free.share
    if free.is_cut:
        print(
            f"free {e.name}: memory allows {free.allowed} sequences (bound {free.allowed_rate:.0f} tok/s); "
            f"cut to {free.run.cell.batch}, since a step would last longer than the bench waits"
        )


def environment(name: str, models: Sequence[str], size: Size, report: Report, *, quick: bool) -> None:
    """All of one environment's cells, on one set of processes."""
    delay_ms = experiment(MODELS[0], name).delay * 1e3
    stated = experiment(MODELS[0], name).rate_mbps
    link = Link(delay_ms=delay_ms) if name == "E1" else Link(rate_mbps=stated, delay_ms=delay_ms)
    rate = fastest_rate(delay_ms) if name == "E1" else BytesPerSecond(stated * 1e6 / 8)
    if name == "E1":
        print(
            f"E1 at the fastest rate this machine carries, {rate * 8 / 1e6:.0f} Mbit/s, "
            f"not the paper's {stated:.0f}"
        )
    hosts = max(len(experiment(model, name).blocks) for model in models)
    busy_relay = 200.0 if name == "E1" else moderation(link, hosts - 1)
    with Cluster.alike(hosts, link, moderation_us=busy_relay) as cluster:
        for model in models:
            replay = Replay(cluster, experiment(model, name), rate, size)
            cluster.set_links(delay_ms=replay.experiment.delay * 1e3)
            fixed_batch(
                replay, rate, report, [1, replay.best] if quick or name == "E2" else replay.neighbours()
            )
            if quick or model == OWN_DELAYS:
                continue  # their rates and computes are those of llama_30b
            if name == "E1":
                pairs(replay, rate, report)
            if name in BARRED:
                free_batch(replay, rate, report)
        print(f"{name}: the emulator was {cluster.wan.relay_statistics().late_us_max:.0f} us late at most")


def trace(file: Path) -> None:
    """One run of TRACED as a Chrome trace, warm-up and all; bench.trace_picture draws it."""
    model, name, micro_batches = TRACED
    e = experiment(model, name)
    rate = BytesPerSecond(e.rate_mbps * 1e6 / 8)
    with Cluster.alike(len(e.blocks), Link(rate_mbps=e.rate_mbps, delay_ms=e.delay * 1e3)) as cluster:
        run = Replay(cluster, e, rate, Size()).run(micro_batches)
    print(_row("trace", run, rate))
    start = Seconds(min(one.sent for one in run.passes))
    clock = ClockEstimate(start, Seconds(0.0), Seconds(0.0), 0.0, 0.0)  # all hosts share one
    nodes = [timing.node for timing in run.passes[0].timings]
    writer = TraceWriter(file, nodes, start)
    for one in run.passes:
        launch = Launch(Seconds(one.sent), one.tokens, one.tokens, Bytes(one.size), ())
        passage = Passage(one.micro_batch, one.step, launch, one.timings, Seconds(one.received), one.tokens)
        writer.record(passage, [clock] * len(nodes))
    writer.close()


def main(argv: Sequence[str] | None = None) -> int:
    everything = (*MODELS, OWN_DELAYS)
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join((*everything, *ENVIRONMENTS))}: a,b")
    parser.add_argument("--quick", action="store_true", help="one small cell: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    parser.add_argument(
        "--trace", type=Path, help="run one cell (LLaMA-30B, E4, M = 4) and write a Chrome trace"
    )
    args = parser.parse_args(argv)
    only = set(args.only.split(",")) if args.only else set()
    if unknown := only - {*everything, *ENVIRONMENTS}:
        parser.error(f"no such model or environment: {', '.join(sorted(unknown))}")
    models = [one for one in everything if not only & set(everything) or one in only]
    environments = [one for one in ENVIRONMENTS if not only & set(ENVIRONMENTS) or one in only]
    if args.quick:
        models, environments = ["falcon_7b"], ["E3"]
    try:
        check_available()
    except WanUnavailable as error:
        print(f"no emulated links here: {error}")
        return 0
    if args.trace is not None:
        trace(args.trace)
        return 0
    print(ASSUMPTION)
    report = Report(keep=not args.quick)
    check_stand_ins(sorted({experiment(model, "E1").hidden for model in models}))
    for name in environments:
        environment(name, models, QUICK if args.quick else Size(), report, quick=args.quick)
    report.measured["accounting_worst"] = report.worst_accounting
    for bar, value in report.measured.items():
        print(f"{bar}: {value:.3g}")
    return 0 if not args.bars or print_bars("replay", report.measured) else 1


if __name__ == "__main__":
    sys.exit(main())
