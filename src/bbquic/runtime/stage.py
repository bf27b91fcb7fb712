"""A stage's device work in three parts, for the three lanes' threads: a pack in, computed, and out again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bbquic.draft.pruner import Guesses
from bbquic.errors import ModelError, RemoteProtocolError, StageFailed
from bbquic.kv.attention import PackedAttention
from bbquic.kv.compaction import CompactionFailed, Compactor, PackCompaction
from bbquic.kv.offload import host_attention
from bbquic.kv.ranges import SlotCopy
from bbquic.kv.regions import Moving
from bbquic.kv.rows import RowSpan, positions
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.sampling import Choice, NonFiniteLogits, Sampling, begin_choice
from bbquic.runtime.device import Buffer, Device, Moment, device_for, now
from bbquic.runtime.memory import host_memory_free, in_words, is_out_of_memory
from bbquic.runtime.placement import PLAIN, Placement
from bbquic.runtime.protocol import PackHeader, Stage
from bbquic.runtime.pruning import Pruning
from bbquic.runtime.trees import kept_places, token_ids, verdicts
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
    """What goes on: `tokens` to the coordinator, or else a tensor's bytes to the next stage.

    `paths` are the accepted ones of rows with trees. A tensor is that of the pack as it goes on (`onward`);
    where this stage decided what is kept of its trees, `pruned` is the pack that says it.
    """

    tokens: tuple[int, ...] | None
    body: bytes | memoryview
    on_host: Seconds  # on time.monotonic()
    paths: tuple[tuple[int, ...], ...] = ()
    pruned: PackHeader | None = None


class StageWorker(Protocol):
    """Computes a stage's packs in the order they are given; owns its KV memory.

    `stage_in` is told how the pack's rows lie in their slots, `compute` what of KV is to be moved first.
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

    def stage_in(
        self, pack: PackHeader, body: bytes | memoryview, placement: Placement = PLAIN
    ) -> Staged: ...

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[Moving, ...] = ()) -> Computed: ...

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output: ...

    def relieve(self) -> str:
        """After a pack that failed with one of the LOSABLE codes, in any thread: give up memory that nothing
        uses, and say in words what is free."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Tokens [S] of a pack that are to be turned into one: their places in it, how, and the positions of what
    is chosen."""

    places: torch.Tensor
    params: list[Sampling]
    positions: list[int]


@dataclass(slots=True)
class _Inputs:
    tensor: torch.Tensor  # token ids [T] in the first stage, else hidden states [T, D]
    positions: torch.Tensor  # [T]
    attention: PackedAttention
    compaction: PackCompaction
    wanted: _Wanted | None  # in the last stage, where a row wants a token
    kept: torch.Tensor | None  # places [K] of what goes on, where that is not all
    guesses: Guesses | None  # that are to be judged

    @property
    def tensors(self) -> list[torch.Tensor]:
        mine = [self.tensor, self.positions, *self.attention.tensors]
        mine += [] if self.wanted is None else [self.wanted.places]
        mine += [] if self.guesses is None else self.guesses.tensors
        return mine if self.kept is None else [*mine, self.kept]


@dataclass(slots=True)
class _Outputs:
    finite: torch.Tensor  # [2], of what came and of what was computed
    hidden: torch.Tensor | None  # [T, D] or what is kept of it; None in the last stage
    choice: Choice | None  # None where no row wants a token
    scores: torch.Tensor | None  # retention scores [G] of guesses
    compaction: PackCompaction


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
        pruning: Pruning | None = None,
    ) -> None:
        """`memory_free` says what is free where the model computes. With `pruning` this stage decides what
        goes on of draft trees; else it is as packs say."""
        self.stage = stage
        self._memory_free = memory_free
        self.arena = arena
        self.device: Device = device_for(model.device)
        self._host = host_attention(arena)  # its thread ends with this worker
        self._model = model
        self._compactor = Compactor(arena)
        self._embeds = embeds
        self._heads = heads
        self._pruning = None if heads else pruning

    @property
    def weights_bytes(self) -> Bytes:
        return self._model.nbytes

    @property
    def arena_bytes(self) -> Bytes:
        return self.arena.nbytes

    def reserve(self, workspace: Bytes, buffers: Bytes) -> None:
        """See that there is memory for packs, beside weights and arena. Raises: torch's own out-of-memory.

        On a GPU what was had once stays this process's, for the stream it was had on. On a CPU there is no
        such thing short of writing to every page, of the arena too, for a job that may never fill it: what
        others take meanwhile costs a pack, and not the job.
        """
        if self.device.overlaps:
            for lane, count in (
                (self.device.computing(now()), workspace + buffers // 2),
                (self.device.inbound(), buffers // 2),
            ):
                with lane:
                    torch.empty(count, dtype=torch.uint8, device=self.device.torch_device)

    def body_length(self, pack: PackHeader) -> int:
        return 0 if self._embeds else self._tensor_bytes(pack)

    def is_light_in(self, pack: PackHeader) -> bool:
        return not self.device.overlaps and self.body_length(pack) <= LIGHT

    def is_light_out(self, pack: PackHeader) -> bool:
        return not self.device.overlaps and (self._heads or self._tensor_bytes(pack) <= LIGHT)

    def _tensor_bytes(self, pack: PackHeader) -> int:
        return pack.token_count * self._model.hidden_size * self._model.dtype.itemsize

    # Inbound.

    def stage_in(self, pack: PackHeader, body: bytes | memoryview, placement: Placement = PLAIN) -> Staged:
        """Raises: RemoteProtocolError when the parts do not fit, ModelError for a token out of range."""
        with self.device.inbound():
            inputs = self._inputs(pack, body, placement)
            return Staged(inputs, self.device.moment())

    def _inputs(self, pack: PackHeader, data: bytes | memoryview, placement: Placement) -> _Inputs:
        layouts = placement.layouts
        spans = [
            RowSpan(row.slot, row.first, row.count, layouts.get(index)) for index, row in enumerate(pack.rows)
        ]
        places = positions(spans)  # [T]
        compaction = PackCompaction(self._compactor, placement.compactions, _name(pack))
        tensor = self._ids(pack) if self._embeds else self._hidden(pack, data)
        if pack.has_trees:
            token_ids(pack)  # they are needed once it is computed
        guesses = None if self._pruning is None else self._pruning.guesses(pack, self.device.bring)
        return _Inputs(
            tensor,
            self.device.bring(places.data.cast("B"), torch.int64),
            PackedAttention(
                spans,
                pack.slot_range,
                self.arena,
                device=self.device.torch_device,
                host=self._host,
                compaction=compaction,
            ),
            compaction,
            self._wanted(pack, places),
            self._kept(pack) if guesses is None else None,
            guesses,
        )

    def _kept(self, pack: PackHeader) -> torch.Tensor | None:
        places = None if self._heads else kept_places(pack)
        return None if places is None else self.device.bring(places.tobytes(), torch.int64)

    def _ids(self, pack: PackHeader) -> torch.Tensor:
        token_ids(pack)
        self._model.check_tokens(torch.frombuffer(bytearray(pack.tokens), dtype=torch.int32))
        return self.device.bring(pack.tokens, torch.int32)

    def _hidden(self, pack: PackHeader, data: bytes | memoryview) -> torch.Tensor:
        if len(data) != self._tensor_bytes(pack):
            raise RemoteProtocolError(f"{len(data)} bytes of hidden states for {pack.token_count} tokens")
        return self.device.bring(data, self._model.dtype).view(pack.token_count, -1)

    def _wanted(self, pack: PackHeader, positions: NDArray[np.int64]) -> _Wanted | None:
        """A row's last token, and of a tree each."""
        if not self._heads:
            return None
        places: list[int] = []
        params: list[Sampling] = []
        stop = 0
        for row in pack.rows:
            stop += row.count
            if row.wants_token:
                count = 1 if row.tree is None else row.count
                places += range(stop - count, stop)
                params += [row.sampling.plain() if row.sampling else GREEDY] * count
        if not places:
            return None
        index = np.array(places)
        on_device = self.device.bring(index.tobytes(), torch.int64)
        return _Wanted(on_device, params, (positions[index] + 1).tolist())

    # On the device. Nothing here waits for it but attention in host memory.

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[Moving, ...] = ()) -> Computed:
        inputs: _Inputs = staged.value
        with torch.inference_mode(), self.device.computing(staged.on_device):
            self.device.hold([*inputs.tensors, *self.arena.tensors])
            began = self.device.moment()
            for moving in copies:
                self._move(moving)
            hidden = self._model.embed(inputs.tensor) if self._embeds else inputs.tensor  # [T, D]
            came_finite = torch.isfinite(hidden).all()
            with self._host or nullcontext():
                hidden = self._model.run(hidden, inputs.positions, inputs.attention)
            finite = torch.stack((came_finite, torch.isfinite(hidden).all()))
            choice = None if inputs.wanted is None else self._choice(hidden, inputs.wanted)
            if inputs.kept is not None:
                hidden = hidden[inputs.kept]
            scores = None
            if self._pruning is not None and inputs.guesses is not None:
                scores = self._pruning.pruner.scores(hidden, inputs.guesses)
            passed_on = None if self._heads else hidden
            outputs = _Outputs(finite, passed_on, choice, scores, inputs.compaction)
            return Computed(outputs, began, self.device.moment())

    def _move(self, moving: Moving) -> None:
        """KV from one place to another in all blocks, once nothing else moves."""
        if isinstance(moving, SlotCopy):
            self._compactor.wait_all()
            self.arena.copy(moving)
        else:
            self._compactor.move_now([moving])

    def _choice(self, hidden: torch.Tensor, wanted: _Wanted) -> Choice:
        return begin_choice(self._model.logits(hidden[wanted.places]), wanted.params, wanted.positions)

    # Outbound.

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output:
        """Raises: StageFailed `non_finite`, whatever else is in the pack; CompactionFailed."""
        outputs: _Outputs = computed.value
        outputs.compaction.finish()
        tensors = [outputs.finite]
        if outputs.hidden is not None:
            tensors.append(outputs.hidden)
        if outputs.choice is not None:
            tensors += outputs.choice.tensors
        if outputs.scores is not None:
            tensors.append(outputs.scores)
        with self.device.outbound(computed.computed):
            fetched = self.device.fetch(tensors)
        on_host = Seconds(time.monotonic())
        came_finite, is_finite = np.frombuffer(fetched[0], dtype=np.bool_)
        if not (came_finite and is_finite):
            verb = "computed" if came_finite or self._embeds else "was sent"
            raise stage_failure(
                self.stage, pack, "non_finite", f"it {verb} hidden states that are not finite"
            )
        if self._pruning is not None and outputs.scores is not None:
            pruned, body = self._pruning.pruned(pack, np.frombuffer(fetched[2], np.float32), fetched[1])
            return Output(None, body, on_host, pruned=pruned)
        if outputs.hidden is not None:
            return Output(None, fetched[1], on_host)
        if outputs.choice is None:
            return Output((), b"", on_host)
        tokens, paths = self._tokens(pack, outputs.choice, *fetched[1:])
        return Output(tokens, b"", on_host, paths)

    def relieve(self) -> str:
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return f"{in_words(self._memory_free())} are free there"

    def _tokens(
        self, pack: PackHeader, choice: Choice, finite: Buffer, ids: Buffer, sampled: Buffer
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """What is chosen, and the accepted paths."""
        logits = np.frombuffer(sampled, dtype=np.float32)  # [K V]
        rows = logits.reshape(choice.tensors[2].shape)
        try:
            chosen = choice.chooser(np.frombuffer(finite, np.bool_), np.frombuffer(ids, np.int64), rows)
            return verdicts(pack, chosen)
        except NonFiniteLogits as error:
            raise stage_failure(self.stage, pack, "non_finite", error.message) from error


def stage_failure(stage: Stage, pack: PackHeader, code: str, message: str) -> StageFailed:
    """What is told of a pack that could not be computed: node, blocks, micro-batch and step."""
    return StageFailed(
        f"{stage} failed at {_name(pack)}: {message}",
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
    except CompactionFailed as error:
        raise stage_failure(stage, pack, "compaction", str(error)) from error
    except Exception as error:  # the boundary of the device
        if is_out_of_memory(error):
            words = " ".join(str(error).split()) or type(error).__name__
            raise stage_failure(stage, pack, "out_of_memory", words) from error
        raise stage_failure(stage, pack, "internal", f"{type(error).__name__}: {error}") from error


def _name(pack: PackHeader) -> str:
    return f"micro-batch {pack.micro_batch}, step {pack.step}"
