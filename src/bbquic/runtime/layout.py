"""From what the nodes say of themselves to a plan each of them can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from bbquic.errors import ConfigError, PlanRefused
from bbquic.kv.ranges import CELL_ALIGNMENT
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.model.shape import BYTES_PER_VALUE
from bbquic.plan.cost import MemoryOptions, StageMemory, held_memory
from bbquic.plan.splits import given_split, weighed_split
from bbquic.runtime.hop import CodecMode
from bbquic.runtime.protocol import DescriptionHeader, PlanHeader, Stage
from bbquic.runtime.reserve import Have, least_cells, refusal
from bbquic.runtime.scheduler import DEPTH
from bbquic.runtime.sizes import head_tensor, model_sizes
from bbquic.runtime.tiering import Room, longest_slot, tiers_of
from bbquic.units import Bytes

HEAD_SHARE = 0.6  # of a block's time goes into its weights, as measured on a CPU with 16 rows
MOST_A_STAGE = 2  # micro-batches: with more, each pack's own price is paid too often, however long the loop
DEFAULT_SLOT = 4096  # tokens a slot is given room for, where memory and context allow


class CoordinatorPlace(StrEnum):
    """Where a job's loop begins and ends."""

    AUTO = "auto"  # in the command's process
    HERE = "here"
    STAGE = "stage"  # on the first stage's node, so that a command far away is not in the loop


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What a user may decide; None leaves it to the figures."""

    batch: int = 32  # sequences in flight
    micro_batches: int | None = None  # None: as many as measurements say, `first` at first
    first: int | None = None  # None: one a stage, so that every stage has work
    depth: int = DEPTH  # packs of a micro-batch on their way at most
    codec: CodecMode = CodecMode.AUTO  # of every hop
    coordinator: CoordinatorPlace = CoordinatorPlace.AUTO
    split: tuple[int, ...] | None = None  # blocks a node; None: even, the head counted as some more
    kv_tokens: int | None = None  # arena of every stage; None: what memory allows, up to the batch's need
    dtype: str | None = None  # None: what all devices prefer, else float32
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    offloaded: tuple[int, ...] | None = None  # slots of each stage with KV on the host; None: by `memory`
    slot: int | None = None  # tokens that a slot is planned for; None: what memory allows

    def rows(self, micro_batches: int) -> int:
        """Tokens that the largest pack has beside prompts: its rows, with all their guesses."""
        return self.memory.decoded(-(-self.batch // micro_batches))

    def start(self, stages: int) -> int | None:
        """Micro-batches to begin with, where their number follows measurements; None: it was asked for."""
        return None if self.micro_batches is not None else min(self.first or stages, self.batch)


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
    most = max(MOST_A_STAGE * len(stages), options.first or 0)
    micro_batches = options.micro_batches or min(most, options.batch)
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
        (CELL_ALIGNMENT,),
        micro_batches,
        options.depth,
        manifest,
        options.codec.value,
        stages[0].node if options.coordinator is CoordinatorPlace.STAGE else None,
        rows=options.rows(micro_batches),
        pack_tokens=options.memory.pack_tokens,
    )
    return _with_arena(plan, directory, nodes, options)


def _head_weight(directory: ModelDirectory, manifest: Manifest) -> float:
    """How many blocks take as long as the LM head: a decode step reads every weight once, but a block does
    more than multiply by its weights."""
    spec = directory.spec
    block = sum(
        tensor.elements for name, tensor in manifest.tensors.items() if name.startswith(spec.block_prefix(0))
    )
    return HEAD_SHARE * manifest.tensors[head_tensor(directory, manifest)].elements / block


def for_stage(plan: PlanHeader, stage: Stage, directory: ModelDirectory) -> PlanHeader:
    """The plan as one node gets it: of the manifest, what its stage is made of; the pruner is the first's."""
    names = _tensors_of(plan, stage, directory)
    pruner = plan.pruner if stage == plan.stages[0] else None
    return msgspec.structs.replace(plan, manifest=plan.manifest.only(names), pruner=pruner)


def _with_arena(
    plan: PlanHeader, directory: ModelDirectory, nodes: Sequence[DescriptionHeader], options: LayoutOptions
) -> PlanHeader:
    """The plan with the tiers of its arena, and what each stage has of them on its host.

    Raises: ConfigError where other slots are offloaded than there are, PlanRefused where memory is short.
    """
    offloaded, sides = _offloaded(plan, options), _sides(plan, directory, nodes, options)
    wanted = options.kv_tokens or options.batch * min(directory.context_length, DEFAULT_SLOT)
    if not any(offloaded):
        cells = min(wanted, *(side.room.device for side in sides))
        least = options.kv_tokens or CELL_ALIGNMENT * plan.micro_batches
        if cells < least:
            tight = min(sides, key=lambda side: side.room.device)
            raise tight.refusal(least, 0, tight.room.device, least_cells(plan))
        return msgspec.structs.replace(plan, tiers=(cells,))
    rooms, batch = [side.room for side in sides], options.batch
    slot = max(CELL_ALIGNMENT, wanted // batch // CELL_ALIGNMENT * CELL_ALIGNMENT)
    if options.kv_tokens is None:
        fits = longest_slot(rooms, offloaded, batch, options.slot or slot)
        slot = max(CELL_ALIGNMENT, fits)
    count = options.start(len(plan.stages)) or plan.micro_batches
    made = tiers_of(offloaded, rooms, batch=batch, slot=slot, micro_batches=count)
    for number, side in enumerate(sides):
        needs = made.on_device(number), made.beside(number)
        if not side.room.takes(*needs):
            most = min(one.most(made.on_device(place), made.beside(place)) for place, one in enumerate(sides))
            raise side.refusal(*needs, most, CELL_ALIGNMENT * batch)
    stages = [
        msgspec.structs.replace(stage, on_host=on_host)
        for stage, on_host in zip(plan.stages, made.on_host, strict=True)
    ]
    return msgspec.structs.replace(plan, tiers=made.sizes, stages=tuple(stages))


def _offloaded(plan: PlanHeader, options: LayoutOptions) -> tuple[int, ...]:
    """K of each stage. Raises: ConfigError where there are not as many slots, or stages."""
    if options.offloaded is None:
        return (round((options.memory.offload or 0.0) * options.batch),) * len(plan.stages)
    fits = all(0 <= slots <= options.batch for slots in options.offloaded)
    if len(options.offloaded) != len(plan.stages) or not fits:
        raise ConfigError(
            f"slots on hosts {options.offloaded}: not of {len(plan.stages)} stages, or not of {options.batch}"
        )
    return options.offloaded


@dataclass(frozen=True, slots=True)
class _Side:
    """A stage's memory: what it takes with one cell on its device, and what can be used of its node's."""

    stage: Stage
    node: DescriptionHeader
    held: StageMemory
    share: float

    @property
    def have(self) -> Have:
        return Have(self.node.memory_free, self.node.host_memory_free or None)

    @property
    def room(self) -> Room:
        cell, host = self.held.kv, self.have.host
        device = (int(self.share * self.node.memory_free) - (self.held.device - cell)) // cell
        return Room(device, None if host is None else int(self.share * host) // cell)

    def need(self, on_device: int, on_host: int) -> StageMemory:
        """For so many cells."""
        cell = self.held.kv
        return replace(self.held, kv=Bytes(on_device * cell), host_kv=Bytes(on_host * cell))

    def most(self, on_device: int, on_host: int) -> int:
        """Cells that fit, where they are spread as these."""
        need = self.need(on_device, on_host)
        return self.have.most(need, on_device + on_host, self.share)

    def refusal(self, on_device: int, on_host: int, most: int, least: int) -> PlanRefused:
        """For so many cells, where `most` fit, of `least` that are of use."""
        need = self.need(on_device, on_host)
        return refusal(self.node.node, self.stage, need, self.have, share=self.share, most=most, least=least)


def _sides(
    plan: PlanHeader, directory: ModelDirectory, nodes: Sequence[DescriptionHeader], options: LayoutOptions
) -> list[_Side]:
    """Every stage's memory, as `plan.cost` counts it."""
    sizes = model_sizes(directory, plan.manifest, plan.dtype)
    sides = []
    for stage, node in zip(plan.stages, nodes, strict=True):
        held = held_memory(
            sizes,
            options.memory,
            blocks=len(stage.blocks),
            batch=1,
            rows=-(-options.batch // plan.micro_batches),
            slot=1,
            embeds=stage is plan.stages[0],
            heads=stage is plan.stages[-1],
        )
        sides.append(_Side(stage, node, held, options.memory.share))
    return sides


def _tensors_of(plan: PlanHeader, stage: Stage, directory: ModelDirectory) -> list[str]:
    """Names of the tensors a stage is made of, from the manifest's names alone."""
    spec = directory.spec
    prefixes = tuple(spec.block_prefix(block) for block in stage.blocks)
    names = [name for name in plan.manifest.tensors if name.startswith(prefixes)]
    if stage == plan.stages[0]:
        names.append(spec.weights.embed)
    if stage == plan.stages[-1]:
        names += [spec.weights.norm, head_tensor(directory, plan.manifest)]
    return list(dict.fromkeys(names))
