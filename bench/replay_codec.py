"""Whether the codec's switch is right: replays with it, and with the codec always off and always on.

`python -m bench.replay_codec [--only ENV,...] [--rounds N] [--quick] [--bars]`. METHODOLOGY.md says what the
figures mean.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from typing import Any

from bbquic.units import BytesPerSecond
from bench.common import append_result, median, print_bars, spread
from bench.replay import fastest_rate
from bench.stand_in.cell import CodecName
from bench.stand_in.cluster import Cluster
from bench.stand_in.paper import ENVIRONMENTS, experiment
from bench.stand_in.runs import Replay, Size
from bench.wan import Link, WanUnavailable
from bench.wan.hosts import check_available
from bench.wire.cells import moderation

MODEL = "llama_30b"
MODES: tuple[CodecName, ...] = ("raw", "REC", "auto")
SIZE = Size(warm_up=8, counted=8)  # the warm-up learns the shifts, 256 rows, and measures
STEPPED = Size(warm_up=8, counted=40)
STEPS = ((500.0, 0.0), (20.0, 4.0), (125.0, 12.0))  # Mbit/s, and from which second on
QUICK = Size(warm_up=1, counted=2)


def compare(name: str, size: Size, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of each mode in one environment, rounds interleaved."""
    e = experiment(MODEL, name)
    delay_ms = e.delay * 1e3
    link = Link(delay_ms=delay_ms) if name == "E1" else Link(rate_mbps=e.rate_mbps, delay_ms=delay_ms)
    rate = fastest_rate(delay_ms) if name == "E1" else BytesPerSecond(e.rate_mbps * 1e6 / 8)
    busy_relay = 200.0 if name == "E1" else moderation(link, len(e.blocks) - 1)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with Cluster.alike(len(e.blocks), link, moderation_us=busy_relay) as cluster:
        replay = Replay(cluster, e, rate, size)
        for _ in range(rounds):
            for mode in MODES:
                found[mode].append(replay.run(replay.best, mode).measured.tokens_per_second)
    return found


def stepped(size: Size, rounds: int) -> dict[str, list[float]]:
    """The same while the rate of all links steps 500, 20, 125 Mbit/s under way."""
    e = experiment(MODEL, "E3")
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    link = Link(rate_mbps=STEPS[0][0], delay_ms=e.delay * 1e3)
    with Cluster.alike(len(e.blocks), link, moderation_us=moderation(link, len(e.blocks) - 1)) as cluster:
        replay = Replay(cluster, e, BytesPerSecond(STEPS[0][0] * 1e6 / 8), size)
        for _ in range(rounds):
            for mode in MODES:
                cluster.set_links(rate_mbps=STEPS[0][0])
                timers = [
                    threading.Timer(at, cluster.set_links, kwargs={"rate_mbps": rate})
                    for rate, at in STEPS[1:]
                ]
                for timer in timers:
                    timer.start()
                found[mode].append(replay.run(4, mode).measured.tokens_per_second)
                for timer in timers:
                    timer.cancel()
                    timer.join()
    return found


def show(name: str, found: dict[str, list[float]], measured: dict[str, float]) -> dict[str, Any]:
    """Print an environment's row; the switch against the better of the two others, and the interval."""
    rates = {mode: spread(values) for mode, values in found.items()}
    better = max(("raw", "REC"), key=lambda mode: median(found[mode]))
    ratios = [auto / other for auto, other in zip(found["auto"], found[better], strict=True)]
    measured[f"switch_{name}"] = median(ratios)
    shown = ", ".join(f"{mode} {values['median']:.1f}" for mode, values in rates.items())
    print(
        f"{name}: tokens/s {shown}; switch against {better}: {median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )
    return {"tokens_per_second": rates, "ratios": spread(ratios), "better": better}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay_codec", description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join((*ENVIRONMENTS, 'stepped'))}: a,b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one small cell: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args(argv)
    everything = (*ENVIRONMENTS, "stepped")
    names = tuple(args.only.split(",")) if args.only else everything
    if unknown := set(names) - set(everything):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    try:
        check_available()
    except WanUnavailable as error:
        print(f"no emulated links here: {error}")
        return 0
    measured: dict[str, float] = {}
    details: dict[str, Any] = {}
    if args.quick:
        show("E4", compare("E4", QUICK, 1), measured)
        return 0
    for name in names:
        found = stepped(STEPPED, args.rounds) if name == "stepped" else compare(name, SIZE, args.rounds)
        details[name] = show(name, found, measured)
    append_result("replay_codec", {"measured": measured, "rounds": args.rounds, **details})
    return 0 if not args.bars or print_bars("replay_codec", measured) else 1


if __name__ == "__main__":
    sys.exit(main())
