"""What most tests of the engine begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_helpers import CPU, PROMPTS, run_model, write_prompts

from bbquic.runtime.measure import Profiler
from bbquic.runtime.profile_cache import ProfileCache
from bbquic.runtime.protocol import MeasureHeader
from bbquic.units import Bytes, Seconds
from tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Where the tiny model's profile is: measured once for the tests that need one, whatever it says."""
    folder = tmp_path_factory.mktemp("profiles")
    asked = MeasureHeader("tiny", run_model(model).manifest.config, "float32", fresh=False)
    Profiler(CPU, ProfileCache(folder), budget=Seconds(0.1)).measured(asked, Bytes(0), lambda: False)
    return folder
