"""Every bench starts, at its smallest size; what it measures there means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.common import print_bars
from bench.gpu_check import (
    Grinder,
    attend_beside,
    generate,
    grind,
    interval,
    make_workers,
    offloading,
    overlap,
    read_prompts,
    wrong_tokens,
)
from transformers import AutoModelForCausalLM

from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache
from bbquic.runtime.device import HostDevice
from bbquic.runtime.timing import Mark
from late_bus import LateBus
from tiny_model import make_tiny_llama

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


def test_codecs_are_compared_in_small() -> None:
    command = [sys.executable, "-m", "bench.codec", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "bf16    4 rows REC" in done.stdout


def test_the_kv_store_s_parts_are_measured_in_small() -> None:
    command = [sys.executable, "-m", "bench.kv", "--quick", "--bars"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 1), done.stderr  # what so small a run measures means nothing
    for figure in ("alpha_worst", "attention_vs_dense", "compaction_step", "memory_error"):
        assert f"{figure}: " in done.stdout


def test_replays_of_the_codec_run_where_there_can_be_a_network() -> None:
    command = [sys.executable, "-m", "bench.replay_codec", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "switch against" in done.stdout or "no emulated links here" in done.stdout


def test_replays_of_offload_run_where_there_can_be_a_network() -> None:
    command = [sys.executable, "-m", "bench.replay_offload", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "per $/h; paper 49.8 to 58.9" in done.stdout or "no emulated links here" in done.stdout


def test_speculation_is_measured_in_small() -> None:
    command = [sys.executable, "-m", "bench.speculation", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "simulated_least: " in done.stdout
    assert "speed_up_worst: " in done.stdout or "no emulated links here" in done.stdout
    lacks = ("no emulated links here", "is not here")
    assert "gain_125_100_4: " in done.stdout or any(one in done.stdout for one in lacks)


def test_the_planner_s_bench_runs_where_there_can_be_a_network() -> None:
    command = [sys.executable, "-m", "bench.planner", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "prediction_worst: " in done.stdout or "no emulated links here" in done.stdout


def test_gpu_check_starts_and_says_whether_it_could_check_anything() -> None:
    command = [sys.executable, "-m", "bench.gpu_check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was checked" in done.stdout or "tokens: ok" in done.stdout


def test_what_gpu_check_generates_is_what_transformers_chooses(tmp_path: Path) -> None:
    model = ModelDirectory(make_tiny_llama(tmp_path / "tiny"), "tiny")
    device = torch.device("cpu")
    prompts = read_prompts(model, 3)
    capacity = 16 * (1 + (max(map(len, prompts)) + 12) // 16)
    settings = ((1, 0.0), (2, 0.0), (1, 0.5), (2, 1.0))
    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    found = []
    for stages, alpha in settings:
        where, on_host = offloading(len(prompts), capacity, alpha)
        found.append(generate(make_workers(model, stages, where, on_host, device), prompts, 12, where))
    assert all(one == found[0] for one in found)
    for prompt, answer in zip(prompts, found[0], strict=True):
        assert wrong_tokens(reference, prompt, answer) == 0
        changed = [*answer[:5], (answer[5] + 1) % 256, *answer[6:]]
        assert wrong_tokens(reference, prompt, changed) > 0


def test_gpu_check_notes_when_both_attend_without_a_gpu_too() -> None:
    host = attend_beside(HostDevice(), LateBus(), (40, 20), 2, 3)
    assert len(host.on_host) == len(host.on_device) == 3
    assert all(began <= ended for began, ended in (*host.on_host, *host.on_device))


def test_gpu_checks_lanes_keep_packs_whole_without_a_gpu_too() -> None:
    jobs = grind(Grinder(HostDevice(), 1, size=8), 3)
    computing = [interval(job, Mark.COMPUTE_BEGAN, Mark.COMPUTED) for job in jobs]
    assert overlap(computing, computing) == pytest.approx(1.0)
    assert overlap([(0.0, 1.0), (4.0, 6.0)], [(0.5, 5.0)]) == 0.5


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
