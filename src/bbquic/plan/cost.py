"""What a layout costs: the paper's equations 1 to 4 as corrected, and the circulating pipeline. Pure.

Symbols: b rows (sequences) of a micro-batch, T tokens of a pack, L_i blocks of stage i, K of a stage's slots
with their KV in host memory, α = K / slots. `docs/planning.md` has a section for each equation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import CodecSpeed, JobShape, LinkProfile, ModelSizes, NodeProfile
from bbquic.plan.speculation import PLAIN, TREE_TOKENS, Trees
from bbquic.units import Bytes, BytesPerSecond, Seconds

WIRE = 1.031  # bytes of datagrams, which a link's rate counts, for each byte of a message: headers and tags
ROW_BYTES = 24  # of a row's description in a pack, and of its token on the way back
TOKEN_BYTES = 4  # of a token id
RAW = CodecSpeed(1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a pack carries: decode rows and their mean context, prompt tokens beside them and theirs; a row
    has `guesses` tokens beside its own where it is a draft tree."""

    rows: float
    context: float
    prompt_tokens: float = 0.0
    prompt_context: float = 0.0
    guesses: float = 0.0

    @property
    def decoded(self) -> float:
        """Tokens of the decode rows."""
        return self.rows * (1 + self.guesses)

    @property
    def tokens(self) -> float:
        """T."""
        return self.decoded + self.prompt_tokens


def load_of(job: JobShape, batch: int, micro_batches: int, trees: Trees = PLAIN) -> Load:
    """The average pack of a micro-batch on the first stage: b decode rows, and b · P · E[a] / s̄ tokens of
    prompts (architecture §4): an answer takes s̄ / E[a] passes."""
    rows = min(batch, job.sequences) / micro_batches
    prompts = rows * job.read * trees.committed / job.output
    return Load(rows, job.prompt + job.output / 2, prompts, job.read_context, trees.guesses)


# Compute.


def block_time(node: NodeProfile, rows: float, context: float, alpha: float = 0.0) -> Seconds:
    """Equation 2, as printed: t_mlp + (1 - α) t_attn^gpu + α t_attn^cpu, one after the other.

    Raises: ValueError for α > 0 on a node that offers no attention in host memory.
    """
    device = (1 - alpha) * node.attention(rows, context)
    return Seconds(node.mlp(rows) + device + alpha * _host_attention(node, rows, context, alpha))


def _host_attention(node: NodeProfile, rows: float, context: float, alpha: float) -> float:
    if alpha == 0:
        return 0.0
    if node.attention_host is None:
        raise ValueError(f"{node.name} does not compute attention in host memory")
    return node.attention_host(rows, context)


def overlapped_block_time(node: NodeProfile, load: Load, alpha: float = 0.0) -> Seconds:
    """The same where the CPU's attention runs beside the device's, with a pack's prompts in it.

    t_mlp(T) + max(t_attn^gpu((1 - α) b), t_attn^cpu(α b)) + t_attn^gpu(prompts); the sum of the two where
    the device is that CPU. A row's guesses look back together, as a prompt's tokens do.
    """
    beside = node.attention_prompt or node.attention
    guesses = load.decoded - load.rows
    roots = node.attention((1 - alpha) * load.rows, load.context)
    device = roots + (beside((1 - alpha) * guesses, load.context) if guesses > 0 else 0.0)
    host = 0.0
    if alpha > 0:
        if node.attention_host is None:
            raise ValueError(f"{node.name} does not compute attention in host memory")
        host = node.attention_host(alpha * load.decoded, load.context)
    prompts = beside(load.prompt_tokens, load.prompt_context)
    both = max(device, host) if node.host_beside else device + host
    return Seconds(node.mlp(load.tokens) + both + prompts)


def ends_time(node: NodeProfile, load: Load, *, embeds: bool, heads: bool) -> Seconds:
    """What the first stage's embedding and the last one's norm, head and choice take.

    A pack of prompts alone asks for no token and passes the head by.
    """
    chooses = heads and load.rows > 0
    return Seconds(
        (node.embed(load.tokens) if embeds else 0.0) + (node.head(load.decoded) if chooses else 0.0)
    )


# Hops.


def communication_time(link: LinkProfile, size: float) -> Seconds:
    """Equation 3: λ + B · d / B_net, of `size` = B · d bytes."""
    return Seconds(link.delay + size / link.rate)


def serialisation(link: LinkProfile, size: float, ratio: float = 1.0) -> Seconds:
    """s: how long a message of `size` bytes, compressed to `ratio` of them, keeps a link."""
    return Seconds(size * ratio * WIRE / link.rate)


@dataclass(frozen=True, slots=True)
class HopTime:
    """A hop for one pack, part by part: `out` the sender's outbound lane (copy and encode), `wire` the link,
    `into` the receiver's inbound lane (decode and copy); `delay` (λ) occupies nothing."""

    out: Seconds
    wire: Seconds
    delay: Seconds
    into: Seconds

    @property
    def busy(self) -> Seconds:
        """Of its slowest resource."""
        return max(self.out, self.wire, self.into)

    @property
    def passes(self) -> Seconds:
        """All that it adds to the loop."""
        return Seconds(self.out + self.wire + self.delay + self.into)


def hop_time(
    sender: NodeProfile, receiver: NodeProfile, link: LinkProfile | None, size: float, way: Way
) -> HopTime:
    """Architecture §4: k, s, λ and k' of a tensor of `size` bytes, copies counted with the codec beside them.

    Infinite without a link, or where an end does not know the codec.
    """
    packs, unpacks = codec_of(sender, way), codec_of(receiver, way)
    if link is None or packs is None or unpacks is None:
        never = Seconds(float("inf"))
        return HopTime(never, never, never, never)
    out = copy_time(size, sender.to_host) + size * packs.encode
    into = size * unpacks.decode + copy_time(size, receiver.to_device)
    return HopTime(Seconds(out), serialisation(link, size, packs.ratio), link.delay, Seconds(into))


def codec_of(node: NodeProfile, way: Way) -> CodecSpeed | None:
    return RAW if way is Way.RAW else node.codecs.get(way)


def copy_time(size: float, rate: BytesPerSecond | None) -> Seconds:
    return Seconds(0.0 if rate is None else size / rate)


def leg_bytes(load: Load, *, back: bool) -> float:
    """Of an outer leg's message: rows' descriptions and token ids out, and a row's token and figures back."""
    return ROW_BYTES * load.rows + (0.0 if back else TOKEN_BYTES * load.tokens)


def leg_time(link: LinkProfile | None, load: Load, *, back: bool = False) -> Seconds:
    """An outer leg, coordinator to first stage or last stage `back` to it. None: both are one machine."""
    if link is None:
        return Seconds(0.0)
    return Seconds(link.delay + serialisation(link, leg_bytes(load, back=back)))


# Objectives.


def serial_throughput(batch: float, compute: Iterable[float], communication: Iterable[float]) -> float:
    """Equation 1, corrected: tokens/s = B / Σ (T_comp + T_comm); a step commits B tokens, not B · s."""
    return batch / (sum(compute) + sum(communication))


def pipeline_throughput(
    batch: float, micro_batches: int, compute: Sequence[float], communication: Sequence[float]
) -> float:
    """Equation 4, corrected: tokens/s = B / ((M + n - 1) · max_i max(T_comp(i), T_comm(i))).

    Times are a micro-batch's; n is the number of stages used. `communication` has one hop less, or as many
    where the way back from the last stage is counted.
    """
    cycle = max(*compute, *communication) if communication else max(compute)
    return batch / ((micro_batches + len(compute) - 1) * cycle)


def circulating_step(micro_batches: int, cycle: float, loop: float) -> Seconds:
    """Architecture §4: step = max(M · cycle, loop)."""
    return Seconds(max(micro_batches * cycle, loop))


def steady_time(job: JobShape, batch: int, step: float) -> Seconds:
    """The objective: a job's time at its steady pace, N · s̄ / B steps. A batch above N is N."""
    return Seconds(job.sequences * job.output / min(batch, job.sequences) * step)


# Memory.


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How memory is used: the share of what is free that a plan may take, and the largest pack in tokens.

    `offload` is α where it is given: so many of every stage's slots are on the host. None: as few as do.
    `guesses` of a decode row at most, as far as `TREE_TOKENS` of a pack go.
    """

    share: float = 0.9
    pack_tokens: int = 512
    offload: float | None = None
    guesses: int = 0

    def decoded(self, rows: int) -> int:
        """Tokens of the largest pack beside prompts: those of `rows` decode rows and their guesses."""
        return rows + min(rows * self.guesses, TREE_TOKENS)

    def __post_init__(self) -> None:
        if self.offload is not None and not 0 <= self.offload <= 1:
            raise ValueError(f"a share of the slots is from 0 to 1, not {self.offload}")


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on a stage's device, and of KV in its host memory."""

    weights: Bytes
    kv: Bytes
    workspace: Bytes
    buffers: Bytes
    host_kv: Bytes = Bytes(0)

    @property
    def device(self) -> Bytes:
        return Bytes(self.weights + self.kv + self.workspace + self.buffers)

    def offloading(self, on_host: int, batch: int) -> StageMemory:
        """The same with the KV of `on_host` of its `batch` slots in host memory."""
        each = (self.kv + self.host_kv) // batch
        return replace(self, kv=Bytes((batch - on_host) * each), host_kv=Bytes(on_host * each))


def weights_bytes(model: ModelSizes, blocks: int, *, embeds: bool, heads: bool) -> Bytes:
    ends = (model.embed_weights if embeds else 0) + (model.head_weights if heads else 0)
    if embeds and heads and model.tied:
        ends -= model.embed_weights
    return Bytes(blocks * model.block_weights + ends)


def workspace_bytes(model: ModelSizes, tokens: int, rows: int, *, heads: bool) -> Bytes:
    """Activations of the largest pack in one block at a time, and float32 logits twice on the last stage."""
    activations = tokens * (6 * model.hidden + 3 * model.intermediate) * model.value_bytes
    return Bytes(activations + (8 * rows * model.vocabulary if heads else 0))


def buffer_bytes(model: ModelSizes, tokens: int) -> Bytes:
    """Codec and staging: packs in the lanes' queues (two each, in and out), and one at either codec."""
    return Bytes(6 * tokens * model.hidden * model.value_bytes)


def whole_slots(on_host: int, batch: int, micro_batches: int) -> int:
    """K with which the device has whole slots, as many of every micro-batch: the rest is on the host."""
    return batch - micro_batches * ((batch - on_host) // micro_batches) if on_host else 0


def host_share(node: NodeProfile, on_host: int, batch: int) -> float:
    """α as equation 2 has it: where device and host are one, no attention is computed elsewhere."""
    return 0.0 if node.is_host else on_host / batch


def offloaded_slots(
    node: NodeProfile,
    model: ModelSizes,
    options: MemoryOptions,
    *,
    blocks: int,
    batch: int,
    micro_batches: int,
    slot: int,
    rest: int,
) -> int | None:
    """K: how many of a stage's slots keep their KV in host memory; None where that does not hold them either.

    As many of each micro-batch, where the host holds that. `rest` is weights, workspace and buffers.
    """
    each = blocks * slot * model.kv_bytes
    room = int(node.memory * options.share) - rest
    if room < 0:
        return None
    least = max(0, batch - room // each)
    wanted = least if options.offload is None else round(options.offload * batch)
    if wanted == 0 or node.is_host:
        return wanted if least == 0 else None
    able = node.offloads and node.attention_host is not None
    most = int(node.host_memory * options.share) // each if able else 0
    evenly = whole_slots(wanted, batch, micro_batches)
    on_host = evenly if evenly <= most else wanted
    return on_host if least <= on_host <= most else None


def stage_memory(
    node: NodeProfile,
    model: ModelSizes,
    options: MemoryOptions,
    *,
    blocks: int,
    batch: int,
    micro_batches: int,
    slot: int,
    embeds: bool,
    heads: bool,
) -> tuple[StageMemory, int] | None:
    """A stage's memory and its K; None where it does not fit."""
    rows = -(-batch // micro_batches)
    held = held_memory(
        model, options, blocks=blocks, batch=batch, rows=rows, slot=slot, embeds=embeds, heads=heads
    )
    on_host = offloaded_slots(
        node,
        model,
        options,
        blocks=blocks,
        batch=batch,
        micro_batches=micro_batches,
        slot=slot,
        rest=held.device - held.kv,
    )
    return None if on_host is None else (held.offloading(on_host, batch), on_host)


def held_memory(
    model: ModelSizes,
    options: MemoryOptions,
    *,
    blocks: int,
    batch: int,
    rows: int,
    slot: int,
    embeds: bool,
    heads: bool,
) -> StageMemory:
    """What a stage takes with all its KV on the device, whether a node has it or not."""
    decoded = options.decoded(rows)
    tokens = options.pack_tokens + decoded
    return StageMemory(
        weights=weights_bytes(model, blocks, embeds=embeds, heads=heads),
        kv=Bytes(batch * blocks * slot * model.kv_bytes),
        workspace=workspace_bytes(model, tokens, decoded, heads=heads),
        buffers=buffer_bytes(model, tokens),
    )
