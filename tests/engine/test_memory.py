"""Memory that is not there: said before a stage loads, and in mid-run the matter of single lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_model import make_tiny_llama

HERE = Path(__file__).parent
DEADLINE = 120.0  # seconds


def test_a_chunk_for_which_memory_is_missing_in_mid_run_costs_at_most_its_own_line(tmp_path: Path) -> None:
    """Read again by itself in smaller chunks, the long line is answered as ever, or has an error record with
    the figures; the others are answered as ever."""
    model = make_tiny_llama(tmp_path / "tiny", blocks=2, context=2048, intermediate=32_768)
    more = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "starved.py"), str(model)],
        env={**os.environ, **more, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found is None:
        pytest.skip("this system does not keep RLIMIT_AS")
    texts = found["free"]["texts"]
    assert len(texts) == 13
    assert not found["free"]["errors"]
    smaller, none = found["smaller"], found["none"]
    assert smaller["texts"] == texts
    assert any("ran out of memory at micro-batch 0, step" in one for one in smaller["decisions"])
    assert none["texts"] == {line: text for line, text in texts.items() if line != "6"}
    code, message = none["errors"]["6"]
    assert code == "out_of_memory"
    assert "node-1 (blocks 0-0) failed at micro-batch 0, step" in message
    assert "you tried to allocate" in message
    assert "are free there" in message
