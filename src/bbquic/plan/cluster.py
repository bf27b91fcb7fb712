"""What a planner knows: machines, links, a model and a job, in measured figures. Pure data.

Everything is seconds, bytes and bytes a second. `docs/planning.md` says where each figure comes from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bbquic.plan.breakeven import Way
from bbquic.units import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by a size (rows, tokens): linear between measured points and beyond the last two.

    Below the first point it is that point's: a smaller pack is never thought cheaper than what was measured.
    Raises: ValueError without points, or unless sizes rise and seconds are finite and never negative.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve has a point at least")
        for (before, _), (after, _) in pairwise(self.points):
            if not before < after:
                raise ValueError(f"a curve's sizes rise, and {before}, {after} do not")
        for size, seconds in self.points:
            if not (size >= 0 and 0 <= seconds < float("inf")):
                raise ValueError(f"{seconds} s at {size} is no point of a curve")

    def __call__(self, size: float) -> Seconds:
        points = self.points
        if len(points) == 1 or size <= points[0][0]:
            return Seconds(points[0][1])
        place = min(bisect_right(points, size, key=lambda point: point[0]), len(points) - 1)
        (low, began), (high, ended) = points[place - 1], points[place]
        share = (size - low) / (high - low)
        return Seconds(max(0.0, (1 - share) * began + share * ended))  # at a point exactly what it says

    def scaled(self, factor: float) -> Curve:
        """The same machine, `factor` times as slow."""
        return Curve(tuple((size, seconds * factor) for size, seconds in self.points))


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Seconds a block's attention takes: fixed + rows · (row + key · context); without projections."""

    fixed: float
    row: float
    key: float

    def __call__(self, rows: float, context: float) -> Seconds:
        return Seconds(self.fixed + rows * (self.row + self.key * context)) if rows > 0 else Seconds(0.0)


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """A codec on a node: size after over before, and seconds a raw byte at either end."""

    ratio: float
    encode: float
    decode: float


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One machine, as measured on it for one model's shapes.

    `mlp` is a block without attention (norms, projections, MLP) by tokens of a pack. `attention` is that of
    decode rows on the device, `attention_host` on its CPU, for keys in host memory, and `attention_prompt`
    that of prompts' tokens, which read keys together (None: as decode rows). `head` is by rows that want a
    token and includes the last norm and the choice. `overhead` is what a pack costs a stage beside these.
    """

    name: str
    mlp: Curve
    attention: AttentionCost
    embed: Curve
    head: Curve
    memory: Bytes  # free on the device: for weights, KV, workspace
    overhead: Seconds = Seconds(0.0)
    attention_host: AttentionCost | None = None
    attention_prompt: AttentionCost | None = None
    host_memory: Bytes = Bytes(0)  # free beside it, for offloaded KV
    offloads: bool = False
    host_beside: bool = True  # attention in host memory goes on beside the device's; else after it
    to_host: BytesPerSecond | None = None  # copies of a pack's tensor; None: none is made
    to_device: BytesPerSecond | None = None
    codecs: Mapping[Way, CodecSpeed] = field(default_factory=dict)  # RAW is not in it
    price: float | None = None  # dollars an hour

    @property
    def is_host(self) -> bool:
        """Whether its device is the host: keys that are offloaded stay in the same memory."""
        return not self.offloads and not self.host_memory


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One directed link. `delay` is one way: half of the least round trip, where nothing better is known."""

    rate: BytesPerSecond
    delay: Seconds
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What of a model decides a layout. Bytes are those in the dtype it runs in."""

    name: str
    blocks: int
    hidden: int
    intermediate: int
    vocabulary: int
    value_bytes: int  # of a hidden state's value
    block_weights: Bytes  # of one block
    embed_weights: Bytes
    head_weights: Bytes  # the last norm and the head
    kv_bytes: Bytes  # of a token in one block
    tied: bool = False  # the head is the embedding: on one node it is held once


@dataclass(frozen=True, slots=True)
class JobShape:
    """A prompts file in figures: how many sequences, mean prompt and answer and the longest answer in tokens,
    and how many tokens of KV a sequence reserves. `shared`: of a prompt, what another one was read with."""

    sequences: int
    prompt: float
    output: float
    longest: float
    slot: int
    shared: float = 0.0

    @property
    def read(self) -> float:
        """Tokens of a prompt that are computed, mean."""
        return self.prompt - self.shared

    @property
    def read_context(self) -> float:
        """Keys that each of these attends to, mean."""
        return (self.prompt + self.shared) / 2


COMMAND = "command"  # as the process that was started by hand is called among nodes


@dataclass(frozen=True)
class Cluster:
    """Nodes and the links between them; `(COMMAND, node)` and back are the command's own.

    A pair that is missing cannot talk. Raises: ValueError on two nodes of one name.
    """

    nodes: tuple[NodeProfile, ...]
    links: Mapping[tuple[str, str], LinkProfile]

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names) or COMMAND in names:
            raise ValueError(f"names of nodes are unique and not {COMMAND!r}: {', '.join(names)}")

    def node(self, name: str) -> NodeProfile:
        return next(node for node in self.nodes if node.name == name)

    def only(self, names: Sequence[str]) -> Cluster:
        """The cluster with these nodes alone, in this order."""
        return Cluster(tuple(self.node(name) for name in names), self.links)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Blocks `first` to `stop` (not included) on a node, `offloaded` of its slots with KV on the host."""

    node: str
    first: int
    stop: int
    offloaded: int = 0

    @property
    def blocks(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything a planner decides. `ways` is the codec of each hop between stages, in order."""

    stages: tuple[PlannedStage, ...]
    batch: int  # sequences in flight
    micro_batches: int
    ways: tuple[Way, ...]
    coordinator: str = COMMAND  # or the first stage's node

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(stage.node for stage in self.stages)
