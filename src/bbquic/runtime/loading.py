"""From a plan to a stage on this machine's device: the model found, checked against the plan, loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bbquic.errors import BBQuicError, ModelError, PlanRefused
from bbquic.kv.ranges import Tiers
from bbquic.kv.slab import Arena, bytes_per_cell
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import compare, manifest_of
from bbquic.model.registry import KNOWN, ModelMissing, resolve_model
from bbquic.model.tokenizer import StreamDecoder
from bbquic.model.weights import load_tensors, tensors_for
from bbquic.runtime.machine import Machine
from bbquic.runtime.protocol import PlanHeader, Stage
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
        self._held: tuple[tuple[str, str, Stage, bool], StageModel] | None = None

    @property
    def held_bytes(self) -> Bytes:
        return self._held[1].nbytes if self._held is not None else Bytes(0)

    def load(self, plan: PlanHeader, stage: Stage, report: Callable[[str], None]) -> StageWorker:
        """Raises: PlanRefused, ModelError; an out-of-memory error with the figures."""
        embeds, heads = stage is plan.stages[0], stage is plan.stages[-1]
        model = self._model(plan, stage, report, embeds=embeds, heads=heads)
        report("reserving KV memory")
        return ModelWorker(stage, model, self._arena(plan, stage, model), embeds=embeds, heads=heads)

    def text(self, plan: PlanHeader, report: Callable[[str], None]) -> TextStreamFactory:
        """Raises: ModelError where the model or its tokenizer cannot be opened."""
        tokenizer = self._store.open(plan.model, report).tokenizer
        StreamDecoder(tokenizer)  # raises here, and not in mid-run, on a tokenizer it cannot follow
        return lambda: StreamDecoder(tokenizer)

    def _model(
        self, plan: PlanHeader, stage: Stage, report: Callable[[str], None], *, embeds: bool, heads: bool
    ) -> StageModel:
        key = (plan.manifest.digest, plan.dtype, stage, heads)
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        self._held = None  # before the next one is loaded, so that the two are never held together
        dtype = DTYPES.get(plan.dtype)
        if dtype is None or plan.dtype not in self._machine.dtypes:
            raise PlanRefused(
                f"{self._node} ({self._machine.device_name}) does not compute in {plan.dtype}",
                hint=f"use --dtype {' or '.join(self._machine.dtypes)}",
            )
        report("opening the model")
        directory = self._store.open(plan.model, report)
        if directory.blocks != plan.stages[-1].stop:
            raise PlanRefused(
                f"{plan.model} on {self._node} has {directory.blocks} blocks, the plan {plan.stages[-1].stop}"
            )
        needed = tensors_for(directory.spec, directory.config, stage.blocks, embeds=embeds, heads=heads)
        report("checking the weights against the plan")
        held = manifest_of(directory, needed)
        compare(plan.manifest.only(needed), held, "the coordinator", self._node)
        report("loading the weights")
        tensors = load_tensors(directory, needed, dtype, self._machine.device)
        model = StageModel(
            directory.spec, directory.config, tensors, blocks=stage.blocks, embeds=embeds, heads=heads
        )
        self._held = (key, model)
        return model

    def _arena(self, plan: PlanHeader, stage: Stage, model: StageModel) -> Arena:
        """The stage's KV memory, or a refusal with need and have."""
        cell = bytes_per_cell(kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=model.dtype)
        need = cell * len(stage.blocks) * plan.cells
        free = self._machine.memory_free()
        if need > free:
            raise self._too_little(need, free, free // (cell * len(stage.blocks)))
        try:
            return Arena(
                blocks=stage.blocks,
                tiers=Tiers(plan.tiers),
                on_host=stage.on_host,
                kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                dtype=model.dtype,
                device=model.device,
            )
        except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
            raise self._too_little(need, free, free // (cell * len(stage.blocks))) from error

    def _too_little(self, need: int, free: int, cells: int) -> BBQuicError:
        return PlanRefused(
            f"{self._node} has {free / 1e9:.2f} GB free for KV memory, the plan needs {need / 1e9:.2f} GB",
            hint=f"use --kv-tokens {max(cells, 0)} or less, a smaller --batch, or fewer blocks there",
        )
