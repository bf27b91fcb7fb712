"""LLaMA-30B on two GPUs with offload and on three without: one unknown fitted to the paper's figure 9.

The paper publishes what offload does to tokens/s per dollar, and not what attention on the CPU takes. So
that is fitted in one environment, and the others say whether it holds (METHODOLOGY.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from bbquic.plan.breakeven import Way
from bbquic.plan.candidates import SearchOptions
from bbquic.plan.cluster import AttentionCost, Curve, JobShape, ModelSizes, NodeProfile
from bbquic.plan.cost import MemoryOptions, stage_memory
from bbquic.plan.search import Plan, search
from bbquic.units import Bytes, Seconds
from bench.plan_emul.figures import Figures
from bench.plan_emul.scene import Scene, joined
from bench.stand_in.cost import FIXED_SHARE, FULL_ROWS
from bench.stand_in.paper import OWN_DELAYS, SEQUENCE_TOKENS, experiment, kv_bytes_of, tables

BATCH = 32
FITTED = "E1"
TESTED = ("E2", "E3", "E4", "E5")
GPU_HOUR = 0.56  # dollars: 1.68 for three, 1.12 for two
DEVICE_GB, HOST_GB = 40.0, 256.0  # assumed: two hold the weights of 65 GB, and not the keys of 32 sequences
WITHOUT, WITH = ("a", "b", "c"), ("a", "b")  # the nodes, 20 blocks each and 30 blocks each
SEQUENCES = 256  # of a job with free batch: no more are in flight

# From huggyllama/llama-30b's config.json; the hidden size and the blocks are the paper's too.
HIDDEN, BLOCKS, INTERMEDIATE, VOCABULARY = 6656, 60, 17920, 32000
HALF = 2  # bytes of a value

MODEL = ModelSizes(
    name="llama-30b",
    blocks=BLOCKS,
    hidden=HIDDEN,
    intermediate=INTERMEDIATE,
    vocabulary=VOCABULARY,
    value_bytes=HALF,
    block_weights=Bytes(HALF * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)),
    embed_weights=Bytes(HALF * VOCABULARY * HIDDEN),
    head_weights=Bytes(HALF * VOCABULARY * HIDDEN),
    kv_bytes=kv_bytes_of("llama_30b"),
)


@dataclass(frozen=True, slots=True)
class Published:
    """Figure 9 in one environment: tokens/s per dollar an hour, on three GPUs and on two that offload."""

    without: float
    offloading: float

    @property
    def gain(self) -> float:
        return self.offloading / self.without

    @property
    def steps(self) -> tuple[Seconds, Seconds]:
        """Of 32 sequences, on three GPUs and on two."""
        three = self.without * GPU_HOUR * len(WITHOUT)
        two = self.offloading * GPU_HOUR * len(WITH)
        return Seconds(BATCH / three), Seconds(BATCH / two)


def published(environment: str) -> Published:
    return Published(*tables()["llama_30b"]["tokens_per_s_per_dollar"][environment])


def hop(environment: str) -> Seconds:
    """Of 32 rows, as the paper measured it (figure 11a)."""
    return Seconds(tables()["llama_30b"]["nic_to_nic_plain_ms"][environment] / 1e3)


@cache
def extra() -> Seconds:
    """What attention on the CPU adds to a step of 32 sequences, by the fitted environment alone.

    Two GPUs have a hop less than three, the same blocks, and the paper's software as before.
    """
    three, two = published(FITTED).steps
    return Seconds(two - three + hop(FITTED))


def paper_step(environment: str) -> Seconds:
    """The paper's own step on two GPUs, from its step on three and what was fitted."""
    return Seconds(published(environment).steps[0] - hop(environment) + extra())


def device(name: str, block: Seconds) -> NodeProfile:
    """A GPU that takes so long for a block and 32 rows, of which what depends on rows is attention."""
    return _gpu(name, block, host_row())


def _gpu(name: str, block: float, on_host: float) -> NodeProfile:
    return NodeProfile(
        name=name,
        mlp=Curve(((1, FIXED_SHARE * block),)),
        attention=AttentionCost(0.0, (1 - FIXED_SHARE) * block / FULL_ROWS, 0.0),
        attention_host=AttentionCost(0.0, on_host, 0.0),
        embed=Curve(((1, 0.0),)),
        head=Curve(((1, 0.0),)),
        memory=Bytes(round(DEVICE_GB * 1e9)),
        host_memory=Bytes(round(HOST_GB * 1e9)),
        offloads=True,
        price=GPU_HOUR,
    )


@cache
def host_row() -> Seconds:
    """Seconds that a row's attention takes on the CPU in a block, from `extra`.

    Equation 2, overlapped: a block takes the host's share in place of what the device took for all rows.
    """
    e = experiment(OWN_DELAYS, FITTED)
    block = e.compute / e.blocks[0]
    each = BLOCKS // len(WITH)
    rows = sum(slots_on_host(each, is_first=stage == 0) for stage in range(len(WITH)))
    return Seconds((extra() + BLOCKS * (1 - FIXED_SHARE) * block) / (each * rows))


def slots_on_host(blocks: int, *, is_first: bool) -> int:
    """K of 32 in one micro-batch on one of two GPUs."""
    held = stage_memory(
        _gpu("any", 0.0, 0.0),
        MODEL,
        MemoryOptions(),
        blocks=blocks,
        batch=BATCH,
        micro_batches=1,
        slot=SEQUENCE_TOKENS,
        embeds=is_first,
        heads=not is_first,
    )
    assert held is not None, "a half of the model fits"
    return held[1]


def scene(environment: str) -> Scene:
    """Three GPUs, like links between any two of them."""
    e = experiment(OWN_DELAYS, environment)
    pairs = [(one, other) for one in WITHOUT for other in WITHOUT if one < other]
    return Scene(
        name=e.name,
        model=MODEL,
        nodes=tuple(device(name, Seconds(e.compute / e.blocks[0])) for name in WITHOUT),
        links=joined(*((one, other, e.rate_mbps, e.delay * 1e3) for one, other in pairs)),
        job=JobShape(SEQUENCES, 0.0, SEQUENCE_TOKENS, SEQUENCE_TOKENS, SEQUENCE_TOKENS),
    )


def best(where: Scene, nodes: tuple[str, ...], batch: int | None, micro_batches: int | None) -> Plan:
    """The planner's choice of what is None, the blocks split evenly; three GPUs do not offload."""
    memory = MemoryOptions(offload=None if nodes == WITH else 0.0)
    options = SearchOptions(
        memory=memory,
        batch=batch,
        micro_batches=micro_batches,
        at_stage=True,
        ways=(Way.RAW,),
        nodes=nodes,
        split=(BLOCKS // len(nodes),) * len(nodes),
    )
    return search(where.planned(Figures()), MODEL, where.job, options)
