"""A machine measures itself for a model's shapes, without the model."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bbquic.codec.frame import Shape, encode
from bbquic.codec.planes import WIDTHS
from bbquic.codec.table import LEARN_ROWS, TableLearner
from bbquic.errors import ModelError, PlanRefused
from bbquic.kv.rows import RowSpan
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import manifest_of
from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import Curve, NodeProfile
from bbquic.runtime.hop import CODECS
from bbquic.runtime.machine import Machine
from bbquic.runtime.measure import Profiler, measure, size_of
from bbquic.runtime.measure_codec import RATIOS, like_activations
from bbquic.runtime.profile import WireProfile
from bbquic.runtime.profile_cache import ProfileCache
from bbquic.runtime.protocol import MeasureHeader
from bbquic.runtime.rehearsal import RAGGED, decode_rows
from bbquic.runtime.stopwatch import Abandoned
from bbquic.units import Bytes, Seconds

CPU = Machine(torch.device("cpu"), threads=1)
BUDGET = Seconds(0.5)


@pytest.fixture(scope="module")
def config(tiny: Path) -> dict[str, str]:
    return manifest_of(ModelDirectory(tiny, "tiny")).config


def check(profile: NodeProfile) -> None:
    """Every figure is finite and none below 0; more never takes less; and it can travel."""
    for curve in (profile.mlp, profile.embed, profile.head):
        assert all(math.isfinite(took) and took > 0 for _, took in curve.points)
        assert all(before <= after for (_, before), (_, after) in pairwise(curve.points))
    assert profile.attention_prompt is not None
    for attention in (profile.attention, profile.attention_prompt):
        costs = attention.fixed, attention.row, attention.key
        assert all(math.isfinite(cost) and cost >= 0 for cost in costs)
        assert sum(costs) > 0
    assert 0 < profile.overhead < 10
    assert profile.memory > 0
    assert not profile.offloads
    assert set(profile.codecs) == {Way.H8, Way.REC}
    assert all(0 < speed.encode < 1e-3 and 0 < speed.decode < 1e-3 for speed in profile.codecs.values())
    assert WireProfile.of(profile).plain("") == profile


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_profile_is_complete_and_plausible(config: dict[str, str], dtype: str) -> None:
    profile = measure(CPU, config, dtype, budget=BUDGET)
    check(profile)
    assert profile.to_host is None is profile.to_device  # a CPU's memory is where packs lie anyway
    assert (profile.host_memory, profile.attention_host) == (0, None)
    assert [speed.ratio for speed in profile.codecs.values()] == list(RATIOS[dtype].values())


def test_even_without_time_there_is_a_whole_profile(config: dict[str, str]) -> None:
    check(measure(CPU, config, "float32", budget=Seconds(0.0)))


def test_a_vocabulary_that_is_too_large_is_measured_by_a_part(
    config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bbquic.runtime.rehearsal.ENDS", 64 * 4 * 256)  # bytes of 256 tokens
    check(measure(CPU, {**config, "vocab_size": str(10**9)}, "float32", budget=Seconds(0.1)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": '"mamba"'}, "'mamba' are not supported"),
        ({"model_type": "7"}, "7 are not supported"),
        ({"hidden_size": "64.5"}, "hidden_size is 64.5"),
        ({"hidden_size": "true"}, "hidden_size is True"),
        ({"vocab_size": "0"}, "vocab_size is 0"),
        ({"num_hidden_layers": "99999999999"}, "num_hidden_layers is 99999999999"),
        ({"auto_map": '{"AutoConfig": "x.Y"}'}, "with auto_map is not computed"),
        ({"quantization_config": "{}"}, "with quantization_config is not computed"),
        ({"hidden_size": "{"}, "is not JSON"),
        ({"hidden_size": "[" * 5000}, "is not JSON"),
        ({"hidden_size": str(2**20), "intermediate_size": str(2**22)}, "GB free"),
    ],
)
def test_a_config_that_cannot_be_measured_is_refused_in_words(
    config: dict[str, str], changes: dict[str, str], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        measure(CPU, {**config, **changes}, "float32", budget=BUDGET)


def test_a_dtype_that_the_device_lacks_is_refused(config: dict[str, str]) -> None:
    for dtype in ("float16", "int4"):
        with pytest.raises(PlanRefused, match=f"does not compute in {dtype}"):
            measure(CPU, config, dtype, budget=BUDGET)


def test_a_machine_without_room_for_a_block_says_so(config: dict[str, str]) -> None:
    small = Machine(torch.device("cpu"), threads=1, limit=Bytes(100_000))
    with pytest.raises(ModelError, match="GB free"):
        measure(small, config, "float32", budget=BUDGET)


def test_a_measurement_that_nobody_waits_for_ends(config: dict[str, str]) -> None:
    with pytest.raises(Abandoned):
        measure(CPU, config, "float32", budget=BUDGET, stop=lambda: True)


def test_what_was_measured_is_kept_but_memory_is_looked_up_anew(
    config: dict[str, str], tmp_path: Path
) -> None:
    asked = MeasureHeader("tiny", config, "float32", fresh=False)
    cache = ProfileCache(tmp_path)
    before = Profiler(CPU, cache, budget=Seconds(0.0))
    assert before.remembered(asked, Bytes(0)) is None
    measured = before.measured(asked, Bytes(0), lambda: False)
    capped = Profiler(Machine(CPU.device, CPU.threads, limit=Bytes(12345)), cache)
    known = capped.remembered(asked, Bytes(0))
    assert known is not None
    assert (known.mlp, known.memory) == (measured.mlp, 12345)
    assert capped.remembered(MeasureHeader("tiny", config, "float32", fresh=True), Bytes(0)) is None
    capped.forget(config, "float32")
    assert before.remembered(asked, Bytes(0)) is None


def test_decode_rows_look_back_on_the_context_on_average_and_not_all_alike() -> None:
    for rows, context in ((1, 64), (4, 64), (16, 480), (32, 240), (64, 112)):
        spans = decode_rows(rows, context)
        assert [span.slot for span in spans] == list(range(rows))
        assert size_of(spans) == pytest.approx((rows, context + 1), abs=0.5)
        reach = max(span.first for span in spans)
        assert reach == (context if rows == 1 else round(context * (1 + RAGGED)))
    assert size_of([RowSpan(0, 0, 3)]) == (3.0, 2.0)  # tokens see 1, 2 and 3 keys


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_codecs_are_timed_on_values_that_compress_as_activations_do(dtype: str) -> None:
    bits = like_activations(dtype, LEARN_ROWS + 64, 576)
    table = TableLearner().add(bits[:LEARN_ROWS], WIDTHS[dtype])
    shape = Shape(dtype, 64, 576)
    for way, ratio in RATIOS[dtype].items():
        frame = encode(bits[LEARN_ROWS:], shape, CODECS[way], table)
        assert len(frame.body) / shape.size == pytest.approx(ratio, abs=0.02)


def test_a_curve_beyond_its_points_goes_on_as_it_was() -> None:
    assert Curve(((1.0, 1.0), (2.0, 3.0)))(4.0) == 7.0
