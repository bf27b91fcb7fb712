"""From what the nodes say of themselves to a plan each of them can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bbquic.errors import ConfigError, PlanRefused
from bbquic.kv.ranges import CELL_ALIGNMENT
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.model.shape import BYTES_PER_VALUE, kv_shape
from bbquic.plan.splits import arena_cells, given_split, weighed_split
from bbquic.runtime.hop import CodecMode
from bbquic.runtime.protocol import DescriptionHeader, PlanHeader, Stage
from bbquic.runtime.scheduler import DEPTH

ARENA_SHARE = 0.8  # of the memory beside the weights; the rest is for activations and buffers
HEAD_SHARE = 0.6  # of a block's time goes into its weights, as measured on a CPU with 16 rows
MOST_A_STAGE = 2  # micro-batches: with more, each pack's own price is paid too often, however long the loop
DEFAULT_SLOT = 4096  # tokens a slot is given room for, where memory and context allow


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What a user may decide; None leaves it to the figures."""

    batch: int = 32  # sequences in flight
    micro_batches: int | None = None  # None: one a stage at first, so that every stage has work
    depth: int = DEPTH  # packs of a micro-batch on their way at most
    codec: CodecMode = CodecMode.AUTO  # of every hop
    split: tuple[int, ...] | None = None  # blocks a node; None: even, the head counted as some more
    kv_tokens: int | None = None  # arena of every stage; None: what memory allows, up to the batch's need
    dtype: str | None = None  # None: what all devices prefer, else float32

    def start(self, stages: int) -> int | None:
        """Micro-batches to begin with, where their number follows measurements; None: it was asked for."""
        return None if self.micro_batches is not None else min(stages, self.batch)


def choose_dtype(wanted: str | None, nodes: Sequence[DescriptionHeader]) -> str:
    """One dtype for the whole chain. Raises: PlanRefused naming a node that does not compute in it."""
    first = nodes[0].dtypes[0]
    dtype = wanted or (first if all(node.dtypes[0] == first for node in nodes) else "float32")
    if dtype not in BYTES_PER_VALUE:
        raise ConfigError(f"{dtype} is not a dtype", hint=f"use {', '.join(BYTES_PER_VALUE)}")
    for node in nodes:
        if dtype not in node.dtypes:
            raise PlanRefused(
                f"{node.node} ({node.device}) does not compute in {dtype}",
                hint=f"it computes in {', '.join(node.dtypes)}",
            )
    return dtype


def make_plan(
    job: str,
    directory: ModelDirectory,
    manifest: Manifest,
    nodes: Sequence[DescriptionHeader],
    options: LayoutOptions,
) -> PlanHeader:
    """The plan, its manifest whole; `for_stage` cuts it down. Nodes are taken in the order given.

    Raises: ConfigError where split or batch do not fit, PlanRefused with need and have where memory does not.
    """
    blocks = directory.blocks
    ranges = (
        given_split(options.split, blocks=blocks, nodes=len(nodes))
        if options.split is not None
        else weighed_split(blocks, len(nodes), head=_head_weight(directory, manifest))
    )
    stages = tuple(Stage(node.node, r.start, r.stop) for node, r in zip(nodes, ranges, strict=True))
    micro_batches = options.micro_batches or min(MOST_A_STAGE * len(stages), options.batch)
    if not 1 <= micro_batches <= options.batch:
        raise ConfigError(
            f"a batch of {options.batch} does not make {micro_batches} micro-batches",
            hint="--microbatches is at least 1 and at most --batch",
        )
    dtype = choose_dtype(options.dtype, nodes)
    plan = PlanHeader(
        job,
        0,
        directory.name,
        dtype,
        stages,
        CELL_ALIGNMENT,
        micro_batches,
        options.depth,
        manifest,
        options.codec.value,
    )
    return msgspec.structs.replace(plan, cells=_cells(plan, directory, nodes, options))


def _head_weight(directory: ModelDirectory, manifest: Manifest) -> float:
    """How many blocks take as long as the LM head: a decode step reads every weight once, but a block does
    more than multiply by its weights."""
    spec = directory.spec
    block = sum(
        tensor.elements for name, tensor in manifest.tensors.items() if name.startswith(spec.block_prefix(0))
    )
    return HEAD_SHARE * manifest.tensors[_head_name(directory, manifest)].elements / block


def _head_name(directory: ModelDirectory, manifest: Manifest) -> str:
    """The head's tensor; a tied one is the embedding's."""
    names = directory.spec.weights
    tied = directory.fields.get("tie_word_embeddings") or names.head not in manifest.tensors
    return names.embed if tied else names.head


def for_stage(plan: PlanHeader, stage: Stage, directory: ModelDirectory) -> PlanHeader:
    """The plan as one node gets it: of the manifest, what its stage is made of."""
    names = _tensors_of(plan, stage, directory)
    return msgspec.structs.replace(plan, manifest=plan.manifest.only(names))


def _cells(
    plan: PlanHeader, directory: ModelDirectory, nodes: Sequence[DescriptionHeader], options: LayoutOptions
) -> int:
    width = BYTES_PER_VALUE[plan.dtype]
    kv_heads, head_dim = kv_shape(directory.fields)
    cell = 2 * kv_heads * head_dim * width
    weights = [
        width * sum(plan.manifest.tensors[name].elements for name in _tensors_of(plan, stage, directory))
        for stage in plan.stages
    ]
    wanted = options.kv_tokens or options.batch * min(directory.context_length, DEFAULT_SLOT)
    counts = [len(stage.blocks) for stage in plan.stages]
    room = [int(ARENA_SHARE * (node.memory_free - w)) + w for node, w in zip(nodes, weights, strict=True)]
    cells = arena_cells(memory=room, weights=weights, blocks=counts, cell=cell, wanted=wanted)
    least = CELL_ALIGNMENT * plan.micro_batches
    if cells < (options.kv_tokens or least):
        tight = min(range(len(nodes)), key=lambda i: (room[i] - weights[i]) / counts[i])
        need = weights[tight] + (options.kv_tokens or least) * counts[tight] * cell
        raise PlanRefused(
            f"{nodes[tight].node} cannot hold {plan.stages[tight]}: weights and KV memory need "
            f"{need / 1e9:.2f} GB, of its {nodes[tight].memory_free / 1e9:.2f} GB free "
            f"{room[tight] / 1e9:.2f} GB can be used",
            hint="give it fewer blocks with --split, add a node, or free memory there",
        )
    return cells


def _tensors_of(plan: PlanHeader, stage: Stage, directory: ModelDirectory) -> list[str]:
    """Names of the tensors a stage is made of, from the manifest's names alone."""
    spec = directory.spec
    prefixes = tuple(spec.block_prefix(block) for block in stage.blocks)
    names = [name for name in plan.manifest.tensors if name.startswith(prefixes)]
    if stage == plan.stages[0]:
        names.append(spec.weights.embed)
    if stage == plan.stages[-1]:
        names += [spec.weights.norm, _head_name(directory, plan.manifest)]
    return list(dict.fromkeys(names))
