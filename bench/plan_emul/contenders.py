"""Layouts of a scene by every policy that the simulated comparison has too."""

from __future__ import annotations

from bbquic.plan.cluster import Layout
from bench.plan_emul.figures import Figures
from bench.plan_emul.scene import Scene
from bench.plan_sim.compare import OURS, policies

HELIX_S = 20.0  # seconds for its program

__all__ = ["OURS", "candidates"]


def candidates(scene: Scene, figures: Figures) -> dict[str, Layout]:
    """By policy; one that finds nothing that fits is left out. Where the blocks are is the policy's own;
    batch, micro-batches and the coordinator's place are chosen for it as the planner chooses its own."""
    cluster = scene.planned(figures)
    found = {name: policy(cluster, scene.model, scene.job) for name, policy in policies(HELIX_S).items()}
    return {name: layout for name, layout in found.items() if layout is not None}
