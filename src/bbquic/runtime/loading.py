"""From a plan to a stage on this machine's device: the model found, checked against the plan, loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bbquic.errors import ModelError, PlanRefused
from bbquic.kv.ranges import Tiers
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import compare, manifest_of
from bbquic.model.registry import KNOWN, ModelMissing, resolve_model
from bbquic.model.shape import BYTES_PER_VALUE
from bbquic.model.tokenizer import StreamDecoder
from bbquic.model.weights import load_tensors, tensors_for
from bbquic.plan.cost import StageMemory
from bbquic.runtime.machine import Machine
from bbquic.runtime.memory import is_out_of_memory
from bbquic.runtime.protocol import PlanHeader, Stage
from bbquic.runtime.pruning import Pruning, pruner_bytes, pruner_part
from bbquic.runtime.reserve import Have, least_cells, refusal, stage_memory
from bbquic.runtime.sequence import TextStreamFactory
from bbquic.runtime.stage import ModelWorker, StageWorker
from bbquic.units import Bytes

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")  # a peer names models, never paths
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ModelStore:
    """Models that this machine serves: directories its owner named, and known names from the cache."""

    def __init__(self, directories: Mapping[str, Path], cache: Path) -> None:
        self._directories = dict(directories)
        self._cache = cache

    def open(self, name: str, report: Callable[[str], None]) -> ModelDirectory:
        """The model of that name, fetched first where it is a known one. Raises: ModelError."""
        if PLAIN_NAME.fullmatch(name) is None:
            raise ModelError(f"{name!r} is not the name of a model")
        if name in self._directories:
            return ModelDirectory(self._directories[name], name)
        if name not in KNOWN:
            raise ModelError(
                f"this node has no model {name}",
                hint="start it with --model DIRECTORY, where the directory has that name",
            )
        try:
            return resolve_model(name, self._cache)
        except ModelMissing:
            fetch_model(name, self._cache, report)
            return resolve_model(name, self._cache)


class DiskLoader:
    """Loads stages from models on disk; keeps the last stage's weights for the next job that wants them."""

    def __init__(self, store: ModelStore, machine: Machine, node: str) -> None:
        self._store = store
        self._machine = machine
        self._node = node
        self._held: tuple[tuple[str, str, range, bool], StageModel] | None = None

    @property
    def held_bytes(self) -> Bytes:
        return self._held[1].nbytes if self._held is not None else Bytes(0)

    def load(self, plan: PlanHeader, stage: Stage, report: Callable[[str], None]) -> StageWorker:
        """Raises: PlanRefused, with the figures where memory is short; ModelError."""
        embeds, heads = stage is plan.stages[0], stage is plan.stages[-1]
        self._check_dtype(plan)
        report("opening the model")
        directory = self._store.open(plan.model, report)
        model = self._model(directory, plan, stage, report, embeds=embeds, heads=heads)
        report("reserving memory")
        part = pruner_part(plan, directory) if embeds and not heads else None
        beside = pruner_bytes(part, directory)
        need = stage_memory(directory, plan, stage, Bytes(model.nbytes + beside))
        self._check_memory(plan, stage, need)
        try:
            arena = self._arena(plan, stage, model)
            worker = ModelWorker(
                stage,
                model,
                arena,
                embeds=embeds,
                heads=heads,
                memory_free=self._machine.memory_free,
                pruning=Pruning.of(plan, part, model),
            )
            worker.reserve(need.workspace, need.buffers)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._refusal(plan, stage, need, self._have()) from error
        return worker

    def text(self, plan: PlanHeader, report: Callable[[str], None]) -> TextStreamFactory:
        """Raises: ModelError where the model or its tokenizer cannot be opened."""
        tokenizer = self._store.open(plan.model, report).tokenizer
        StreamDecoder(tokenizer)  # raises here, and not in mid-run, on a tokenizer it cannot follow
        return lambda: StreamDecoder(tokenizer)

    def _check_dtype(self, plan: PlanHeader) -> None:
        if plan.dtype not in DTYPES or plan.dtype not in self._machine.dtypes:
            raise PlanRefused(
                f"{self._node} ({self._machine.device_name}) does not compute in {plan.dtype}",
                hint=f"use --dtype {' or '.join(self._machine.dtypes)}",
            )

    def _model(
        self,
        directory: ModelDirectory,
        plan: PlanHeader,
        stage: Stage,
        report: Callable[[str], None],
        *,
        embeds: bool,
        heads: bool,
    ) -> StageModel:
        key = (plan.manifest.digest, plan.dtype, stage.blocks, heads)  # not where the stage's KV is
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        if directory.blocks != plan.stages[-1].stop:
            raise PlanRefused(
                f"{plan.model} on {self._node} has {directory.blocks} blocks, the plan {plan.stages[-1].stop}"
            )
        needed = tensors_for(directory.spec, directory.config, stage.blocks, embeds=embeds, heads=heads)
        expected = plan.manifest.only(needed)
        width = BYTES_PER_VALUE[plan.dtype]
        weights = Bytes(width * sum(tensor.elements for tensor in expected.tensors.values()))
        need = stage_memory(directory, plan, stage, weights)
        self._check_memory(plan, stage, need)
        self._held = None  # before the next one is loaded, so that the two are never held together
        report("checking the weights against the plan")
        compare(expected, manifest_of(directory, needed), "the coordinator", self._node)
        report("loading the weights")
        try:
            tensors = load_tensors(directory, needed, DTYPES[plan.dtype], self._machine.device)
            model = StageModel(
                directory.spec, directory.config, tensors, blocks=stage.blocks, embeds=embeds, heads=heads
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._refusal(plan, stage, need, self._have()) from error
        self._held = (key, model)
        return model

    def _arena(self, plan: PlanHeader, stage: Stage, model: StageModel) -> Arena:
        return Arena(
            blocks=stage.blocks,
            tiers=Tiers(plan.tiers),
            on_host=stage.on_host,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            device=model.device,
        )

    def _have(self) -> Have:
        """What is free, with the weights that are held: those of the stage, or given up for them."""
        machine, held = self._machine, self.held_bytes
        return Have(machine.memory_free(held), machine.host_memory_free(held) if machine.offloads else None)

    def _check_memory(self, plan: PlanHeader, stage: Stage, need: StageMemory) -> None:
        """Raises: PlanRefused."""
        have = self._have()
        if not have.holds(need):
            raise self._refusal(plan, stage, need, have)

    def _refusal(self, plan: PlanHeader, stage: Stage, need: StageMemory, have: Have) -> PlanRefused:
        most = min(have.most(need, plan.cells), plan.cells - 1)
        return refusal(self._node, stage, need, have, share=1.0, most=most, least=least_cells(plan))
