"""What no pipeline of this compute on these links can beat (architecture: circulating micro-batches). Pure.

    cycle = max over stages and hops of c_i, s_i         each resource is busy that long for each micro-batch
    loop  = Σ (c_i + s_i + λ_i) + outer legs
    step  = max(M · cycle, loop)

c is a stage's compute, s = bytes/rate of a hop's message and λ the hop's one-way delay. Sampling and the
coordinator's own time count as nothing, tokens as no bytes, and a byte of tensor as a byte on the link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bbquic.runtime.protocol import MAX_ROWS
from bbquic.transport.message import MAX_MESSAGE
from bbquic.units import Bytes, BytesPerSecond, Seconds
from bench.stand_in.cost import CostTable

BYTES_PER_VALUE = 2  # fp16 messages


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Like stages in a row on like links, the coordinator on the first stage's host.

    The first outer leg is then nothing, the last (from the last stage back) a delay like the others.
    """

    stages: int
    hidden: int
    cost: CostTable
    rate: BytesPerSecond  # of IP packets on each hop
    delay: Seconds  # one way, each hop

    def message(self, rows: int) -> Bytes:
        """Bytes of tensor that cross a hop."""
        return Bytes(rows * self.hidden * BYTES_PER_VALUE)

    def serialisation(self, rows: int) -> Seconds:
        return Seconds(self.message(rows) / self.rate)

    def cycle(self, rows: int) -> Seconds:
        """How long a micro-batch of so many rows keeps the busiest stage or hop."""
        sends = self.serialisation(rows) if self.stages > 1 else 0.0
        return Seconds(max(self.cost(rows), sends))

    def loop(self, rows: int) -> Seconds:
        """How long a micro-batch that waits for nobody takes until its tokens are back."""
        hops = (self.stages - 1) * (self.serialisation(rows) + self.delay)
        last_leg = self.delay if self.stages > 1 else 0.0
        return Seconds(self.stages * self.cost(rows) + hops + last_leg)

    def step(self, batch: int, micro_batches: int) -> Seconds:
        """Least time between a sequence's tokens. Where M does not divide B, the larger packs decide."""
        rows = -(-batch // micro_batches)
        return Seconds(max(micro_batches * self.cycle(rows), self.loop(rows)))

    def tokens_per_second(self, batch: int, micro_batches: int) -> float:
        return batch / self.step(batch, micro_batches)

    def limit(self, batch: int, micro_batches: int) -> str:
        """What the bound is made of: `loop`, or the resource that is never idle."""
        rows = -(-batch // micro_batches)
        if micro_batches * self.cycle(rows) <= self.loop(rows):
            return "loop"
        return "compute" if self.cost(rows) >= self.serialisation(rows) else "link"


def best_micro_batches(pipeline: Pipeline, batch: int, choices: Iterable[int]) -> int:
    """The M with the shortest bound; of equal ones (to a millionth) the least."""
    return min(choices, key=lambda m: (round(pipeline.step(batch, m) * 1e6), m))


def possible(pipeline: Pipeline, batch: int, micro_batches: int) -> bool:
    """Whether packs of so many rows are within the protocol's limits of rows and bytes."""
    rows = -(-batch // micro_batches)
    return micro_batches <= batch and rows <= MAX_ROWS and pipeline.message(rows) <= MAX_MESSAGE


def kv_bytes_per_token(kv_heads: int, head_dim: int) -> Bytes:
    """Of a block, in fp16: K and V."""
    return Bytes(2 * kv_heads * head_dim * BYTES_PER_VALUE)


def batch_within(memory: Bytes, *, blocks: int, tokens: int, kv_heads: int, head_dim: int) -> int:
    """Sequences of `tokens` whose KV of `blocks` blocks a node's `memory` holds."""
    return memory // (blocks * tokens * kv_bytes_per_token(kv_heads, head_dim))
