"""Tokens/s of local nodes against transformers' `generate` in one process, side by side in one run.

`python -m bench.generate [--batch 8,32] [--nodes 3] [--rounds 3] [--quick] [--bars]`

Both sides read the same prompts of equal length and produce the same number of tokens in float32, end
tokens ignored. Rounds alternate between the sides. METHODOLOGY.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import manifest_of
from bbquic.model.registry import user_cache
from bbquic.model.sampling import Sampling
from bbquic.model.tokenizer import StreamDecoder
from bbquic.runtime.coordinator import Coordinator
from bbquic.runtime.generate import RunModel, RunOptions, deployed
from bbquic.runtime.layout import LayoutOptions
from bbquic.runtime.local import LocalCluster, LocalTurns, local_nodes
from bbquic.runtime.memory import host_memory_free
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.request import Outcome, Request
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from bbquic.transport.channel import Endpoint, Role
from bbquic.transport.threaded import open_endpoint
from bbquic.units import Bytes
from bench.common import append_result, median, print_bars, spread

MODEL = "smollm2-135m"
TEXT = "The history of the lighthouse begins with fires on hills, and with ships that looked for them. "


@dataclass(frozen=True, slots=True)
class Load:
    """What a round is: `batch` prompts of `prompt` tokens, each with `answer` tokens to come."""

    batch: int
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Times:
    """A round's two times: with one token an answer, which is nearly all prefill, and with all of them."""

    first: float
    whole: float

    def decode_rate(self, load: Load) -> float:
        """Tokens a second behind the first one of each answer."""
        return load.batch * (load.answer - 1) / (self.whole - self.first)

    def whole_rate(self, load: Load) -> float:
        """Generated tokens a second of the whole round."""
        return load.batch * load.answer / self.whole


class Reference:
    """transformers in a process of its own with a given number of threads; it idles between rounds."""

    def __init__(self, model: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.reference", str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, prompts: Sequence[Sequence[int]], answer: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"prompts": prompts, "answer": answer}), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


class Nodes:
    """Our side: nodes that are up, and one deployment a run (their weights stay loaded)."""

    def __init__(
        self,
        endpoint: Endpoint,
        cluster: LocalCluster,
        model: RunModel,
        layout: LayoutOptions,
        *,
        shares: bool = False,
    ) -> None:
        """Beginnings that prompts share are computed once only where it `shares`: the others do not."""
        self.statistics: LoopStatistics | None = None  # of the last run
        self._shares = shares
        self._endpoint = endpoint
        self._cluster = cluster
        self._model = model
        self._options = RunOptions(layout=layout)

    async def run(self, prompts: Sequence[Sequence[int]], answer: int) -> float:
        async def requests() -> AsyncIterator[Request]:
            for line, tokens in enumerate(prompts, 1):
                yield Request(line, tuple(tokens), answer, Sampling())

        finished: list[Outcome] = []

        async def keep(outcomes: Sequence[Outcome]) -> None:
            finished.extend(outcomes)

        layout = self._options.layout
        async with deployed(
            self._endpoint, self._cluster.nodes, self._model, self._options, lambda _: None
        ) as ready:
            links, plan = ready.links, ready.plan
            scheduler = Scheduler(
                SchedulerOptions(
                    plan.micro_batches,
                    layout.batch,
                    plan.tiers,
                    depth=plan.depth,
                    shares_prefixes=self._shares,
                )
            )
            tokenizer = self._model.directory.tokenizer
            coordinator = Coordinator(
                links, plan, scheduler, ends=frozenset(), text=lambda: StreamDecoder(tokenizer)
            )
            start = time.perf_counter()
            await coordinator.run(requests(), keep)
            seconds = time.perf_counter() - start
            self.statistics = coordinator.statistics()
        assert len(finished) == len(prompts)
        return seconds


def make_prompts(directory: ModelDirectory, load: Load) -> list[list[int]]:
    """Prompts of exactly the asked-for length, no two alike."""
    tokens = directory.tokenizer.encode(TEXT * (1 + load.prompt // 8))
    return [tokens[shift % 20 :][: load.prompt] for shift in range(load.batch)]


async def compare(
    directory: ModelDirectory, load: Load, nodes: int, micro_batches: int | None, rounds: int
) -> dict[str, list[Times]]:
    """Each side's rounds, interleaved; one unmeasured warm-up each."""
    model = RunModel(directory, manifest_of(directory))
    cores = len(os.sched_getaffinity(0))
    turns = LocalTurns.of(micro_batches, nodes=nodes, cores=cores)
    layout = LayoutOptions(
        batch=load.batch, micro_batches=turns.micro_batches, depth=turns.depth, dtype="float32"
    )
    sides: dict[str, list[Times]] = {}
    prompts = make_prompts(directory, load)
    memory = Bytes(int(0.5 * host_memory_free()) // nodes)
    with ExitStack() as stack:
        references = {
            f"transformers_{threads}": stack.enter_context(Reference(directory.path, threads))
            for threads in sorted({1, cores})
        }
        async with local_nodes(nodes, models=[], turns=turns, memory=memory) as local:
            endpoint = await open_endpoint(local.identity, local.peers, Role.COMMAND, host="127.0.0.1")
            ours = Nodes(endpoint, local, model, layout)
            for number in range(rounds + 1):
                took = {"nodes": Times(await ours.run(prompts, 1), await ours.run(prompts, load.answer))}
                for name, reference in references.items():
                    took[name] = Times(reference.run(prompts, 1), reference.run(prompts, load.answer))
                for name, seconds in took.items():
                    if number:
                        sides.setdefault(name, []).append(seconds)
                    print(
                        f"  batch {load.batch} round {number or 'warm-up'} {name}: "
                        f"decode {seconds.decode_rate(load):.1f} tok/s, whole {seconds.whole_rate(load):.1f}",
                        file=sys.stderr,
                    )
            await endpoint.close()
    return sides


def figures(sides: dict[str, list[Times]], load: Load) -> dict[str, float]:
    """The ratios, ours over each reference, by medians."""
    found = {}
    for kind in ("decode", "whole"):
        rates = {
            name: median([getattr(one, f"{kind}_rate")(load) for one in rounds])
            for name, rounds in sides.items()
        }
        for name, rate in rates.items():
            if name != "nodes":
                found[f"{kind}_batch_{load.batch}_vs_{name}"] = rates["nodes"] / rate
    cores = max(int(name.rpartition("_")[2]) for name in sides if name != "nodes")
    found[f"decode_batch_{load.batch}_vs_transformers"] = found[
        f"decode_batch_{load.batch}_vs_transformers_{cores}"
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="8,32")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=None, help="default: as `bbquic generate`")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=48, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="smallest size, to see that it runs")
    parser.add_argument("--bars", action="store_true", help="check against bars.toml; exit 1 when short")
    args = parser.parse_args()
    directory = fetch_model(MODEL, user_cache(), lambda line: print(line, file=sys.stderr))
    batches = [2] if args.quick else [int(batch) for batch in args.batch.split(",")]
    measured: dict[str, float] = {}
    for batch in batches:
        load = Load(batch, 8, 4) if args.quick else Load(batch, args.prompt, args.answer)
        nodes, rounds = (2, 1) if args.quick else (args.nodes, args.rounds)
        sides = asyncio.run(compare(directory, load, nodes, args.microbatches, rounds))
        ratios = figures(sides, load)
        measured |= ratios
        rates = {
            f"{name}_{kind}": spread([getattr(one, f"{kind}_rate")(load) for one in found])
            for name, found in sides.items()
            for kind in ("decode", "whole")
        }
        for name, ratio in ratios.items():
            print(f"{name}: {ratio:.3f}")
        size = {"batch": load.batch, "prompt": load.prompt, "answer": load.answer, "nodes": nodes}
        size["micro_batches"] = args.microbatches or 1
        if not args.quick:
            append_result(
                "generate", {**size, "rounds": rounds, "ratios": ratios, "tokens_per_second": rates}
            )
    return 0 if not args.bars or print_bars("generate", measured) else 1


if __name__ == "__main__":
    sys.exit(main())
