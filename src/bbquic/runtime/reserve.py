"""What a stage takes of a node's memory, and the refusal where that is not there.

Both ends count alike (`plan.cost`): whoever makes a plan, by what nodes say is free, and the node that is to
carry it out, before and after it loads. So a setting that the one names as the largest is taken by the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbquic.errors import PlanRefused
from bbquic.kv.ranges import CELL_ALIGNMENT
from bbquic.model.directory import ModelDirectory
from bbquic.plan.cost import MemoryOptions, StageMemory, buffer_bytes, workspace_bytes
from bbquic.runtime.memory import in_words
from bbquic.runtime.protocol import PlanHeader, Stage
from bbquic.runtime.sizes import shape_sizes
from bbquic.units import Bytes

SHARE = MemoryOptions().share


@dataclass(frozen=True, slots=True)
class Have:
    """Bytes free on a node's device, and in host memory for offloaded KV; None: both are one memory."""

    device: int
    host: int | None

    def holds(self, need: StageMemory, share: float = 1.0) -> bool:
        """Whether it is within a share of what is free, on either side."""
        if self.host is None:
            return need.device + need.host_kv <= share * self.device
        return need.device <= share * self.device and need.host_kv <= share * self.host

    def most(self, need: StageMemory, cells: int, share: float = SHARE) -> int:
        """Tokens of KV within a share of what is free, spread over both sides as those of `need`, `cells`."""
        room = int(share * self.device) - (need.device - need.kv)
        if self.host is None:
            return max(0, room * cells // (need.kv + need.host_kv))
        sides = ((room, need.kv), (int(share * self.host), need.host_kv))
        return max(0, min(have * cells // kv for have, kv in sides if kv))


def stage_memory(directory: ModelDirectory, plan: PlanHeader, stage: Stage, weights: Bytes) -> StageMemory:
    """What a stage of a plan takes; its `weights` are known from the manifest, or loaded already."""
    sizes = shape_sizes(directory, plan.dtype)
    tokens = plan.rows + plan.pack_tokens
    beside = sum(plan.tiers[len(plan.tiers) - stage.on_host :])
    each = len(stage.blocks) * sizes.kv_bytes
    return StageMemory(
        weights=weights,
        kv=Bytes(each * (plan.cells - beside)),
        workspace=workspace_bytes(sizes, tokens, plan.rows, heads=stage is plan.stages[-1]),
        buffers=buffer_bytes(sizes, tokens),
        host_kv=Bytes(each * beside),
    )


def refusal(
    node: str, stage: Stage, need: StageMemory, have: Have, *, share: float, most: int, least: int
) -> PlanRefused:
    """Says need and have by part, and the largest setting that fits: `most` tokens of KV, unless that is less
    than the `least` with which anything can be answered."""
    beside = ""
    kv = need.kv
    if have.host is None:
        kv = Bytes(kv + need.host_kv)
    elif need.host_kv:
        beside = f"; offloaded KV needs {_of(need.host_kv, have.host, share)}"
    device = need.device - need.kv + kv
    parts = {"weights": need.weights, "KV": kv, "workspace": need.workspace, "buffers": need.buffers}
    words = ", ".join(f"{name} {in_words(count)}" for name, count in parts.items())
    smaller = f"use --kv-tokens {most} or less, or a smaller --batch" if most >= least else ""
    fewer = f"give {node} fewer blocks with --split, add a node, or free memory there"
    return PlanRefused(
        f"{node} cannot hold {stage}: weights, KV memory and buffers need {_of(device, have.device, share)} "
        f"({words}){beside}",
        hint=f"{smaller}; or {fewer}" if smaller else fewer,
    )


def least_cells(plan: PlanHeader) -> int:
    """The smallest arena of which every micro-batch has a share."""
    return CELL_ALIGNMENT * plan.micro_batches


def _of(need: int, free: int, share: float) -> str:
    used = f" {in_words(int(share * free))} can be used" if share < 1 else ""
    return f"{in_words(need)}, of its {in_words(free)} free{used}"
