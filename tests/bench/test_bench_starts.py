"""Every bench starts, at its smallest size; what it measures there means nothing. `make test-benches`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache

pytestmark = pytest.mark.starts
ROOT = Path(__file__).parent.parent.parent
NO_NETWORK = "no emulated links here"


def started(name: str, *flags: str, codes: tuple[int, ...] = (0,)) -> str:
    """All that a bench prints that ends with one of the `codes`; 1: bars are short, as they may be here."""
    command = [sys.executable, "-m", f"bench.{name}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.real_model
def test_generate_runs_and_checks_its_bars() -> None:
    fetch_model("smollm2-135m", user_cache(), print)
    # the sizes that the bars are for are not measured
    said = started("generate", "--quick", "--bars", codes=(1,))
    assert "decode_batch_32_vs_transformers - >=0.8 short" in said
    assert "decode_batch_2_vs_transformers:" in said


def test_transport_runs_and_prints_its_bars() -> None:
    said = started("transport", "--quick", "--bars", codes=(0, 1))
    for bar in ("loopback_bulk_vs_stock", "loopback_send_cpu_vs_stock", "loopback_receive_cpu_vs_stock"):
        assert f"{bar}: " in said


def test_codecs_are_compared_in_small() -> None:
    assert "bf16    4 rows REC" in started("codec", "--quick")


def test_the_kv_store_s_parts_are_measured_in_small() -> None:
    said = started("kv", "--quick", "--bars", codes=(0, 1))
    for figure in ("alpha_worst", "attention_vs_dense", "compaction_step", "memory_error"):
        assert f"{figure}: " in said


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("replay", "step_falcon_7b_E3: "),
        ("replay_codec", "switch against"),
        ("replay_offload", "per $/h; paper 49.8 to 58.9"),
        ("planner", "prediction_worst: "),
    ],
)
def test_what_needs_links_runs_where_there_can_be_a_network(name: str, figure: str) -> None:
    said = started(name, "--quick")
    assert figure in said or NO_NETWORK in said


def test_speculation_is_measured_in_small() -> None:
    said = started("speculation", "--quick")
    assert "simulated_least: " in said
    assert "speed_up_worst: " in said or NO_NETWORK in said
    assert "gain_125_100_4: " in said or any(one in said for one in (NO_NETWORK, "is not here"))


@pytest.mark.real_model
def test_drafts_are_judged_in_small() -> None:
    assert "ngram tree_8: " in started("drafts", "--quick")


@pytest.mark.real_model
def test_pruning_is_judged_where_there_is_a_pruner() -> None:
    said = started("pruning", "--quick", codes=(0, 1))
    assert "dropped_at_96_" in said or "there is no pruner" in said


def test_gpu_check_starts_and_says_whether_it_could_check_anything() -> None:
    said = started("gpu_check")
    assert "nothing was checked" in said or "tokens: ok" in said
