"""Every bench starts, at its smallest size; what it measures there means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench.common import print_bars

from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.real_model
def test_generate_runs_and_checks_its_bars() -> None:
    fetch_model("smollm2-135m", user_cache(), print)
    command = [sys.executable, "-m", "bench.generate", "--quick", "--bars"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1, done.stderr  # the sizes that the bars are for were not measured
    assert "decode_batch_32_vs_transformers - >=0.8 short" in done.stdout
    assert "decode_batch_2_vs_transformers:" in done.stdout


def test_transport_runs_and_prints_its_bars() -> None:
    command = [sys.executable, "-m", "bench.transport", "--quick", "--bars"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 1), done.stderr  # what so small a run measures means nothing
    for bar in ("loopback_bulk_vs_stock", "loopback_send_cpu_vs_stock", "loopback_receive_cpu_vs_stock"):
        assert f"{bar}: " in done.stdout


def test_replay_runs_where_there_can_be_a_network() -> None:
    command = [sys.executable, "-m", "bench.replay", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "step_falcon_7b_E3: " in done.stdout or "no emulated links here" in done.stdout


def test_a_bar_is_met_from_its_value_on_and_short_when_not_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bars = tmp_path / "bars.toml"
    bars.write_text("[b]\na = { at_least = 2 }\nc = { at_most = 1.5 }\n")
    assert print_bars("b", {"a": 2.0, "c": 1.5}, bars)
    assert not print_bars("b", {"a": 1.99, "c": 1.5}, bars)
    assert not print_bars("b", {"a": 2.0, "c": 1.51}, bars)
    assert not print_bars("b", {"a": 2.0}, bars)
    assert "c - <=1.5 short" in capsys.readouterr().out
