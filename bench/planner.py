"""The planner against what its layouts give: predictions, choices, places, and changes under way.

`python -m bench.planner [--only PART,...] [--rounds N] [--quick] [--bars]`. METHODOLOGY.md says what the
figures mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bbquic.plan.cluster import COMMAND
from bench.common import append_result, median, print_bars, spread
from bench.plan_emul import calibration, choice, papers, place, prediction, traces
from bench.plan_emul.contenders import OURS, candidates
from bench.plan_emul.figures import Figures
from bench.plan_emul.predict import predict, shown
from bench.plan_emul.scenarios import all_scenarios, far_command
from bench.plan_sim import compare as plan_sim
from bench.plan_sim import traces as simulated_trace
from bench.plan_sim.speeds import helix_times, partition_times, planted, search_times
from bench.stand_in.activations import widened
from bench.stand_in.ratios import check_ratios
from bench.wan import WanUnavailable
from bench.wan.hosts import check_available


@dataclass
class Report:
    """Figures by the names that bars have, and more for the results file."""

    rounds: int
    quick: bool = False
    measured: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    _figures: Figures | None = None

    def figures(self) -> Figures:
        """Of this machine, measured once a run; without overheads where it is only to start."""
        if self._figures is None:
            self._figures = calibration.codecs_alone() if self.quick else calibration.calibrate()
            overhead = self._figures.overhead
            codecs = {
                way.value: f"{speed.ratio:.1%}, {_mbit(speed.encode)} and {_mbit(speed.decode)} Mbit/s"
                for way, speed in self._figures.codecs.items()
            }
            parts = dataclasses.asdict(overhead)
            self.details["overhead_s"] = parts
            self.details["codecs"] = codecs
            shares = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts.items())
            self.say(f"a pack's overhead: {shares}; codecs: {codecs}")
        return self._figures

    def say(self, line: str) -> None:
        print(line, flush=True)


def _mbit(seconds_a_byte: float) -> str:
    return f"{8e-6 / seconds_a_byte:.0f}"


def simulated(report: Report) -> None:
    """The planner's layouts beside the others' on random clusters, in simulation."""
    found = plan_sim.compare(20 if report.quick else 200, limit=1.0 if report.quick else 2.0, say=report.say)
    report.measured |= {f"sim_{name}": value for name, value in found.items()}


def simulated_traces(report: Report) -> None:
    """The controller under rates that change, in simulation, beside every setting that stays."""
    whole = {"stepping": simulated_trace.stepping, "evening": simulated_trace.evening}
    for name, run in whole.items():
        found = run(20.0) if report.quick else run()
        report.say(simulated_trace.summary(found))
        for key in ("of_phases", "worst_phase", "of_best"):
            report.measured[f"traces_{name}_{key}"] = found[key]
        report.details[f"traces_{name}"] = {key: found[key] for key in ("best", "best_by_phase", "reasons")}


def speeds(report: Report) -> None:
    """How long partition, search and Helix' program take, and what a search of 64 nodes loses."""
    report.measured |= partition_times() | search_times()
    if not report.quick:
        report.measured |= helix_times() | planted()


def predictions(report: Report) -> None:
    """Predicted and measured steps, and how pairs of layouts are ranked."""
    figures = report.figures()
    ran = []
    for one in prediction.run_all(
        figures, *((prediction.QUICK, 2) if report.quick else (prediction.SET_UPS, 8))
    ):
        report.say(str(one))
        ran.append(one)
    pairs, wrong = prediction.ranked(ran)
    for low, high in wrong:
        report.say(f"ranked wrong: {high} | {low}")
    report.measured["prediction_worst"] = max(abs(one.error) for one in ran)
    report.measured["prediction_set_ups"] = len({one.set_up for one in ran})
    report.measured["ranked_wrong"] = len(wrong)
    report.say(f"{pairs} pairs differ by more than 15 %, {len(wrong)} of them ranked wrong")
    report.details["prediction"] = {
        "errors": [round(one.error, 4) for one in ran],
        "runs": [str(one) for one in ran],
        "pairs": pairs,
    }
    published = list(papers.tables())
    for row in published:
        report.say(str(row))
    report.details["papers"] = [str(row) for row in published]


def choices(report: Report) -> None:
    """The planner's layout and the others' in every scenario."""
    figures = report.figures()
    scenarios = all_scenarios()[1:2] if report.quick else all_scenarios()
    for scene in scenarios:
        layouts = candidates(scene, figures)
        for name, layout in layouts.items():
            expected = predict(scene, figures, layout).tokens_per_second
            report.say(f"{scene.name} {name}: {shown(layout)}; predicted {expected:.1f} tok/s")
        found = choice.compare(scene, layouts, report.rounds, *((2,) if report.quick else ()))
        report.measured[f"choice_{scene.name}"] = found.ratio
        rates = {name: spread(values) for name, values in found.rates.items()}
        report.details[f"choice_{scene.name}"] = {
            "tokens_per_second": rates,
            "layouts": {name: shown(layout) for name, layout in layouts.items()},
        }
        medians = ", ".join(f"{name} {values['median']:.1f}" for name, values in rates.items())
        report.say(f"{scene.name}: tokens/s {medians}; {found.ratio:.3f} of {found.best_other}")


def places(report: Report) -> None:
    """A coordinator 80 ms from the first stage against one on its node; and where the planner puts it."""
    scene = far_command()
    ours = candidates(scene, report.figures())[OURS]
    report.measured["place_chosen"] = float(ours.coordinator != COMMAND)
    found = place.compare(scene, ours, (report.rounds + 1) // 2, 4 if report.quick else 20)
    report.measured["place_ratio"] = found.ratio
    report.details["place"] = {"command_s": spread(found.command), "stage_s": spread(found.stage)}
    report.say(
        f"far command: {shown(ours)}; a job takes {median(found.command):.2f} s with the coordinator in the "
        f"command's process, {median(found.stage):.2f} s on the stage's node, x{found.ratio:.3f}"
    )


def controllers(report: Report) -> None:
    """Rates that change under way: what is chosen live against every setting that stays."""
    for trace in traces.TRACES:
        tried = traces.SETTINGS
        if report.quick:
            trace = traces.Trace("quick", trace.scene, ((60, 1.0), (20, 1.0)), trace.links)
            tried = tried[-2:]
        found = traces.compare(trace, tried, (report.rounds + 1) // 2, report.say)
        phases = found.phase_ratios()
        report.measured[f"controller_{trace.name}"] = found.ratio
        report.measured[f"controller_{trace.name}_phases"] = min(phases)
        report.details[f"controller_{trace.name}"] = {
            "whole": {name: spread(values) for name, values in found.whole.items()},
            "phases": found.phases,
            "phase_ratios": phases,
        }
        shares = ", ".join(f"{share:.2f}" for share in phases)
        report.say(
            f"{trace.name}: {found.ratio:.3f} of {found.best}, the best that stays; by phases {shares} of "
            "each phase's best"
        )
        if report.quick:
            return


EMULATED: Mapping[str, Callable[[Report], None]] = {
    "prediction": predictions,
    "choice": choices,
    "place": places,
    "controller": controllers,
}
SIMULATED: Mapping[str, Callable[[Report], None]] = {
    "sim": simulated,
    "traces": simulated_traces,
    "speeds": speeds,
}
PARTS = {**SIMULATED, **EMULATED}
QUICK = ("prediction",)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.planner", description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}: a,b")
    parser.add_argument("--rounds", type=int, default=7, help="of interleaved runs (default 7)")
    parser.add_argument("--quick", action="store_true", help="small: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only else QUICK if args.quick else tuple(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    report = Report(rounds=1 if args.quick else args.rounds, quick=args.quick)
    for name in names:
        if name in EMULATED and not _there_are_links():
            continue
        PARTS[name](report)
    for bar, value in report.measured.items():
        print(f"{bar}: {value:.3g}")
    if not args.quick:
        append_result(
            "planner", {"rounds": args.rounds, "measured": report.measured, "details": report.details}
        )
    return 0 if not args.bars or print_bars("planner", report.measured) else 1


def _there_are_links() -> bool:
    try:
        check_available()
    except WanUnavailable as error:
        print(f"no emulated links here: {error}")
        return False
    check_ratios("bfloat16", widened("bfloat16", 4096, 32))
    return True


if __name__ == "__main__":
    sys.exit(main())
