"""What only a GPU can show: the lanes' streams overlap, pinned buffers are few, tokens are right.

`python -m bench.gpu_check`: minutes. Without a CUDA device it says so, checks nothing and exits 0; a check
that fails makes it exit 1. METHODOLOGY.md says what the figures mean.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bbquic.errors import BBQuicError, StageFailed
from bbquic.kv.ranges import CELL_ALIGNMENT, Tiers
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache
from bbquic.model.weights import load_tensors, tensors_for
from bbquic.runtime.device import CudaDevice, Device
from bbquic.runtime.hop import CodecMode, HopIn, HopOut
from bbquic.runtime.lanes import Job, Lanes
from bbquic.runtime.placement import PLAIN, Placement
from bbquic.runtime.pool import EACH
from bbquic.runtime.protocol import PackHeader, Row, Stage
from bbquic.runtime.stage import Computed, ModelWorker, Output, Staged
from bbquic.runtime.timing import Mark
from bbquic.units import Bytes, Seconds

TESTS = Path(__file__).parent.parent / "tests"
MODEL = "smollm2-135m"
TIE = 1e-4  # logits closer than this at the top are a tie, and either token is right
PROMPTS, ANSWER = 8, 24
PACKS, BODY = 16, 32 << 20  # of the overlap check: 32 MB take over a millisecond on any bus
LEAST_OVERLAP = 0.5  # of the copies' time

Interval = tuple[float, float]


class Grinder:
    """A StageWorker that copies what comes in and out, and multiplies matrices for about as long."""

    stage = Stage("gpu", 0, 1)
    weights_bytes = arena_bytes = Bytes(0)

    def __init__(self, device: Device, rounds: int, size: int = 4096) -> None:
        self._device = device
        self._rounds = rounds
        self._matrix = torch.randn(size, size, device=device.torch_device) / size**0.5

    def body_length(self, pack: PackHeader) -> int:
        return BODY

    def is_light_in(self, pack: PackHeader) -> bool:
        return False

    def is_light_out(self, pack: PackHeader) -> bool:
        return False

    def stage_in(self, pack: PackHeader, body: bytes | memoryview, placement: Placement = PLAIN) -> Staged:
        with self._device.inbound():
            tensor = self._device.bring(body, torch.float32)
            return Staged(tensor, self._device.moment())

    def compute(self, pack: PackHeader, staged: Staged, copies: tuple[Any, ...] = ()) -> Computed:
        with self._device.computing(staged.on_device):
            self._device.hold([staged.value, self._matrix])
            began = self._device.moment()
            result = self._matrix
            for _ in range(self._rounds):
                result = result @ self._matrix
            return Computed(staged.value + result[0, 0] * 0, began, self._device.moment())

    def stage_out(self, pack: PackHeader, computed: Computed) -> Output:
        with self._device.outbound(computed.computed):
            (body,) = self._device.fetch([computed.value])
        return Output(None, body, Seconds(time.monotonic()))


def a_pack(step: int) -> PackHeader:
    return PackHeader("0" * 16, 0, 0, step, (0, 1, 16), (Row(0, 1, 0, 1, True, None),))


def grind(worker: Grinder, packs: int) -> list[Job]:
    """Packs through the lanes at once; each must come out as it went in."""

    async def main() -> list[Job]:
        done: list[Job] = []
        finished = asyncio.Event()

        async def send(job: Job) -> None:
            done.append(job)
            if len(done) == packs:
                finished.set()

        async def fail(job: Job, error: StageFailed) -> None:
            raise error

        lanes = Lanes(
            worker, HopIn("float32"), HopOut("float32", CodecMode.RAW, lambda: None), packs, send, fail
        )
        bodies = [torch.full((BODY // 4,), float(step)).numpy().tobytes() for step in range(packs)]
        with ThreadPoolExecutor(1) as device:
            running = asyncio.create_task(lanes.run(device))
            for step, body in enumerate(bodies):
                now = Seconds(time.monotonic())
                lanes.put_nowait(Job(a_pack(step + 1), body, now, now))
            async with asyncio.timeout(100):
                await asyncio.wait(
                    [running, asyncio.create_task(finished.wait())], return_when="FIRST_COMPLETED"
                )
            if running.done():
                await running
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        for job, body in zip(done, bodies, strict=True):
            assert job.output is not None
            assert job.output.body == body, "a pack came out of the lanes changed"
        return done

    return asyncio.run(main())


def overlap(copies: Sequence[Interval], computing: Sequence[Interval]) -> float:
    """The share of the copies' time that lies within computing, of whichever pack."""
    shared = sum(
        max(0.0, min(stop, end) - max(start, begin)) for start, stop in copies for begin, end in computing
    )
    return shared / sum(stop - start for start, stop in copies)


def interval(job: Job, start: Mark, stop: Mark) -> Interval:
    """From when both the lane had begun and what comes before was done."""
    return max(job.times[: start + 1]), job.times[stop]


def check_overlap(device: CudaDevice) -> bool:
    warm = grind(Grinder(device, 1), 4)
    copying = min(job.times[Mark.ON_DEVICE] - job.times[Mark.DECODE_BEGAN] for job in warm)
    grind(Grinder(device, 8), 2)  # the first product on a stream makes its workspace
    one = min(
        job.times[Mark.COMPUTED] - job.times[Mark.COMPUTE_BEGAN] for job in grind(Grinder(device, 8), 2)
    )
    rounds = max(1, round(8 * 1.5 * copying / max(one, 1e-6)))
    before = device.pinned_in.taken
    jobs = grind(Grinder(device, rounds), PACKS)
    computing = [interval(job, Mark.COMPUTE_BEGAN, Mark.COMPUTED) for job in jobs]
    into = overlap([interval(job, Mark.DECODE_BEGAN, Mark.ON_DEVICE) for job in jobs], computing)
    out = overlap([interval(job, Mark.COPY_BEGAN, Mark.ON_HOST) for job in jobs], computing)
    ordered = all(a[1] <= b[0] + 1e-4 for a, b in pairwise(computing))
    print(f"overlap_in: {into:.2f} of the copying to the device went on while another pack was computed")
    print(f"overlap_out: {out:.2f} of the copying from the device")
    pools = (device.pinned_in, device.pinned_out)
    for name, pool in zip(("in", "out"), pools, strict=True):
        print(f"pinned_{name}: {pool.buffers} buffers, {pool.nbytes >> 20} MiB, taken {pool.taken} times")
    sizes = 2  # of the bodies, and of what is small
    reused = device.pinned_in.taken - before >= PACKS and all(one.buffers <= sizes * EACH for one in pools)
    return into >= LEAST_OVERLAP and out >= LEAST_OVERLAP and ordered and reused


def open_model(folder: Path) -> ModelDirectory:
    """The default model where it can be had, else a small random one."""
    try:
        return fetch_model(MODEL, user_cache(), print)
    except (BBQuicError, OSError) as error:
        print(f"{MODEL} cannot be had here ({error}): checking a small random model in its place")
        sys.path.append(str(TESTS))
        from tiny_model import make_tiny_llama

        return ModelDirectory(make_tiny_llama(folder / "tiny"), "tiny")


def read_prompts(model: ModelDirectory, count: int) -> list[list[int]]:
    lines = (TESTS / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [record["prompt"] for record in map(json.loads, lines) if "prompt" in record]
    return [tokens for tokens in map(model.tokenizer.encode, texts) if 0 < len(tokens) <= 200][:count]


def make_workers(model: ModelDirectory, stages: int, cells: int, device: torch.device) -> list[ModelWorker]:
    """The model in float32, cut into stages of like size."""
    cuts = [model.blocks * place // stages for place in range(stages + 1)]
    workers = []
    for place, (first, stop) in enumerate(pairwise(cuts)):
        embeds, heads, blocks = place == 0, place == stages - 1, range(first, stop)
        names = tensors_for(model.spec, model.config, blocks, embeds=embeds, heads=heads)
        tensors = load_tensors(model, names, torch.float32, device)
        loaded = StageModel(model.spec, model.config, tensors, blocks=blocks, embeds=embeds, heads=heads)
        arena = Arena(
            blocks=blocks,
            tiers=Tiers((cells,)),
            kv_heads=loaded.kv_heads,
            head_dim=loaded.head_dim,
            dtype=torch.float32,
            device=device,
        )
        stage = Stage(f"gpu-{place + 1}", first, stop)
        workers.append(ModelWorker(stage, loaded, arena, embeds=embeds, heads=heads))
    return workers


def generate(
    workers: Sequence[ModelWorker], prompts: Sequence[Sequence[int]], count: int, capacity: int
) -> list[list[int]]:
    """Greedy answers of `count` tokens to all prompts at once, each in a slot of its own."""
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(count):
        rows, tokens = [], b""
        for slot, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            new = answer[-1:] or list(prompt)
            first = len(prompt) + len(answer) - 1 if answer else 0
            rows.append(Row(slot, 1, first, len(new), True, None))
            tokens += b"".join(token.to_bytes(4, "little") for token in new)
        pack = PackHeader("0" * 16, 0, 0, step + 1, (0, len(prompts), capacity), tuple(rows), tokens)
        body: bytes | memoryview = b""
        for worker in workers:
            output = worker.stage_out(pack, worker.compute(pack, worker.stage_in(pack, body)))
            body = output.body
        assert output.tokens is not None
        for answer, token in zip(answers, output.tokens, strict=True):
            answer.append(token)
    return answers


@torch.inference_mode()
def wrong_tokens(reference: Any, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens that transformers would not have chosen at their place, ties aside."""
    ids = torch.tensor([[*prompt, *answer]], device=reference.device)
    logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return int((logits.max(dim=-1).values - chosen >= TIE).sum())


def check_tokens(device: torch.device) -> bool:
    """Whether the model's tokens on `device`, whole and in two stages, are transformers' there."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        model = open_model(Path(folder))
        prompts = read_prompts(model, PROMPTS)
        need = max(map(len, prompts)) + ANSWER
        capacity = -(-need // CELL_ALIGNMENT) * CELL_ALIGNMENT
        reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval().to(device)
        found = []
        for stages in (1, 2):
            workers = make_workers(model, stages, capacity * len(prompts), device)
            answers = generate(workers, prompts, ANSWER, capacity)
            found.append(answers)
            wrong = sum(wrong_tokens(reference, *pair) for pair in zip(prompts, answers, strict=True))
            total = ANSWER * len(prompts)
            print(f"tokens_{stages}_stages: {total - wrong} of {total} as transformers chooses")
            good = good and not wrong
        print(f"tokens_alike: {found[0] == found[1]}")
    return good


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device here, so nothing was checked")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"device: {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    checks = {"overlap": check_overlap(CudaDevice(device)), "tokens": check_tokens(device)}
    for name, good in checks.items():
        print(f"{name}: {'ok' if good else 'FAILED'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
