"""From figures to instances: what every stage and hop would cost, for all that a search may try. Pure.

`Tables` has a cluster's figures in arrays, so that an instance is a few array operations: a search makes
hundreds. The equations are those of `cost`, which the tests compare it with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import COMMAND, AttentionCost, Cluster, JobShape, ModelSizes
from bbquic.plan.cost import (
    WIRE,
    Load,
    MemoryOptions,
    buffer_bytes,
    codec_of,
    ends_time,
    leg_bytes,
    load_of,
    weights_bytes,
    workspace_bytes,
)
from bbquic.plan.instance import FIRST, LAST, Floats, Instance

Ints = NDArray[np.int64]

WAYS = (Way.RAW, Way.H8, Way.REC)  # by their numbers in instances
PLACES = range(4)  # MIDDLE, FIRST, LAST, ONLY


@dataclass(frozen=True, slots=True)
class Setting:
    """What a search holds fixed for one instance."""

    batch: int
    micro_batches: int
    at_stage: bool = False  # the coordinator is on the first stage's node, else in the command's process
    ways: tuple[Way, ...] = WAYS  # that hops may use; RAW is among them or is the only one


def circulating(
    cluster: Cluster, model: ModelSizes, job: JobShape, setting: Setting, memory: MemoryOptions
) -> Instance:
    """The instance of architecture §4: minimise `Objective.CIRCULATING` of it. One B and M, K from memory."""
    return Tables.of(cluster, model).circulating(job, setting, memory)


def serial(
    cluster: Cluster,
    model: ModelSizes,
    batch: int,
    context: float,
    *,
    memory: MemoryOptions | None = None,
    slot: int = 0,
) -> Instance:
    """The paper's eq. 1 to 3: minimise `Objective.SUM`. Hops carry the batch raw; ends and legs are free.

    `memory` with `slot` tokens of KV a sequence also gives the paper's bounds on memory, and α by them;
    without it everything fits and α = 0.
    """
    return Tables.of(cluster, model).paper(batch, 1, context, memory, slot)


def pipeline(
    cluster: Cluster,
    model: ModelSizes,
    batch: int,
    micro_batches: int,
    context: float,
    *,
    memory: MemoryOptions | None = None,
    slot: int = 0,
) -> Instance:
    """The paper's eq. 4: minimise `Objective.PIPELINE`. Latency stands inside a hop's cycle, as there."""
    return Tables.of(cluster, model).paper(batch, micro_batches, context, memory, slot)


@dataclass(frozen=True, eq=False)
class Tables:
    """A cluster's figures in arrays; N nodes, C ways. Whatever is missing costs infinitely much.

    rate, delay: [N, N] bytes/s and s; a missing link's delay is infinite.
    lead_rate, lead_delay, back_rate, back_delay: [N], the command's own links, to nodes and from them.
    ratio, encode, decode: [C, N] of WAYS. copy_out, copy_in: [N], seconds a byte.
    device, host: [N], bytes; host is 0 where a node does not offload. is_host, host_beside: [N], as in
    `NodeProfile`. attention, attention_host, attention_prompt: [N, 3], fixed, row and key.
    """

    cluster: Cluster
    model: ModelSizes
    rate: Floats
    delay: Floats
    lead_rate: Floats
    lead_delay: Floats
    back_rate: Floats
    back_delay: Floats
    ratio: Floats
    encode: Floats
    decode: Floats
    copy_out: Floats
    copy_in: Floats
    device: Ints
    host: Ints
    is_host: NDArray[np.bool_]
    host_beside: NDArray[np.bool_]
    attention: Floats
    attention_host: Floats
    attention_prompt: Floats

    @classmethod
    def of(cls, cluster: Cluster, model: ModelSizes) -> Tables:
        nodes = cluster.nodes
        names = [node.name for node in nodes]
        rate, delay = _links(cluster, names, names)
        lead, back = _links(cluster, [COMMAND], names), _links(cluster, names, [COMMAND])
        codecs = [[codec_of(node, way) for node in nodes] for way in WAYS]
        able = [node.offloads and node.attention_host is not None for node in nodes]
        return cls(
            cluster,
            model,
            rate,
            delay,
            lead[0][0],
            lead[1][0],
            back[0][:, 0],
            back[1][:, 0],
            np.array([[np.inf if one is None else one.ratio for one in row] for row in codecs]),
            np.array([[np.inf if one is None else one.encode for one in row] for row in codecs]),
            np.array([[np.inf if one is None else one.decode for one in row] for row in codecs]),
            np.array([0.0 if node.to_host is None else 1 / node.to_host for node in nodes]),
            np.array([0.0 if node.to_device is None else 1 / node.to_device for node in nodes]),
            np.array([node.memory for node in nodes], np.int64),
            np.array(
                [node.host_memory if can else 0 for node, can in zip(nodes, able, strict=True)], np.int64
            ),
            np.array([node.is_host for node in nodes]),
            np.array([node.host_beside for node in nodes]),
            _attentions([node.attention for node in nodes]),
            _attentions([node.attention_host for node in nodes]),
            _attentions([node.attention_prompt or node.attention for node in nodes]),
        )

    def circulating(self, job: JobShape, setting: Setting, memory: MemoryOptions) -> Instance:
        load = load_of(job, setting.batch, setting.micro_batches)
        fits, alpha = self.slots_on_host(setting.batch, setting.micro_batches, job.slot, memory)
        blocks = np.arange(self.model.blocks + 1.0)
        each = self._block_times(load, alpha)
        stages = np.where(fits, self._ends(load)[:, :, None] + blocks * each, np.inf)
        busy, passes = self._hops(setting.ways, load.tokens * self.model.hidden * self.model.value_bytes)
        lead, back = self._legs(setting.at_stage, load)
        return Instance(stages, stages, busy, passes, lead, back, setting.micro_batches)

    def paper(
        self, batch: int, micro_batches: int, context: float, memory: MemoryOptions | None, slot: int
    ) -> Instance:
        """Equations 1 to 4 of the paper, per micro-batch of batch / micro_batches rows."""
        load = Load(batch / micro_batches, context)
        shape = (len(self.cluster.nodes), len(PLACES), self.model.blocks + 1)
        fits, alpha = np.ones(shape, bool), np.zeros(shape)
        if memory is not None:
            fits, alpha = self.slots_on_host(batch, micro_batches, slot, memory)
        blocks = np.arange(self.model.blocks + 1.0)
        device = (1 - alpha) * _times(self.attention, np.full(shape, load.rows), context)
        host = alpha * _times(self.attention_host, np.full(shape, load.rows), context)
        each = self._mlp(load.rows) + device + host
        stages = np.where(fits & (blocks > 0), blocks * each, np.inf)
        hops = (self.delay + load.rows * self.model.hidden * self.model.value_bytes / self.rate)[None]
        count = shape[0]
        return Instance(stages, stages, hops, hops, np.zeros(count), np.zeros((count, count)), micro_batches)

    def slots_on_host(
        self, batch: int, micro_batches: int, slot: int, memory: MemoryOptions
    ) -> tuple[NDArray[np.bool_], Floats]:
        """Whether a stage fits, and α as equation 2 has it; [N, 4, L + 1] by node, place and blocks.

        As `cost.stage_memory` and `cost.host_share`, for all at once.
        """
        rows = memory.decoded(-(-batch // micro_batches))
        model, tokens = self.model, memory.pack_tokens + rows
        blocks = np.arange(model.blocks + 1)
        ends = [_ends_bytes(model, tokens, rows, place) for place in PLACES]
        rest = np.array(ends)[:, None] + blocks * model.block_weights
        room = (self.device * memory.share).astype(np.int64)[:, None, None] - rest
        each = np.maximum(blocks * slot * model.kv_bytes, 1)
        least = np.clip(batch - room // each, 0, batch)
        wanted = least if memory.offload is None else np.full_like(least, round(memory.offload * batch))
        evenly = np.where(wanted > 0, batch - micro_batches * ((batch - wanted) // micro_batches), 0)
        most = (self.host * memory.share).astype(np.int64)[:, None, None] // each
        on_host = np.where(evenly <= most, evenly, wanted)
        is_host = self.is_host[:, None, None]
        held = np.where(is_host | (wanted == 0), least == 0, (least <= on_host) & (on_host <= most))
        fits = (room >= 0) & held & (blocks > 0)
        return fits, np.where(fits & ~is_host, on_host, 0) / batch

    def _mlp(self, tokens: float) -> Floats:
        return np.array([node.mlp(tokens) for node in self.cluster.nodes])[:, None, None]

    def _block_times(self, load: Load, alpha: Floats) -> Floats:
        """`cost.overlapped_block_time` [N, 4, L + 1]."""
        device = _times(self.attention, (1 - alpha) * load.rows, load.context)
        host = _times(self.attention_host, alpha * load.rows, load.context)
        prompts = _times(self.attention_prompt, np.full((1, 1, 1), load.prompt_tokens), load.prompt_context)
        beside = self.host_beside[:, None, None]
        both = np.where(beside, np.maximum(device, host), device + host)
        return self._mlp(load.tokens) + both + prompts

    def _ends(self, load: Load) -> Floats:
        """Embedding, head and what a pack costs a stage anyway, [N, 4]."""
        nodes = self.cluster.nodes
        return np.array(
            [
                [
                    node.overhead
                    + ends_time(node, load, embeds=bool(place & FIRST), heads=bool(place & LAST))
                    for place in PLACES
                ]
                for node in nodes
            ]
        )

    def _hops(self, ways: Sequence[Way], size: float) -> tuple[Floats, Floats]:
        """`cost.hop_time`'s busy and passes, [C, N, N]; no hop leads from a node to itself."""
        chosen = [WAYS.index(way) for way in ways]
        out = size * (self.copy_out + self.encode[chosen])[:, :, None]
        into = size * (self.copy_in + self.decode[chosen])[:, None, :]
        wire = size * WIRE * self.ratio[chosen][:, :, None] / self.rate
        missing = np.isinf(self.delay)
        busy = np.maximum(np.maximum(out, into), wire)
        return np.where(missing, np.inf, busy), out + wire + self.delay + into

    def _legs(self, at_stage: bool, load: Load) -> tuple[Floats, Floats]:
        """lead [N] and back [N, N]; infinite where the coordinator's machine does not reach the stage's."""
        count = len(self.cluster.nodes)
        home = leg_bytes(load, back=True) * WIRE
        if at_stage:
            back = (self.delay + home / self.rate).T.copy()  # [first, last], of the link from last to first
            np.fill_diagonal(back, 0.0)
            reached = np.isfinite(self.lead_delay) & np.isfinite(self.back_delay)
            return np.where(reached, 0.0, np.inf), back
        lead = self.lead_delay + leg_bytes(load, back=False) * WIRE / self.lead_rate
        return lead, np.tile(self.back_delay + home / self.back_rate, (count, 1))


def _links(cluster: Cluster, sources: Sequence[str], targets: Sequence[str]) -> tuple[Floats, Floats]:
    """Rates and delays, [sources, targets]."""
    rate = np.ones((len(sources), len(targets)))
    delay = np.full((len(sources), len(targets)), np.inf)
    for a, source in enumerate(sources):
        for b, target in enumerate(targets):
            link = cluster.links.get((source, target))
            if link is not None and source != target:
                rate[a, b], delay[a, b] = link.rate, link.delay
    return rate, delay


def _attentions(costs: Sequence[AttentionCost | None]) -> Floats:
    """[N, 3]; zeros where there is none, for nothing is given it to do."""
    return np.array([(0.0, 0.0, 0.0) if one is None else (one.fixed, one.row, one.key) for one in costs])


def _times(attention: Floats, rows: Floats, context: float) -> Floats:
    """`AttentionCost` of rows [N, 4, L + 1]."""
    fixed, row, key = (attention[:, number, None, None] for number in range(3))
    return np.where(rows > 0, fixed + rows * (row + key * context), 0.0)


def _ends_bytes(model: ModelSizes, tokens: int, rows: int, place: int) -> int:
    """What a stage takes before its first block."""
    embeds, heads = bool(place & FIRST), bool(place & LAST)
    ends = weights_bytes(model, 0, embeds=embeds, heads=heads)
    return ends + workspace_bytes(model, tokens, rows, heads=heads) + buffer_bytes(model, tokens)
