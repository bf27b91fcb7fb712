"""One description of machines and links, and both that come of it: an emulation, and a planner's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bbquic.plan.cluster import (
    COMMAND,
    AttentionCost,
    Cluster,
    Curve,
    JobShape,
    Layout,
    LinkProfile,
    ModelSizes,
    NodeProfile,
)
from bbquic.plan.cost import host_share
from bbquic.plan.instance import FIRST, LAST, place_of
from bbquic.units import Bytes, BytesPerSecond, Seconds
from bench.plan_emul.figures import Figures
from bench.stand_in.cell import Cell, CodecName
from bench.stand_in.cluster import Cluster as Processes
from bench.stand_in.cost import FIXED_SHARE, FULL_ROWS, CostTable, StandIn
from bench.wan import Link, Network

DTYPE = "bfloat16"
DATAGRAM, PACKET = 1200, 1228  # bytes: an emulated link counts packets with their headers, a plan does not
HOME = "home"  # the host of the process that was started by hand
BUSY_MBPS = 200  # of all links in use: above, the emulator handles packets of 100 µs together
Pair = tuple[str, str]


def block_curve(block_ms: float) -> Curve:
    """Seconds of a block by rows, from those of one decode step of 32 rows (METHODOLOGY.md: assumed)."""
    return Curve(((0, FIXED_SHARE * block_ms / 1e3), (FULL_ROWS, block_ms / 1e3)))


def machine(
    name: str, block_ms: float, *, memory_gb: float = 80, embed_ms: float = 0.0, head_ms: float = 0.0
) -> NodeProfile:
    """A node as assumed: what its stand-in does, and no more. Attention is in the block."""
    return NodeProfile(
        name=name,
        mlp=block_curve(block_ms),
        attention=AttentionCost(0.0, 0.0, 0.0),
        embed=Curve(((0, embed_ms / 1e3),)),
        head=Curve(((0, head_ms / 1e3),)),
        memory=Bytes(round(memory_gb * 1e9)),
    )


def model(
    name: str, blocks: int, hidden: int, *, block_mb: float = 0.0, kv_bytes: int = 1, ends_mb: float = 0.0
) -> ModelSizes:
    """Sizes of a model of which only hidden states are ever sent. `kv_bytes`: of a token in one block."""
    return ModelSizes(
        name=name,
        blocks=blocks,
        hidden=hidden,
        intermediate=4 * hidden,
        vocabulary=32000,
        value_bytes=2,
        block_weights=Bytes(round(block_mb * 1e6)),
        embed_weights=Bytes(round(ends_mb * 1e6)),
        head_weights=Bytes(round(ends_mb * 1e6)),
        kv_bytes=Bytes(kv_bytes),
    )


def joined(*links: tuple[str, str, float, float]) -> dict[Pair, Link]:
    """Both directions of each (host, host, Mbit/s, ms one way)."""
    found = {}
    for one, other, rate, delay in links:
        found[one, other] = found[other, one] = Link(rate_mbps=rate, delay_ms=delay)
    return found


@dataclass(frozen=True)
class Scene:
    """Machines, the links between their hosts, and a model. A host is called as its node; `HOME` has none."""

    name: str
    model: ModelSizes
    nodes: tuple[NodeProfile, ...]
    links: Mapping[Pair, Link]
    job: JobShape

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of the nodes, and where links lead there, HOME."""
        names = tuple(node.name for node in self.nodes)
        return (*names, HOME) if any(HOME in pair for pair in self.links) else names

    def planned(self, figures: Figures) -> Cluster:
        """What a planner would have measured: with the overhead of a pack and the codecs of this machine."""
        nodes = tuple(
            replace(node, overhead=figures.overhead.stage, codecs=figures.codecs) for node in self.nodes
        )
        known = self.links if HOME in self.hosts else {**self._beside_all(), **self.links}
        links = {
            (_planned(source), _planned(target)): link_profile(link, figures.overhead.hop)
            for (source, target), link in known.items()
        }
        return Cluster(nodes, links)

    def _beside_all(self) -> dict[Pair, Link]:
        """Where nothing runs at HOME, the command is taken to be near every node: it has to reach them."""
        return joined(*((HOME, node.name, 1000, 1) for node in self.nodes))

    def processes(self, homes: Sequence[str]) -> Processes:
        """The emulation, with a coordinator on each of `homes`. A pair without a link is not reachable."""
        nodes = [node.name for node in self.nodes]
        nowhere = Link(up=False)
        network = Network(self.hosts, links=dict(self.links), default=nowhere)
        return Processes(network, nodes, homes, moderation_us=100.0 if self._is_fast() else 0.0)

    def _is_fast(self) -> bool:
        """Whether as many hops as there can be have so much together."""
        rates: dict[frozenset[str], float] = {}
        for pair, link in self.links.items():
            ends = frozenset(pair)
            rates[ends] = max(rates.get(ends, 0.0), link.rate_mbps or BUSY_MBPS)
        return sum(sorted(rates.values(), reverse=True)[: len(self.nodes) - 1]) >= BUSY_MBPS

    def cell(self, layout: Layout, *, codec: CodecName, warm_up: int, counted: int) -> Cell:
        """What runs a layout here."""
        rows = -(-layout.batch // layout.micro_batches)
        costs = tuple(self._costs(layout))
        return Cell(
            blocks=tuple(stage.blocks for stage in layout.stages),
            stand_in=StandIn(self.model.hidden, costs[0], rows),
            dtype=DTYPE,
            batch=layout.batch,
            micro_batches=layout.micro_batches,
            warm_up=warm_up,
            counted=counted,
            codec=codec,
            hosts=layout.nodes,
            costs=costs,
        )

    def _costs(self, layout: Layout) -> Iterator[CostTable]:
        by_name = {node.name: node for node in self.nodes}
        for position, stage in enumerate(layout.stages):
            place = place_of(position, len(layout.stages))
            node = by_name[stage.node]
            alpha = host_share(node, stage.offloaded, layout.batch)
            context = self.job.prompt + self.job.output / 2
            yield cost_table(node, stage.blocks, place, alpha=alpha, context=context)

    def hops(self, layout: Layout) -> list[Link]:
        """The links between a layout's stages, in order."""
        return [self.links[pair] for pair in pairwise(layout.nodes)]


def home_of(layout: Layout) -> str:
    """The host that a layout's coordinator runs on."""
    return HOME if layout.coordinator == COMMAND else layout.coordinator


def cost_table(
    node: NodeProfile, blocks: int, place: int, *, alpha: float = 0.0, context: float = 0.0
) -> CostTable:
    """t(rows) of so many blocks on a node, with the embedding on a first stage and the head on a last one.

    Attention is equation 2's, overlapped: its costs have no fixed part, so it is a line through 0.
    """
    device, host = node.attention, node.attention_host if alpha > 0 else None
    if device.fixed or (host is not None and host.fixed):
        raise ValueError(f"attention of {node.name} is no line through 0")
    slow = max(device(1 - alpha, context), host(alpha, context) if host is not None else 0.0)
    curves = [(node.mlp, blocks), (Curve(((0, 0.0), (FULL_ROWS, FULL_ROWS * slow))), blocks)]
    curves += [(node.embed, 1)] if place & FIRST else []
    curves += [(node.head, 1)] if place & LAST else []
    sizes = sorted({round(size) for curve, _ in curves for size, _ in curve.points} | {0, FULL_ROWS})
    return CostTable(tuple((size, sum(times * curve(size) for curve, times in curves)) for size in sizes))


def link_profile(link: Link, overhead: Seconds = Seconds(0.0)) -> LinkProfile:
    """An emulated link as a planner sees it: its rate in bytes of datagrams, what a message takes in addition
    in its delay. Raises: ValueError: no rate."""
    if link.rate_mbps is None:
        raise ValueError("a link without a limit has no rate to plan with")
    rate = link.rate_mbps * 1e6 / 8 * DATAGRAM / PACKET
    return LinkProfile(BytesPerSecond(rate), Seconds(link.delay_ms / 1e3 + overhead), link.loss)


def _planned(host: str) -> str:
    return COMMAND if host == HOME else host
