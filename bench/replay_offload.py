"""LLaMA-30B on two GPUs that offload against three that do not, replayed beside the paper's figure 9.

`python -m bench.replay_offload [--only ENV,...] [--quick]`. METHODOLOGY.md says what the figures mean, and
what is fitted or assumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bbquic.plan.search import Plan
from bench.common import append_result
from bench.plan_emul.emulation import emulated
from bench.plan_emul.llama_30b import (
    BATCH,
    DEVICE_GB,
    FITTED,
    GPU_HOUR,
    TESTED,
    WITH,
    WITHOUT,
    best,
    extra,
    host_row,
    paper_step,
    published,
    scene,
)
from bench.stand_in.cell import Measured
from bench.wan import WanUnavailable
from bench.wan.hosts import check_available

REPLAYED = ("E3", "E4", "E5")  # E1 has no rate that a machine emulates, and E2 is at this one's limit
COUNTED = 8


@dataclass(frozen=True, slots=True)
class Case:
    """What is given to the planner; None: the best."""

    name: str
    batch: int | None
    micro_batches: int | None


CASES = (
    Case("paper", BATCH, 1),  # its figure 9 is without micro-batches
    Case("batch", BATCH, None),
    Case("free", None, None),
)


@dataclass(frozen=True, slots=True)
class Side:
    """A layout as planned and, where it ran, as measured."""

    plan: Plan
    measured: Measured | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.measured.tokens_per_second if self.measured else self.plan.prediction.tokens_per_second

    @property
    def per_dollar(self) -> float:
        """Tokens/s for a dollar an hour."""
        return self.tokens_per_second / (GPU_HOUR * len(self.plan.layout.stages))

    def __str__(self) -> str:
        layout, predicted = self.plan.layout, self.plan.prediction
        offloaded = "+".join(str(stage.offloaded) for stage in layout.stages)
        text = (
            f"{len(layout.stages)} GPUs B={layout.batch} M={layout.micro_batches} K={offloaded}: step "
            f"{predicted.step * 1e3:.0f} ms predicted"
        )
        if self.measured:
            ratio = self.measured.step / predicted.step
            text += f", {self.measured.step * 1e3:.0f} measured (x{ratio:.3f})"
        return f"{text}, {self.tokens_per_second:.1f} tok/s, {self.per_dollar:.1f} per $/h"

    def figures(self) -> dict[str, Any]:
        layout = self.plan.layout
        return {
            "batch": layout.batch,
            "micro_batches": layout.micro_batches,
            "offloaded": [stage.offloaded for stage in layout.stages],
            "predicted_step_s": self.plan.prediction.step,
            "step_s": self.measured.step if self.measured else None,
            "tokens_per_s": self.tokens_per_second,
            "tokens_per_s_per_dollar": self.per_dollar,
        }


def show_fit() -> dict[str, float]:
    """Print what was fitted, and what it makes of the paper's other steps; the errors by environment."""
    print(
        f"fitted on {FITTED}: attention on the CPU adds {extra() * 1e3:.0f} ms to a step of {BATCH}; "
        f"of GPUs with {DEVICE_GB:.0f} GB (assumed) that is {host_row() * 1e6:.0f} us a row and block"
    )
    errors = {}
    for name in TESTED:
        two = published(name).steps[1]
        errors[name] = paper_step(name) / two - 1
        print(
            f"the paper's own step on two GPUs in {name}: {paper_step(name) * 1e3:.0f} ms, "
            f"{two * 1e3:.0f} published ({errors[name]:+.1%})"
        )
    return errors


def compare(name: str, cases: Sequence[Case], *, replayed: bool, counted: int) -> dict[str, Any]:
    """An environment's rows, printed: two GPUs against three in each case."""
    where = scene(name)
    plans = {
        case: [best(where, nodes, case.batch, case.micro_batches) for nodes in (WITHOUT, WITH)]
        for case in cases
    }
    sides = {case: [Side(plan) for plan in pair] for case, pair in plans.items()}
    if replayed:
        with emulated(where, [plan.layout for pair in plans.values() for plan in pair]) as emulation:
            for case, pair in plans.items():
                sides[case] = [
                    Side(plan, emulation.run(plan.layout, "raw", counted=counted)) for plan in pair
                ]
    paper, found = published(name), {}
    for case, (without, offloading) in sides.items():
        gain = offloading.per_dollar / without.per_dollar
        print(
            f"{name} {case.name}: {without} | {offloading} | x{gain:.2f} per $/h; "
            f"paper {paper.without:.1f} to {paper.offloading:.1f}, x{paper.gain:.2f}",
            flush=True,
        )
        found[case.name] = {"without": without.figures(), "offload": offloading.figures(), "gain": gain}
    return {"replayed": replayed, **found, "paper": [paper.without, paper.offloading]}


def main(argv: Sequence[str] | None = None) -> int:
    everything = (FITTED, *TESTED)
    parser = argparse.ArgumentParser(prog="python -m bench.replay_offload", description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join(everything)}: a,b")
    parser.add_argument("--quick", action="store_true", help="one small cell: does it start?")
    args = parser.parse_args(argv)
    names = tuple(args.only.split(",")) if args.only else everything
    if unknown := set(names) - set(everything):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    try:
        check_available()
    except WanUnavailable as error:
        print(f"no emulated links here: {error}")
        return 0
    errors = show_fit()
    if args.quick:
        compare("E4", CASES[1:2], replayed=True, counted=2)
        return 0
    rows = {name: compare(name, CASES, replayed=name in REPLAYED, counted=COUNTED) for name in names}
    append_result("replay_offload", {"extra_s": extra(), "paper_errors": errors, "environments": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
