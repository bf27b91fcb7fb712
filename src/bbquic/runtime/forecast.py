"""What a stage's packs should take by its node's profile: beside it stands what they took. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bbquic.plan.cluster import NodeProfile
from bbquic.plan.cost import Load, ends_time, overlapped_block_time
from bbquic.runtime.protocol import PackHeader
from bbquic.units import Seconds

OFF = 1.3  # times, in either direction: a profile that is further off leads a planner astray
LEAST_STEPS = 20  # before a stage's sums say anything
LEAST_STEP = Seconds(1e-3)  # of computing: below, a step is what handling a pack takes, not its blocks


def load_of_pack(pack: PackHeader) -> Load:
    """A pack as the planner counts it: decode rows, and tokens of prompts beside them. Nodes of a tree look
    back together, as a prompt's tokens do."""
    decode = [row for row in pack.rows if row.count == 1]
    chunks = [row for row in pack.rows if row.count > 1]
    prompt_tokens = sum(row.count for row in chunks)
    return Load(
        rows=len(decode),
        context=sum(row.first + 1 for row in decode) / max(len(decode), 1),
        prompt_tokens=prompt_tokens,
        prompt_context=sum(row.count * (row.first + (1 + row.count) / 2) for row in chunks)
        / max(prompt_tokens, 1),
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """A stage of `blocks` blocks on a node with this profile."""

    profile: NodeProfile
    blocks: int
    embeds: bool
    heads: bool

    def __call__(self, pack: PackHeader) -> Seconds:
        """Seconds that the device should take for a pack."""
        load = load_of_pack(pack)
        block = overlapped_block_time(self.profile, load)
        wanted = sum(row.count if row.tree is not None else row.wants_token for row in pack.rows)
        embed = ends_time(self.profile, load, embeds=self.embeds, heads=False)
        head = ends_time(self.profile, Load(wanted, 0.0), embeds=False, heads=self.heads and wanted > 0)
        return Seconds(self.blocks * block + embed + head)


def misjudged(steps: int, computed: float, expected: float) -> float | None:
    """How many times as long as forecast a stage computed, where that is too far off; else None."""
    if steps < LEAST_STEPS or expected <= 0 or computed / steps < LEAST_STEP:
        return None
    ratio = computed / expected
    return ratio if not 1 / OFF <= ratio <= OFF else None
