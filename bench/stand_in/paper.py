"""The paper's experiments, read from its tables: what to replay, and what it got (arXiv:2604.21072v1)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bbquic.units import Bytes, BytesPerSecond, Seconds
from bench.stand_in.bounds import Pipeline, batch_within, kv_bytes_per_token
from bench.stand_in.cost import CostTable

TABLES = Path(__file__).parent.parent / "data" / "paper_tables.toml"
ENVIRONMENTS = ("E1", "E2", "E3", "E4", "E5")
MODELS = ("falcon_7b", "mixtral_8x7b", "falcon_40b", "llama_30b")
OWN_DELAYS = "llama_30b_own"  # LLaMA-30B on the delays that its own figure implies

KV_MEMORY = Bytes(16_000_000_000)  # a node, for KV alone
SEQUENCE_TOKENS = 256

# K/V heads and their size, from the models' public config.json: tiiuae/falcon-7b (multi_query),
# tiiuae/falcon-40b (num_kv_heads), mistralai/Mixtral-8x7B-v0.1 (num_key_value_heads),
# huggyllama/llama-30b (all 52 heads).
KV_SHAPES: Mapping[str, tuple[int, int]] = {
    "falcon_7b": (1, 64),
    "falcon_40b": (8, 64),
    "mixtral_8x7b": (8, 128),
    "llama_30b": (52, 128),
}
COPIES = ("gpu_to_cpu_ms", "cpu_to_nic_ms", "nic_to_cpu_ms", "cpu_to_gpu_ms")


def kv_bytes_of(model: str) -> Bytes:
    """Of a token in one block."""
    return kv_bytes_per_token(*KV_SHAPES[model])


@cache
def tables() -> dict[str, Any]:
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Experiment:
    """One of the paper's models in one of its environments."""

    model: str  # of MODELS, or OWN_DELAYS
    environment: str
    blocks: tuple[int, ...]  # of each stage
    batch: int
    hidden: int
    compute: Seconds  # of a stage and a decode step of the whole batch
    rate_mbps: float  # as the paper states it
    delay: Seconds  # one way
    paper_tokens_per_s: float
    paper_tokens_per_s_microbatch: float
    paper_network: Seconds  # of a hop, as the paper measured it, copies between device and network included

    @property
    def name(self) -> str:
        return f"{self.model}_{self.environment}"

    @property
    def paper_step(self) -> Seconds:
        """The paper's step without micro-batches."""
        return Seconds(self.batch / self.paper_tokens_per_s)

    @property
    def paper_unexplained(self) -> Seconds:
        """What is left of its step behind the compute of its stages and the hops between them."""
        stages = len(self.blocks)
        return Seconds(self.paper_step - stages * self.compute - (stages - 1) * self.paper_network)

    def pipeline(self, rate: BytesPerSecond | None = None) -> Pipeline:
        """The bound's view of it, at the link's own rate unless another is given."""
        stated = BytesPerSecond(self.rate_mbps * 1e6 / 8)
        cost = CostTable.of_step(self.compute, self.batch)
        return Pipeline(len(self.blocks), self.hidden, cost, rate or stated, self.delay)

    def free_batch(self) -> int:
        """Sequences that every node's memory for KV holds."""
        kv_heads, head_dim = KV_SHAPES[self.model.removesuffix("_own")]
        return batch_within(
            KV_MEMORY,
            blocks=max(self.blocks),
            tokens=SEQUENCE_TOKENS,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )


def experiment(model: str, environment: str) -> Experiment:
    """Raises: KeyError where the paper has no such experiment."""
    name = model.removesuffix("_own")
    table, link = tables()[name], tables()["environments"][environment]
    # LLaMA-30B's compute is published for one data centre (W1) and for three states (W2) only
    place = environment if environment in table["gpu_compute_ms"] else ("W1" if environment == "E1" else "W2")
    network = table["nic_to_nic_ms"].get(environment) or table["nic_to_nic_plain_ms"][environment]
    copies = sum(table[part][environment] for part in COPIES if part in table)
    delay = table["one_way_ms"][environment] if model == OWN_DELAYS else link["one_way_ms"]
    return Experiment(
        model=model,
        environment=environment,
        blocks=tuple(table["stages"]),
        batch=table["batch"],
        # of the volume, 0.4 KB are not the tensor: 32 rows of 4544, 4096, 8192 and 6656 values of 2 bytes
        hidden=int(table["volume_kb"]) * 1024 // (2 * table["batch"]),
        compute=Seconds(table["gpu_compute_ms"][place] / 1e3),
        rate_mbps=link["rate_mbps"],
        delay=Seconds(delay / 1e3),
        paper_tokens_per_s=table["tokens_per_s"][environment],
        # Falcon-40B was not published with micro-batches
        paper_tokens_per_s_microbatch=table.get("tokens_per_s_microbatch", {}).get(environment, float("nan")),
        paper_network=Seconds((network + copies) / 1e3),
    )
