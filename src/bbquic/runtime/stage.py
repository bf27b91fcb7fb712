"""A stage's device work in three parts, for the three lanes' threads: a pack in, computed, and out again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bbquic.errors import ModelError, RemoteProtocolError, StageFailed
from bbquic.kv.attention import PackedAttention, RowSpan
from bbquic.kv.ranges import SlotCopy
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.sampling import Choice, NonFiniteLogits, Sampling, begin_choice
from bbquic.runtime.device import Buffer, Device, Moment, device_for
from bbquic.runtime.memory import host_memory_free, is_out_of_memory
from bbquic.runtime.protocol import PackHeader, Stage
from bbquic.units import Bytes, Seconds

GREEDY = Sampling()
LOSABLE = frozenset({"out_of_memory", "compaction"})  # codes of failures that leave the stage sound
LIGHT = 256 << 10  # bytes of a body that a CPU copies in some 50 µs, about what a change of threads costs


@dataclass(slots=True)
class Staged:
    """A pack's input where it is computed. `value` is the worker's own."""

    value: Any
    on_device: Moment


@dataclass(slots=True)
class Computed:
    """What a pack became, perhaps still under way on the device. `value` is the worker's own."""

    value: Any
    began: Moment
    computed: Moment


@dataclass(frozen=True, slots=True)
class Output:
    """What goes on: `tokens` to the coordinator, or else a tensor's bytes to the next stage."""

    tokens: tuple[int, ...] | None
    body: bytes | memoryview
    on_host: Seconds  # on time.monotonic()


class StageWorker(Protocol):
    """Computes a stage's packs in the order they are given; owns its KV memory.

    `compute` is called in one thread, in the packs' order; `stage_in` and `stage_out` in two others, or for
    light packs in that of `compute`, so that a light pack may be staged beside a heavy one. All may raise
    what they like: `stage_errors` makes a StageFailed of it. When `stage_out` returns, every moment of its
    pack has passed.
    """

    @property
    def stage(self) -> Stage: ...

    @property
    def weights_bytes(self) -> Bytes: ...

    @property
    def arena_bytes(self) -> Bytes: ...

    def body_length(self, pack: PackHeader) -> int:
        """Bytes that the body of a pack has on arrival here."""

    def is_light_in(self, pack: PackHeader) -> bool:
        """Whether `stage_in` takes less time than a change of threads: then the device's thread does it."""

    def is_light_out(self, pack: PackHeader) -> bool:
        """The same of `stage_out`."""

    def stage_in(self, pack: PackHeader, body: bytes | memoryview) -> Staged: ...

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[SlotCopy, ...] = ()) -> Computed: ...

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output: ...

    def relieve(self) -> str:
        """After a pack that failed with one of the LOSABLE codes, in any thread: give up memory that nothing
        uses, and say in words what is free."""


@dataclass(slots=True)
class _Inputs:
    tensor: torch.Tensor  # token ids [T] in the first stage, else hidden states [T, D]
    positions: torch.Tensor  # [T]
    attention: PackedAttention
    ends: torch.Tensor | None  # [S], places of the rows' last tokens that want one, in the last stage

    @property
    def tensors(self) -> list[torch.Tensor]:
        mine = [self.tensor, self.positions, *self.attention.tensors]
        return mine if self.ends is None else [*mine, self.ends]


@dataclass(slots=True)
class _Outputs:
    finite: torch.Tensor  # [2], of what came and of what was computed
    hidden: torch.Tensor | None  # [T, D]; None in the last stage
    choice: Choice | None  # None where no row wants a token


class ModelWorker:
    """The StageWorker of a real model, on a CPU or a GPU."""

    def __init__(
        self,
        stage: Stage,
        model: StageModel,
        arena: Arena,
        *,
        embeds: bool,
        heads: bool,
        memory_free: Callable[[], Bytes] = host_memory_free,
    ) -> None:
        """`memory_free` says what is free where the model computes."""
        self.stage = stage
        self._memory_free = memory_free
        self.arena = arena
        self.device: Device = device_for(model.device)
        self._model = model
        self._embeds = embeds
        self._heads = heads

    @property
    def weights_bytes(self) -> Bytes:
        return self._model.nbytes

    @property
    def arena_bytes(self) -> Bytes:
        return self.arena.nbytes

    def body_length(self, pack: PackHeader) -> int:
        return 0 if self._embeds else self._tensor_bytes(pack)

    def is_light_in(self, pack: PackHeader) -> bool:
        return not self.device.overlaps and self.body_length(pack) <= LIGHT

    def is_light_out(self, pack: PackHeader) -> bool:
        return not self.device.overlaps and (self._heads or self._tensor_bytes(pack) <= LIGHT)

    def _tensor_bytes(self, pack: PackHeader) -> int:
        return pack.token_count * self._model.hidden_size * self._model.dtype.itemsize

    # Inbound.

    def stage_in(self, pack: PackHeader, body: bytes | memoryview) -> Staged:
        """Raises: RemoteProtocolError when the parts do not fit, ModelError for a token out of range."""
        with self.device.inbound():
            inputs = self._inputs(pack, body)
            return Staged(inputs, self.device.moment())

    def _inputs(self, pack: PackHeader, data: bytes | memoryview) -> _Inputs:
        device = self.device.torch_device
        spans = [RowSpan(row.slot, row.first, row.count) for row in pack.rows]
        positions = torch.cat([torch.arange(one.first, one.first + one.count) for one in spans])
        tensor = self._ids(pack) if self._embeds else self._hidden(pack, data)
        return _Inputs(
            tensor,
            self.device.bring(positions.numpy().data.cast("B"), torch.int64),
            PackedAttention(spans, pack.slot_range, self.arena, device=device),
            self._ends(pack),
        )

    def _ids(self, pack: PackHeader) -> torch.Tensor:
        if len(pack.tokens) != 4 * pack.token_count:
            raise RemoteProtocolError(f"{len(pack.tokens)} bytes of token ids for {pack.token_count} tokens")
        self._model.check_tokens(torch.frombuffer(bytearray(pack.tokens), dtype=torch.int32))
        return self.device.bring(pack.tokens, torch.int32)

    def _hidden(self, pack: PackHeader, data: bytes | memoryview) -> torch.Tensor:
        if len(data) != self._tensor_bytes(pack):
            raise RemoteProtocolError(f"{len(data)} bytes of hidden states for {pack.token_count} tokens")
        return self.device.bring(data, self._model.dtype).view(pack.token_count, -1)

    def _ends(self, pack: PackHeader) -> torch.Tensor | None:
        if not self._heads:
            return None
        ends, place = [], 0
        for row in pack.rows:
            place += row.count
            if row.wants_token:
                ends.append(place - 1)
        return self.device.bring(np.array(ends, dtype=np.int64).tobytes(), torch.int64) if ends else None

    # On the device. Nothing here waits for it.

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[SlotCopy, ...] = ()) -> Computed:
        inputs: _Inputs = staged.value
        with torch.inference_mode(), self.device.computing(staged.on_device):
            self.device.hold([*inputs.tensors, *self.arena.tensors])
            began = self.device.moment()
            for copy in copies:
                self.arena.copy(copy)
            hidden = self._model.embed(inputs.tensor) if self._embeds else inputs.tensor  # [T, D]
            came_finite = torch.isfinite(hidden).all()
            hidden = self._model.run(hidden, inputs.positions, inputs.attention)
            finite = torch.stack((came_finite, torch.isfinite(hidden).all()))
            choice = None if inputs.ends is None else self._choice(pack, hidden[inputs.ends])
            outputs = _Outputs(finite, None if self._heads else hidden, choice)
            return Computed(outputs, began, self.device.moment())

    def _choice(self, pack: PackHeader, hidden: torch.Tensor) -> Choice:
        wanting = [row for row in pack.rows if row.wants_token]
        params = [row.sampling.plain() if row.sampling else GREEDY for row in wanting]
        return begin_choice(self._model.logits(hidden), params, [row.first + row.count for row in wanting])

    # Outbound.

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output:
        """Raises: StageFailed `non_finite`, whatever else is in the pack."""
        outputs: _Outputs = computed.value
        tensors = [outputs.finite]
        if outputs.hidden is not None:
            tensors.append(outputs.hidden)
        if outputs.choice is not None:
            tensors += outputs.choice.tensors
        with self.device.outbound(computed.computed):
            fetched = self.device.fetch(tensors)
        on_host = Seconds(time.monotonic())
        came_finite, is_finite = np.frombuffer(fetched[0], dtype=np.bool_)
        if not (came_finite and is_finite):
            verb = "computed" if came_finite or self._embeds else "was sent"
            raise stage_failure(
                self.stage, pack, "non_finite", f"it {verb} hidden states that are not finite"
            )
        if outputs.hidden is not None:
            return Output(None, fetched[1], on_host)
        tokens = () if outputs.choice is None else self._tokens(pack, outputs.choice, *fetched[1:])
        return Output(tokens, b"", on_host)

    def relieve(self) -> str:
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return f"{self._memory_free() / 1e9:.2f} GB are free there"

    def _tokens(
        self, pack: PackHeader, choice: Choice, finite: Buffer, ids: Buffer, sampled: Buffer
    ) -> tuple[int, ...]:
        logits = np.frombuffer(sampled, dtype=np.float32)  # [K V]
        rows = logits.reshape(choice.tensors[2].shape)
        try:
            return tuple(choice.finish(np.frombuffer(finite, np.bool_), np.frombuffer(ids, np.int64), rows))
        except NonFiniteLogits as error:
            raise stage_failure(self.stage, pack, "non_finite", error.message) from error


def stage_failure(stage: Stage, pack: PackHeader, code: str, message: str) -> StageFailed:
    """What is told of a pack that could not be computed: node, blocks, micro-batch and step."""
    return StageFailed(
        f"{stage} failed at micro-batch {pack.micro_batch}, step {pack.step}: {message}",
        node=stage.node,
        code=code,
    )


@contextmanager
def stage_errors(stage: Stage, pack: PackHeader) -> Iterator[None]:
    """Makes a StageFailed of whatever goes wrong with a pack: the coordinator hears of it, by name."""
    try:
        yield
    except StageFailed:
        raise
    except (ModelError, RemoteProtocolError) as error:
        raise stage_failure(stage, pack, "bad_input", error.message) from error
    except Exception as error:  # the boundary of the device
        if is_out_of_memory(error):
            words = " ".join(str(error).split()) or type(error).__name__
            raise stage_failure(stage, pack, "out_of_memory", words) from error
        raise stage_failure(stage, pack, "internal", f"{type(error).__name__}: {error}") from error
