"""What this machine takes for a model's shapes: seconds of blocks, attention, ends, copies and codecs.

Runs on the node's device thread, with its threads and its layout of weights, and needs no weights on disk. A
planner's other figures, memory above all, are looked up when they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bbquic.errors import ModelError, PlanRefused
from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange, Tiers
from bbquic.kv.rows import RowSpan
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.sampling import Sampling, choose
from bbquic.model.shape import BYTES_PER_VALUE
from bbquic.model.spec import build_config, spec_for_type
from bbquic.plan.cluster import AttentionCost, Curve, NodeProfile
from bbquic.plan.fit import fit_attention, rising
from bbquic.runtime.loading import DTYPES
from bbquic.runtime.machine import Machine
from bbquic.runtime.measure_codec import measure_codecs
from bbquic.runtime.profile import WireProfile
from bbquic.runtime.profile_cache import ProfileCache, ProfileKey
from bbquic.runtime.protocol import MeasureHeader, PackHeader, Row, Stage
from bbquic.runtime.rehearsal import Rehearsal, decode_rows, rehearsal
from bbquic.runtime.stage import ModelWorker
from bbquic.runtime.stopwatch import Stopwatch, Work
from bbquic.units import Bytes, BytesPerSecond, Seconds

BUDGET = Seconds(16.0)  # for all of it; making the weights comes first and is in it, so 20 s are never passed
FEW = (1, 4, 8, 16, 32, 64)  # tokens of packs that wait for weights: through blocks that no cache holds
MANY = (128, 256, 512)  # and of those that compute
ENDS_ROWS = (1, 8, 32, 128)
DECODE = ((4, 64), (16, 64), (32, 64), (64, 112), (32, 240), (16, 480))  # rows and what each looks back on
CHUNKS = ((0, 64), (0, 256), (256, 128))  # of prompts: what came before, and tokens
COPIED = 2 << 20  # bytes of the tensor that is copied to a GPU and back
OVERHEAD_ROWS = 16
# A pack between loop and threads, there and back; assumed, for no thread can measure it of itself.
HANDING = Seconds(150e-6)
HUGE_BLOCKS = 1024  # more than a model has

NOTHING = Bytes(0)


def measure(
    machine: Machine,
    config: Mapping[str, str],
    dtype: str,
    *,
    held: Bytes = NOTHING,
    budget: Seconds = BUDGET,
    stop: Callable[[], bool] = lambda: False,
) -> NodeProfile:
    """The profile, without a name. `config` is a manifest's: fields as canonical JSON.

    `held` bytes are of weights that a new plan would free. Raises: PlanRefused for a dtype the device does
    not compute in, ModelError for a config that is none or does not fit in memory, Abandoned once `stop`
    says so.
    """
    watch = Stopwatch(budget, stop=stop)
    chosen = DTYPES.get(dtype)
    if chosen is None or dtype not in machine.dtypes:
        raise PlanRefused(
            f"{machine.device_name} does not compute in {dtype}",
            hint=f"it computes in {' and '.join(machine.dtypes)}",
        )
    fields = config_fields(config)
    spec = spec_for_type(fields.get("model_type"))
    built = build_config(spec, fields)
    memory = machine.memory_free(held)
    made = rehearsal(spec, built, chosen, machine.device, machine.memory_free())
    timed = _Timed(made, dtype)
    try:
        profile = timed.profile(watch)
    finally:
        del made, timed
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
    return with_memory(replace(profile, memory=memory), machine, held)


def with_memory(profile: NodeProfile, machine: Machine, held: Bytes) -> NodeProfile:
    """The same with what is free just now and may be offloaded, whenever the rest was measured."""
    return replace(
        profile,
        memory=machine.memory_free(held),
        host_memory=machine.host_memory_free(held),
        offloads=machine.offloads,
    )


def config_fields(config: Mapping[str, str]) -> dict[str, Any]:
    """A manifest's config as config.json had it. Raises: ModelError."""
    try:
        fields = {name: json.loads(value) for name, value in config.items()}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"a model's config is not JSON: {error}") from None
    for name in ("auto_map", "quantization_config"):
        if fields.get(name) is not None:
            raise ModelError(f"a model with {name} is not computed here")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        value = fields.get(name)
        if type(value) is not int or not 1 <= value <= 2**31:
            raise ModelError(f"a model's {name} is {value!r}, not a number from 1 up")
    return {**fields, "num_hidden_layers": min(fields["num_hidden_layers"], HUGE_BLOCKS)}


@dataclass(frozen=True, slots=True)
class _Timed:
    made: Rehearsal
    dtype: str

    def profile(self, watch: Stopwatch) -> NodeProfile:
        """All of it, each part with its share of the budget; the later ones get what the earlier left."""
        worker = self._beside_blocks()
        overhead = watch.share(0.05).median(self._pack(worker), before=self._flush)
        mlp = self._mlp(watch.share(0.55))
        attention = self._attention([decode_rows(*each) for each in DECODE], watch.share(0.4))
        chunks = [[RowSpan(0, first, count)] for first, count in CHUNKS]
        attention_prompt = self._attention(chunks, watch.share(0.3))
        embed = rising(watch.share(0.15).curve((1, 64, 512), self._embed, before=self._flush))
        head = self._head(watch.share(0.5))
        to_device, to_host = self._copies(worker, watch.share(0.2))
        codecs = measure_codecs(self.dtype, self.made.many.hidden_size, watch.share(0.8))
        return NodeProfile(
            name="",
            mlp=mlp,
            attention=attention,
            attention_prompt=attention_prompt,
            embed=embed,
            head=head,
            memory=Bytes(0),
            overhead=Seconds(overhead + HANDING),
            to_host=to_host,
            to_device=to_device,
            codecs=codecs,
        )

    def _flush(self) -> None:
        """What a stage did just before: read weights, more than a cache holds."""
        self.made.blocks(1, model=self.made.many)()

    def _mlp(self, watch: Stopwatch) -> Curve:
        """Seconds a block, by tokens; the rotary embedding, once a pack, is in the overhead."""
        made = self.made
        few = self._each(FEW, made.many, watch.share(0.6))
        many = self._each(MANY, made.few, watch) if len(few) == len(FEW) else []
        return rising([*few, *many])

    def _each(self, sizes: tuple[int, ...], model: StageModel, watch: Stopwatch) -> list[tuple[float, float]]:
        beside = watch.share(0.1).curve(sizes, lambda size: self.made.blocks(size, model=self.made.ends))
        whole = watch.curve(sizes, lambda size: self.made.blocks(size, model=model))
        alone = Curve(tuple(beside))
        count = len(model.blocks)
        return [(size, max(took - alone(size), 0.5 * took) / count) for size, took in whole]

    def _attention(self, tries: Sequence[Sequence[RowSpan]], watch: Stopwatch) -> AttentionCost:
        made = self.made
        count = len(made.arena.blocks)
        points: list[tuple[float, float, float]] = []
        for place, spans in enumerate(tries):
            part = watch.share(1 / (len(tries) - place))
            took = part.median(made.attention(spans), before=self._flush)
            points.append((*size_of(spans), took / count))
        return fit_attention(points)

    def _embed(self, tokens: int) -> Work:
        made = self.made
        ids = torch.randint(made.vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
        ids = ids.to(made.device, torch.int32)

        def work() -> None:
            made.ends.embed(ids)
            made.wait()

        return work

    def _head(self, watch: Stopwatch) -> Curve:
        points = watch.curve(ENDS_ROWS, self._choosing, before=self._flush)
        return rising([(rows, took * self.made.cut) for rows, took in points])

    def _choosing(self, rows: int) -> Work:
        """The last norm, the head and the choice for so many rows."""
        made = self.made
        hidden = torch.ones((rows, made.ends.hidden_size), dtype=made.ends.dtype, device=made.device)
        greedy, positions = [Sampling()] * rows, range(rows)

        @torch.inference_mode()
        def work() -> None:
            choose(made.ends.logits(hidden), greedy, positions)

        return work

    def _beside_blocks(self) -> ModelWorker:
        """A stage without a block."""
        ends = self.made.ends
        arena = Arena(
            blocks=range(1),
            tiers=Tiers((OVERHEAD_ROWS * CELL_ALIGNMENT,)),
            kv_heads=ends.kv_heads,
            head_dim=ends.head_dim,
            dtype=ends.dtype,
            device=ends.device,
        )
        return ModelWorker(Stage("measured", 0, 1), ends, arena, embeds=False, heads=False)

    def _pack(self, worker: ModelWorker) -> Work:
        """A decode pack in, computed and out: all that a pack takes beside blocks and ends."""
        rows = tuple(Row(slot, 1, slot, 1, True, None) for slot in range(OVERHEAD_ROWS))
        where = SlotRange.of(0, OVERHEAD_ROWS, CELL_ALIGNMENT)
        pack = PackHeader("0" * 16, 0, 0, 1, where.numbers, rows)
        body = bytes(OVERHEAD_ROWS * self.made.ends.hidden_size * BYTES_PER_VALUE[self.dtype])

        def work() -> None:
            worker.stage_out(pack, worker.compute(pack, worker.stage_in(pack, body)))

        return work

    def _copies(
        self, worker: ModelWorker, watch: Stopwatch
    ) -> tuple[BytesPerSecond | None, BytesPerSecond | None]:
        """Bytes/s to the device and back, through pinned memory as packs go; None on a CPU."""
        device = worker.device
        if not device.overlaps:
            return None, None
        data = bytes(COPIED)

        def bring() -> None:
            with device.inbound():
                device.bring(data, self.made.ends.dtype)
            self.made.wait()

        tensor = torch.zeros(COPIED, dtype=torch.uint8, device=self.made.device)

        def fetch() -> None:
            with device.outbound(device.moment()):
                device.fetch([tensor])

        inward = watch.share(0.5).median(bring)
        outward = watch.median(fetch)
        return BytesPerSecond(COPIED / inward), BytesPerSecond(COPIED / outward)


def size_of(spans: Sequence[RowSpan]) -> tuple[float, float]:
    """Tokens of some rows, and how many keys one of them looks at on average: as `Load` counts them."""
    tokens = sum(span.count for span in spans)
    keys = sum(span.count * (span.first + (1 + span.count) / 2) for span in spans)
    return float(tokens), keys / tokens


class Profiler:
    """This machine's profiles: measured once for a model's shapes, and kept."""

    def __init__(self, machine: Machine, cache: ProfileCache, *, budget: Seconds = BUDGET) -> None:
        self._machine = machine
        self._cache = cache
        self._budget = budget

    def key(self, config: Mapping[str, str], dtype: str) -> ProfileKey:
        return ProfileKey.of(self._machine.device_name, self._machine.threads, config, dtype)

    def remembered(self, asked: MeasureHeader, held: Bytes) -> NodeProfile | None:
        """What was measured before, with the memory that is free now; None where nothing was, or where what
        was counts for nothing."""
        if asked.fresh:
            return None
        known = self._cache.recall(self.key(asked.config, asked.dtype))
        return None if known is None else with_memory(known.plain(""), self._machine, held)

    def measured(self, asked: MeasureHeader, held: Bytes, stop: Callable[[], bool]) -> NodeProfile:
        """Measured now, on the thread that calls, and kept. Raises: as `measure`."""
        profile = measure(self._machine, asked.config, asked.dtype, held=held, budget=self._budget, stop=stop)
        self._cache.remember(self.key(asked.config, asked.dtype), WireProfile.of(profile))
        return profile

    def expected(self, config: Mapping[str, str], dtype: str) -> NodeProfile | None:
        """What is believed of a stage of this model, where it was measured."""
        known = self._cache.recall(self.key(config, dtype))
        return None if known is None else known.plain("")

    def forget(self, config: Mapping[str, str], dtype: str) -> None:
        """It was wrong: the next one who asks has it measured anew."""
        self._cache.forget(self.key(config, dtype))
