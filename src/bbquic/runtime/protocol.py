"""The messages of the engine: their headers as types that cannot be wrong once built.

`docs/wire-format.md` has the same as tables. Headers are msgpack maps (rows are arrays); what decodes
them is `transport.message.decode_header_untrusted`, so a wrong type or a missing field never gets here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct

from bbquic.kv.ranges import MAX_TIERS, SlotRange, Tiers
from bbquic.model.manifest import Manifest, Sha256
from bbquic.model.sampling import Sampling
from bbquic.plan.cluster import COMMAND
from bbquic.runtime.profile import WireProfile
from bbquic.runtime.timing import Finite, NodeName, StageReport, StageTiming

JobId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Natural = Annotated[int, Meta(ge=0, le=2**40)]
Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]

ConfigField = Annotated[str, Meta(min_length=1, max_length=256)]
ConfigValue = Annotated[str, Meta(min_length=1, max_length=32_768)]
LinkRate = Annotated[float, Meta(gt=0, le=1e12)]
RoundTrip = Annotated[float, Meta(ge=0, le=1e3)]

ASKER = COMMAND  # in a SURVEY; no node of a plan has this name

MAX_ROWS = 4096  # rows of one pack; more is a bug or an attack, not a batch
MAX_STAGES = 256
MAX_MICRO_BATCHES = 1024
MAX_DEPTH = 64
MAX_TREE = 1024  # nodes of a draft tree
MAX_PRUNER = 8 << 20  # bytes

MAX_TOKENS = 2**16  # of one pack's answers

NodeId = Annotated[int, Meta(ge=0, lt=2**16)]
Path = Annotated[tuple[NodeId, ...], Meta(min_length=1, max_length=MAX_TREE)]
Nodes = Annotated[int, Meta(ge=1, le=MAX_TREE)]


class WireSampling(Struct, frozen=True, array_like=True):
    """`model.sampling.Sampling` on the wire; greedy rows send none of it."""

    temperature: Annotated[float, Meta(gt=0, le=100)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Annotated[int, Meta(ge=0, le=2**31)]
    seed: Annotated[int, Meta(ge=0)]  # msgpack has no integer above 64 bits

    @classmethod
    def of(cls, sampling: Sampling) -> WireSampling | None:
        if sampling.temperature == 0:
            return None
        return cls(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)

    def plain(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.seed)


class Tree(Struct, frozen=True, array_like=True):
    """A draft tree as a row's tokens: their ids in the unpruned tree, rising, and each one's parent's id.

    Node 0 is the root, the last committed token, and its own parent; a parent comes before its children.
    A node may be missing, and then its descendants are too. Of all these nodes a stage passes on those that
    are `kept`, ids from the root's on, a node with its ancestors; None: all.
    """

    nodes: Annotated[tuple[NodeId, ...], Meta(min_length=1, max_length=MAX_TREE)]
    parents: Annotated[tuple[NodeId, ...], Meta(min_length=1, max_length=MAX_TREE)]
    kept: Annotated[tuple[NodeId, ...], Meta(min_length=1, max_length=MAX_TREE)] | None = None

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.parents) or self.nodes[0] != 0 or self.parents[0] != 0:
            raise ValueError("a tree has a parent for each node, and begins with its root")
        known = {0}
        for before, node, parent in zip(self.nodes, self.nodes[1:], self.parents[1:], strict=False):
            if node <= before or parent not in known:
                raise ValueError(f"node {node} of a tree comes out of order or before its parent {parent}")
            known.add(node)
        if self.kept is not None:
            kept = set(self.kept)
            parents = dict(zip(self.nodes, self.parents, strict=True))
            if self.kept[0] != 0 or not _rises(self.kept) or not kept <= known:
                raise ValueError("what is kept of a tree are nodes of it, in order, with its root")
            if any(parents[node] not in kept for node in self.kept):
                raise ValueError("a node of a tree is kept without its parent")


class Row(Struct, frozen=True, array_like=True):
    """What one sequence contributes to one pass: `count` tokens at positions `first` and on.

    A slot's generation rises each time another sequence takes the slot. `wants_token` marks the row
    whose last position is to be turned into a token: a decode row, or the last chunk of a prompt. With a
    `tree` the tokens are its nodes, each at the position of its depth, and each is to be turned into one.
    The slot's next row then says which nodes were `accepted`, from the root on; the others are dropped.
    """

    slot: Natural
    generation: Natural
    first: Natural
    count: Positive
    wants_token: bool
    sampling: WireSampling | None
    tree: Tree | None = None
    accepted: Path | None = None

    def __post_init__(self) -> None:
        if self.tree is not None and (len(self.tree.nodes) != self.count or not self.wants_token):
            raise ValueError("a row with a tree has a token for each of its nodes, and wants tokens")
        if self.accepted is not None and (self.accepted[0] != 0 or not _rises(self.accepted)):
            raise ValueError("what is accepted of a tree is a path that begins at its root")


class Move(Struct, frozen=True, array_like=True):
    """Before the rows of the pack that carries it, `count` tokens of KV go from another micro-batch's slot to
    a slot of this one. The source is then empty, unless it `keeps` them: then it may hold more than `count`
    tokens, and be a slot of this micro-batch.

    A stage that has not applied the source's `step` yet holds the pack until then; one that has refuses a
    move of what it does not hold.
    """

    micro_batch: Annotated[int, Meta(ge=0, lt=MAX_MICRO_BATCHES)]  # the source's
    slot: Natural
    generation: Natural
    step: Natural  # of the source's micro-batch: it stored the last of the tokens
    target: Natural  # slot of this micro-batch
    target_generation: Natural
    count: Positive
    keeps: bool = False


class Lost(Struct, frozen=True, array_like=True):
    """Why a pack was not computed by a stage, though the stage goes on: its rows are to be read again.

    `message` ends with what is free there now, in words.
    """

    node: NodeName
    blocks: Name
    code: Name
    message: Text


class PackHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """Rows on their way through the stages: ROWS with token ids, HIDDEN with a tensor `[T, D]` as body.

    Identity is (job, epoch, micro_batch, step). Every pack names the range of the arena that its
    micro-batch owns (`SlotRange.of`), so that cutting ranges anew needs no message. One that is `lost` was
    not computed by a stage, and is by none behind it; its body is empty. Token ids go as far as they are
    needed: to the first stage, and where a row has a tree to the last one, which verifies it.
    """

    job: JobId
    epoch: Natural
    micro_batch: Annotated[int, Meta(ge=0, lt=MAX_MICRO_BATCHES)]
    step: Natural
    range: Annotated[tuple[Natural, ...], Meta(min_length=3, max_length=2 * MAX_TIERS + 1)]
    rows: Annotated[tuple[Row, ...], Meta(min_length=1, max_length=MAX_ROWS)]
    tokens: bytes = b""  # T ids, little-endian int32; behind the first stage empty unless a row has a tree
    moves: Annotated[tuple[Move, ...], Meta(max_length=MAX_ROWS)] = ()
    frame: Annotated[bytes, Meta(max_length=64)] = b""  # how the body is coded (`codec.frame`)
    timings: Annotated[tuple[StageTiming, ...], Meta(max_length=MAX_STAGES)] = ()
    lost: Lost | None = None

    def __post_init__(self) -> None:
        SlotRange.of(*self.range)
        if self.lost is not None and (self.tokens or self.frame):
            raise ValueError("a pack that is lost carries nothing but its rows")

    @property
    def slot_range(self) -> SlotRange:
        return SlotRange.of(*self.range)

    @property
    def token_count(self) -> int:
        """T, the rows' lengths together."""
        return sum(row.count for row in self.rows)

    @property
    def has_trees(self) -> bool:
        return any(row.tree is not None for row in self.rows)

    @property
    def can_wait(self) -> bool:
        """Whether no row of it is a decode row or a tree: prompts are read beside answers, not before."""
        return not any(row.wants_token and (row.count == 1 or row.tree) for row in self.rows)


class TokensHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """TOKENS: the answers of a pass, one token for each row that wanted one, in row order.

    A row with a tree has one for each node of its accepted path, which are in `paths`: ids from the root on,
    a path for each such row, in row order; `reached` has the number of each tree's nodes that came to the
    last stage, the root included. Where the pack was `lost` there are none.
    """

    job: JobId
    epoch: Natural
    micro_batch: Natural
    step: Natural
    tokens: Annotated[tuple[Natural, ...], Meta(max_length=MAX_TOKENS)]
    timings: Annotated[tuple[StageTiming, ...], Meta(max_length=MAX_STAGES)] = ()
    lost: Lost | None = None
    paths: Annotated[tuple[Path, ...], Meta(max_length=MAX_ROWS)] = ()
    reached: Annotated[tuple[Nodes, ...], Meta(max_length=MAX_ROWS)] = ()

    def __post_init__(self) -> None:
        if self.lost is not None and (self.tokens or self.paths or self.reached):
            raise ValueError("a pack that is lost has no tokens")
        if any(path[0] != 0 or not _rises(path) for path in self.paths):
            raise ValueError("a path begins at the root, and leads from parents to children")
        if len(self.reached) != len(self.paths):
            raise ValueError(f"{len(self.reached)} numbers of nodes for {len(self.paths)} paths")
        if any(count < len(path) for count, path in zip(self.reached, self.paths, strict=True)):
            raise ValueError("a path has nodes that did not reach the last stage")


class Stage(Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks `first` to `stop` (not included) on a node; the KV of the arena's last `on_host` tiers is in its
    host memory."""

    node: NodeName
    first: Natural
    stop: Positive
    on_host: Annotated[int, Meta(ge=0, le=MAX_TIERS)] = 0

    @property
    def blocks(self) -> range:
        return range(self.first, self.stop)

    def __str__(self) -> str:
        return f"{self.node} (blocks {self.first}-{self.stop - 1})"


class WirePruner(Struct, frozen=True, forbid_unknown_fields=True):
    """By what the first stage prunes draft trees: a pruner for the depth of its blocks (`draft.pruner`)."""

    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_PRUNER)]  # safetensors
    embedding: Sha256  # of the tensor that it was trained with
    threshold: Annotated[float, Meta(ge=0, le=1)]  # retention scores below it drop a node


class PlanHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """PLAN: the whole layout, and the manifest of what the addressed node is to hold."""

    job: JobId
    epoch: Natural
    model: Name
    dtype: Name
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    tiers: Annotated[tuple[Natural, ...], Meta(min_length=1, max_length=MAX_TIERS)]  # cells of each
    micro_batches: Annotated[int, Meta(ge=1, le=MAX_MICRO_BATCHES)]  # at most; how many, packs tell
    depth: Annotated[int, Meta(ge=1, le=MAX_DEPTH)]  # packs of a micro-batch on their way at most
    manifest: Manifest
    codec: Literal["auto", "raw", "H8", "REC"] = "auto"  # of every hop
    coordinator: NodeName | None = None  # the first stage's node; None: whoever sends the plan
    rows: Annotated[int, Meta(ge=0, le=MAX_ROWS)] = 0  # decode rows of the largest pack, which memory is for
    pack_tokens: Natural = 0  # prompt tokens beside them
    pruner: WirePruner | None = None  # of the first stage, and told it alone; None: it prunes as packs say

    def __post_init__(self) -> None:
        expected = 0
        for stage in self.stages:
            if stage.first != expected or stage.stop <= stage.first:
                raise ValueError(f"stages leave a gap or overlap at block {expected}")
            expected = stage.stop
        if len({stage.node for stage in self.stages}) != len(self.stages):
            raise ValueError("a node has two stages")
        if self.coordinator not in (None, self.stages[0].node):
            raise ValueError("the coordinator is neither the sender nor on the first stage's node")
        Tiers(self.tiers)
        if any(stage.on_host > len(self.tiers) for stage in self.stages):
            raise ValueError("a stage has more tiers in host memory than there are")

    @property
    def cells(self) -> int:
        """Tokens that every stage has room for."""
        return sum(self.tiers)


class ReadyHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """READY: the addressed node holds its blocks and reaches the next stage."""

    job: JobId
    epoch: Natural
    weights: Natural  # bytes
    arena: Natural  # bytes
    seconds: float


class RefusedHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """REFUSED: why a node does not do what was asked of it."""

    job: JobId
    reason: Text
    hint: Text | None = None


class ReleaseHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """RELEASE (the job ended) or CANCEL (it ends now): free what it holds."""

    job: JobId


class DescribeHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """DESCRIBE: what are you?"""


class DescriptionHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """DESCRIPTION: figures as measured on the node, never a datasheet's."""

    node: NodeName
    device: Name
    memory_free: Natural  # bytes, those that a new plan would free included
    threads: Positive
    dtypes: tuple[Name, ...]
    job: JobId | None  # what it is busy with
    host_memory_free: Natural = 0  # for KV of offloaded slots; 0: device and host are one


class MeasureHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """MEASURE: how fast are you at a model of these shapes? No weights are needed for an answer."""

    model: Name  # for people
    config: Annotated[
        dict[ConfigField, ConfigValue], Meta(min_length=1, max_length=256)
    ]  # as Manifest.config
    dtype: Name
    fresh: bool  # whether what was measured before counts for nothing


class ProfileHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """PROFILE: the figures, or in words why there are none."""

    model: Name  # these two are MEASURE's
    dtype: Name
    profile: WireProfile | None
    trouble: Text | None

    def __post_init__(self) -> None:
        if (self.profile is None) == (self.trouble is None):
            raise ValueError("there is either a profile or trouble")


class SurveyHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """SURVEY: what do you know of your links to these peers? Those of `probe` are to be measured first.

    ASKER is the process that asks, by the channel it asks on.
    """

    number: Natural
    peers: Annotated[tuple[NodeName, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    probe: Annotated[tuple[NodeName, ...], Meta(max_length=MAX_STAGES)]

    def __post_init__(self) -> None:
        if not set(self.probe) <= set(self.peers) or len(set(self.peers)) != len(self.peers):
            raise ValueError("those to be probed are some of the peers, and each is named once")


class LinkFigures(Struct, frozen=True, forbid_unknown_fields=True):
    """The link from a node to a peer, as the node knows it; None is not known."""

    peer: NodeName
    rate: LinkRate | None = None  # bytes/s of datagrams
    is_lower_bound: bool = False
    min_rtt: RoundTrip | None = None  # s
    loss: Annotated[float, Meta(ge=0, le=1)] | None = None  # share of the packets
    age: Annotated[float, Meta(ge=0, le=1e12)] | None = None  # s since the rate was measured
    trouble: Annotated[str, Meta(max_length=512)] | None = None  # why it was not reached


class LinksHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """LINKS: what a SURVEY asked for, in its order."""

    number: Natural
    links: Annotated[tuple[LinkFigures, ...], Meta(max_length=MAX_STAGES)]


class FailedHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """FAILED: a stage could not compute a pack; never the pack passed on."""

    job: JobId
    epoch: Natural
    node: NodeName
    blocks: Name
    micro_batch: Natural
    step: Natural
    code: Name
    message: Text


class TableHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """TABLE: shifts of a hop's channels, told to the next stage before frames refer to them."""

    job: JobId
    epoch: Natural
    width: Annotated[int, Meta(ge=0, le=255)]
    columns: Positive
    shifts: bytes
    digest: Digest


class TableKnownHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """TABLE_KNOWN: the next stage holds a table."""

    job: JobId
    epoch: Natural
    digest: Digest


class PingHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """PING: are you there, and at what? Answered whatever the node is computing."""

    number: Natural


class PongHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """PONG: `activity` says in words what the node does just now and `since` for how many seconds.

    `received` and `replied` are when the PING came and this left, in seconds on the node's clock: with the
    asker's own two moments they tell the clocks' offset (RFC 5905's four timestamps).
    """

    number: Natural
    activity: Text
    since: float
    queued: Natural
    received: Finite
    replied: Finite
    stage: StageReport | None = None


def _rises(numbers: tuple[int, ...]) -> bool:
    return all(before < after for before, after in pairwise(numbers))
