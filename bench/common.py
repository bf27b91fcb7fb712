"""What every bench does alike: medians, bars, and a line of results with commit and machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
BARS = ROOT / "bars.toml"
RESULTS = ROOT / "results"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median, 95th percentile and maximum, as results keep them."""
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "max": ordered[-1],
    }


def commit() -> str:
    """The commit measured, with `+` behind it where the tree differs from it; empty outside of git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names whose machine it is."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def append_result(name: str, result: Mapping[str, Any]) -> Path:
    """Append a run to bench/results/NAME.jsonl with its time, commit and machine; gives the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        **result,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return path


def print_bars(name: str, measured: Mapping[str, float], path: Path = BARS) -> bool:
    """Print `NAME measured required ok|short` for each bar of a bench; whether none falls short.

    A bar that was not measured falls short.
    """
    bars = tomllib.loads(path.read_text(encoding="utf-8")).get(name, {})
    good = True
    for bar, required in bars.items():
        value = measured.get(bar)
        least, most = required.get("at_least"), required.get("at_most")
        met = value is not None and (least is None or value >= least) and (most is None or value <= most)
        shown = "-" if value is None else f"{value:.3g}"
        limit = f">={least}" if least is not None else f"<={most}"
        print(f"{bar} {shown} {limit} {'ok' if met else 'short'}")
        good = good and met
    return good
