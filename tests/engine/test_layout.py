"""What memory decides of a plan: how long slots are, and which tiers each stage has on its host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_helpers import run_model

from bbquic.errors import ConfigError, PlanRefused
from bbquic.plan.cost import MemoryOptions
from bbquic.runtime.layout import LayoutOptions, make_plan
from bbquic.runtime.protocol import DescriptionHeader, PlanHeader

GB = 10**9
FORCED = LayoutOptions(batch=8, micro_batches=2, memory=MemoryOptions(offload=0.3), kv_tokens=8 * 64)


def plan_of(model: Path, options: LayoutOptions, *memory: tuple[int, int]) -> PlanHeader:
    """For nodes with so much free, on the device and beside it."""
    held = run_model(model)
    nodes = [
        DescriptionHeader(f"node-{number}", "GPU", device, 1, ("float32",), None, host)
        for number, (device, host) in enumerate(memory, 1)
    ]
    return make_plan("0" * 16, held.directory, held.manifest, nodes, options)


def test_slots_are_offloaded_whole_ones_of_each_micro_batch(model: Path) -> None:
    plan = plan_of(model, FORCED, (GB, GB), (GB, GB))
    assert plan.tiers == (6 * 64, 2 * 64)
    assert [stage.on_host for stage in plan.stages] == [1, 1]
    given = replace(FORCED, offloaded=(0, 3))
    plan = plan_of(model, given, (GB, GB), (GB, GB))
    assert plan.tiers == (4 * 64, 4 * 64)
    assert [stage.on_host for stage in plan.stages] == [0, 1]
    assert plan_of(model, replace(FORCED, offloaded=(0, 0)), (GB, GB), (GB, GB)).tiers == (8 * 64,)


def test_where_device_and_host_are_one_both_are_its_memory(model: Path) -> None:
    assert plan_of(model, FORCED, (GB, 0)).tiers == (6 * 64, 2 * 64)


def test_slots_are_as_long_as_was_planned_or_as_memory_allows(model: Path) -> None:
    free = replace(FORCED, kv_tokens=None, slot=96)
    assert plan_of(model, free, (GB, GB)).tiers == (6 * 96, 2 * 96)
    cell = 4 * 2 * 2 * 16 * 4  # four blocks' keys and values, two heads of 16 in float32
    little = plan_of(model, free, (GB, round(2 * 50 * cell / 0.9) + 1))
    assert little.tiers == (6 * 48, 2 * 48)


def test_what_does_not_fit_is_refused_with_the_figures_of_device_and_host(model: Path) -> None:
    with pytest.raises(PlanRefused, match=r"node-1 cannot hold .* offloaded KV needs [^;]* of its 0.00 MB"):
        plan_of(model, FORCED, (GB, 1000))
    with pytest.raises(PlanRefused, match="node-2 cannot hold"):
        plan_of(model, FORCED, (GB, GB), (1000, 0))


@pytest.mark.parametrize("offloaded", [(1,), (1, 9), (-1, 1)])
def test_slots_that_there_are_not_are_not_offloaded(model: Path, offloaded: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="slots on hosts"):
        plan_of(model, replace(FORCED, offloaded=offloaded), (GB, GB), (GB, GB))
