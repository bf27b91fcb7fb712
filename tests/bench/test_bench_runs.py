"""What a GPU is checked with, on a CPU; and bars."""

from __future__ import annotations

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
from bbquic.runtime.device import HostDevice
from bbquic.runtime.timing import Mark
from late_bus import LateBus
from tiny_model import make_tiny_llama

ROOT = Path(__file__).parent.parent.parent


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
