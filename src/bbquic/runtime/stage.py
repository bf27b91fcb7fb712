"""A stage's device work: one pack in, hidden states or tokens out. Synchronous, for one thread."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from bbquic.errors import ModelError, RemoteProtocolError, StageFailed
from bbquic.kv.attention import PackedAttention, RowSpan
from bbquic.kv.ranges import SlotCopy
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.sampling import NonFiniteLogits, Sampling, choose
from bbquic.runtime.protocol import PackHeader, Stage, TokensHeader
from bbquic.runtime.timing import StageTiming
from bbquic.units import Bytes, Seconds

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What goes on: a pack with its tensor's bytes to the next stage, or tokens to the coordinator."""

    header: PackHeader | TokensHeader
    body: memoryview


class StageWorker:
    """Computes a stage's packs in the order they are given; owns its KV arena."""

    def __init__(self, stage: Stage, model: StageModel, arena: Arena, *, embeds: bool, heads: bool) -> None:
        self.stage = stage
        self.arena = arena
        self._model = model
        self._embeds = embeds
        self._heads = heads

    @property
    def weights_bytes(self) -> Bytes:
        return self._model.nbytes

    def body_length(self, pack: PackHeader) -> int:
        """Bytes that the body of a pack has on arrival here."""
        if self._embeds:
            return 0
        return pack.token_count * self._model.hidden_size * self._model.dtype.itemsize

    def compute(
        self,
        pack: PackHeader,
        body: memoryview,
        queued: Seconds,
        copies: tuple[SlotCopy, ...] = (),
    ) -> StageOutput:
        """Raises: StageFailed naming node, blocks, micro-batch and step, whatever went wrong."""
        started = time.monotonic()
        try:
            for copy in copies:
                self.arena.copy(copy)
            hidden = self._input(pack, body)
            device = self._model.device
            spans = [RowSpan(row.slot, row.first, row.count) for row in pack.rows]
            attention = PackedAttention(spans, pack.slot_range, self.arena, device=device)
            positions = torch.cat([torch.arange(s.first, s.first + s.count) for s in spans]).to(device)
            hidden = self._model.run(hidden, positions, attention)  # [T, D]
            self._check_finite(hidden, pack, "computed")
            if self._heads:
                tokens = self._tokens(pack, hidden)
                return self._tokens_output(pack, tokens, queued, started)
            return self._pack_output(pack, hidden, queued, started)
        except StageFailed:
            raise
        except torch.OutOfMemoryError as error:
            raise self._failure(pack, "out_of_memory", str(error)) from error
        except (ModelError, RemoteProtocolError) as error:
            raise self._failure(pack, "bad_input", error.message) from error
        except Exception as error:  # the boundary of the device: the coordinator hears of it, with its name
            raise self._failure(pack, "internal", f"{type(error).__name__}: {error}") from error

    def _input(self, pack: PackHeader, body: memoryview) -> torch.Tensor:
        """The pack's hidden states [T, D] on the device: embedded here, or as they arrived."""
        count = pack.token_count
        if len(body) != self.body_length(pack):
            raise RemoteProtocolError(f"{len(body)} bytes of hidden states for {count} tokens")
        if self._embeds:
            if len(pack.tokens) != 4 * count:
                raise RemoteProtocolError(f"{len(pack.tokens)} bytes of token ids for {count} tokens")
            ids = torch.frombuffer(bytearray(pack.tokens), dtype=torch.int32)
            return self._model.embed(ids.to(self._model.device))
        writable = body if not body.readonly else memoryview(bytearray(body))
        hidden = torch.frombuffer(writable, dtype=self._model.dtype).view(count, -1).to(self._model.device)
        self._check_finite(hidden, pack, "was sent")
        return hidden

    def _check_finite(self, hidden: torch.Tensor, pack: PackHeader, verb: str) -> None:
        if not bool(torch.isfinite(hidden).all()):
            raise self._failure(pack, "non_finite", f"it {verb} hidden states that are not finite")

    def _tokens(self, pack: PackHeader, hidden: torch.Tensor) -> list[int]:
        """The rows' next tokens, for those that want one."""
        ends, params, positions = [], [], []
        place = 0
        for row in pack.rows:
            place += row.count
            if row.wants_token:
                ends.append(place - 1)
                params.append(row.sampling.plain() if row.sampling else GREEDY)
                positions.append(row.first + row.count)
        if not ends:
            return []
        logits = self._model.logits(hidden[torch.tensor(ends, device=hidden.device)])  # [S, V]
        try:
            return choose(logits, params, positions)
        except NonFiniteLogits as error:
            raise self._failure(pack, "non_finite", error.message) from error

    def _tokens_output(
        self, pack: PackHeader, tokens: list[int], queued: Seconds, started: float
    ) -> StageOutput:
        timings = (*pack.timings, self._timing(queued, started, 0))
        header = TokensHeader(pack.job, pack.epoch, pack.micro_batch, pack.step, tuple(tokens), timings)
        return StageOutput(header, memoryview(b""))

    def _pack_output(
        self, pack: PackHeader, hidden: torch.Tensor, queued: Seconds, started: float
    ) -> StageOutput:
        body = hidden.contiguous().cpu().view(torch.uint8).numpy().reshape(-1).data
        header = PackHeader(
            pack.job,
            pack.epoch,
            pack.micro_batch,
            pack.step,
            pack.range,
            pack.rows,
            moves=pack.moves,
            timings=(*pack.timings, self._timing(queued, started, len(body))),
        )
        return StageOutput(header, body)

    def _timing(self, queued: Seconds, started: float, sent: int) -> StageTiming:
        waited, computed = round(queued * 1e6), round((queued + time.monotonic() - started) * 1e6)
        marks = (0, 0, 0, 0, waited, computed, computed, computed, computed, computed)
        return StageTiming(self.stage.node, started - queued, marks, sent, sent, 0.0)

    def _failure(self, pack: PackHeader, code: str, message: str) -> StageFailed:
        return StageFailed(
            f"{self.stage} failed at micro-batch {pack.micro_batch}, step {pack.step}: {message}",
            node=self.stage.node,
            code=code,
        )
