from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache
from tiny_model import make_tiny_llama

pytest_plugins = ("engine_fixtures",)

# One thread computes as fast as two here, and does not spin when the cores are taken by what is tested.
torch.set_num_threads(1)

# Machines that run tests are slow at times; speed is measured in bench/, never asserted here.
settings.register_profile("bbquic", deadline=None)
settings.load_profile("bbquic")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in one file; read only."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def default_model() -> ModelDirectory:
    """The default model from the user's cache; the first run downloads it."""
    return fetch_model("smollm2-135m", user_cache(), lambda line: print(line, file=sys.stderr))
