"""The KV store: what a split between device and host costs, attention against dense, compaction, memory.

`python -m bench.kv [--only alpha,attention,...] [--rounds N] [--quick] [--bars]`. Blocks are of
SmolLM2-135M's shapes with random weights; for its memory the model itself is loaded. METHODOLOGY.md says
what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bbquic.kv.attention import PackedAttention
from bbquic.kv.ranges import SlotRange, Tiers
from bbquic.kv.regions import Regions
from bbquic.kv.rows import RowSpan
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.fetch import fetch_model
from bbquic.model.registry import user_cache
from bbquic.model.spec import build_config, spec_for_type
from bbquic.runtime.memory import host_memory_free
from bbquic.runtime.placement import CompactionPolicy, Placement, place
from bbquic.runtime.protocol import PackHeader, Row, Stage, Tree
from bbquic.runtime.ranges import aligned
from bbquic.runtime.rehearsal import decode_rows, rehearsal
from bbquic.runtime.stage import ModelWorker
from bench import kv_prefix
from bench.common import append_result, median, print_bars, spread
from bench.gpu_check import MODEL, offloading
from bench.kv_memory import a_tiny_model

FIELDS: Mapping[str, Any] = {  # SmolLM2-135M's
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 256, "vocab_size": 512}
ROWS, CONTEXT = 32, 240
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
EQUAL = ((32, 240), (8, 1024), (64, 64))  # rows of equal length, for attention against dense
CPU = torch.device("cpu")

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    fields: Mapping[str, Any]
    rows: int
    context: int
    rounds: int
    is_small: bool = False

    @property
    def capacity(self) -> int:
        """For the longest of rows that look back on `context` tokens on average, and a tree."""
        return aligned(self.context * 5 // 4 + 16)


def interleaved(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work by rounds, in which they take turns, each round beginning with another."""
    names = list(works)
    took: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        begin = number % len(names)
        for name in names[begin:] + names[:begin]:
            started = time.perf_counter()
            works[name]()
            if number:
                took[name].append(time.perf_counter() - started)
    return took


def paired(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of one over the other, round by round."""
    return median([a / b for a, b in zip(one, other, strict=True)])


def a_model(size: Size) -> StageModel:
    """Blocks enough that no weights are in a cache when their turn comes."""
    spec = spec_for_type("llama")
    config = build_config(spec, dict(size.fields))
    return rehearsal(spec, config, torch.float32, CPU, host_memory_free()).many


def an_arena(model: StageModel, tiers: Sequence[int], on_host: int) -> Arena:
    arena = Arena(
        blocks=model.blocks,
        tiers=Tiers(tuple(tiers)),
        on_host=on_host,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    for tensor in arena.tensors:
        tensor.fill_(0.02)
    return arena


# The split.


def ragged_rows(where: SlotRange, context: int) -> list[RowSpan]:
    """A decode row in each slot, tier after tier, of lengths as a job's."""
    lengths = [span.first for span in decode_rows(where.count, context)]
    return [RowSpan(slot, first, 1) for slot, first in zip(where.slots(), lengths, strict=True)]


def a_step(model: StageModel, where: SlotRange, on_host: int, context: int) -> Work:
    """A decode pack through all blocks."""
    cells = [where.span(tier) for tier in range(where.tiers)]
    arena = an_arena(model, [len(span) for span in cells], on_host)
    for tier in range(where.tiers):
        for block in model.blocks:
            for store in arena.view(block, where, tier):
                store.fill_(0.02)
    rows = ragged_rows(where, context)
    hidden = torch.randn((len(rows), model.hidden_size), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([row.first for row in rows])
    return lambda: model.run(hidden, positions, PackedAttention(rows, where, arena, device=CPU))


def measure_alpha(size: Size) -> tuple[dict[str, float], dict[str, Any]]:
    model = a_model(size)
    works = {
        f"{alpha:g}": a_step(model, *offloading(size.rows, size.capacity, alpha), size.context)
        for alpha in ALPHAS
    }
    took = interleaved(works, size.rounds)
    blocks = len(model.blocks)
    each = {alpha: spread([1e3 * one / blocks for one in seconds]) for alpha, seconds in took.items()}
    ratios = {alpha: paired(seconds, took["0"]) for alpha, seconds in took.items()}
    for alpha, figures in each.items():
        print(f"alpha {alpha:>4}: {figures['median']:.3f} ms a block, {ratios[alpha]:.3f} of alpha 0")
    return {"alpha_worst": max(ratios.values())}, {"ms_per_block": each, "ratios": ratios}


# Attention against dense.


def attention_works(size: Size, rows: int, context: int) -> dict[str, Work]:
    """One step's attention of rows of equal length in a stage's blocks: packed, and dense over tensors that
    have the earlier keys, by either of its ways to share a key head."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads, kv, width = (int(size.fields[name]) for name in names)
    count, capacity = 10, aligned(context + 1)
    where = SlotRange.of(0, rows, capacity)
    arena = Arena(
        blocks=range(count),
        tiers=Tiers((rows * capacity,)),
        kv_heads=kv,
        head_dim=width,
        dtype=torch.float32,
        device=CPU,
    )
    for tensor in arena.tensors:
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    q = torch.randn(1, heads, rows, width)
    k, v = torch.randn(1, kv, rows, width), torch.randn(1, kv, rows, width)
    spans = [RowSpan(slot, context, 1) for slot in range(rows)]
    dense_q, dense_k, dense_v = (each[0].transpose(0, 1)[:, :, None].contiguous() for each in (q, k, v))
    stores = [tuple(each[:, :, : context + 1] for each in arena.view(block, where)) for block in range(count)]

    @torch.inference_mode()
    def packed() -> None:
        attention = PackedAttention(spans, where, arena, device=CPU)
        for block in range(count):
            attention.attend(block, q, k, v, scale=None)

    def dense(*, grouped: bool) -> Work:
        query = dense_q.reshape(rows, kv, heads // kv, width) if grouped else dense_q

        @torch.inference_mode()
        def work() -> None:
            for keys, values in stores:
                keys[:, :, context:], values[:, :, context:] = dense_k, dense_v
                F.scaled_dot_product_attention(query, keys, values, enable_gqa=not grouped)

        return work

    return {"packed": packed, "grouped": dense(grouped=True), "plain": dense(grouped=False)}


def measure_attention(size: Size) -> tuple[dict[str, float], dict[str, Any]]:
    cases = EQUAL if size.rows == ROWS else ((size.rows, size.context),)
    ratios: dict[str, float] = {}
    for rows, context in cases:
        took = interleaved(attention_works(size, rows, context), 3 * size.rounds)
        best = min(("grouped", "plain"), key=lambda name: median(took[name]))
        ratios[f"{rows}x{context}"] = ratio = paired(took["packed"], took[best])
        print(f"attention {rows} rows x {context}: {ratio:.3f} of dense ({best})")
    return {"attention_vs_dense": max(ratios.values())}, {"ratios": ratios}


# Compaction.

TREE = Tree((0, 1, 2, 3), (0, 0, 0, 2))  # of which (0, 2, 3) is accepted: node 1 leaves a hole
ACCEPTED = (0, 2, 3)


def tree_pack(where: SlotRange, context: int) -> tuple[PackHeader, Placement]:
    """A pack whose rows are trees, behind trees with a hole each; and what closes the holes beside it."""
    rows, layouts, moves = [], {}, []
    for index, span in enumerate(ragged_rows(where, context)):
        before = Regions(span.first).drafted(span.first, TREE.nodes, TREE.parents)
        first = span.first + len(ACCEPTED)
        row = Row(span.slot, 1, first, len(TREE.nodes), True, None, tree=TREE, accepted=ACCEPTED)
        placed = place(before, row, where, CompactionPolicy.EAGER)
        assert placed.layout is not None
        assert placed.after is not None
        layouts[index] = placed.layout
        moves.append(placed.after)
        rows.append(row)
    ids = bytes(4 * len(TREE.nodes) * len(rows))
    pack = PackHeader("0" * 16, 0, 0, 1, where.numbers, tuple(rows), ids)
    return pack, Placement(layouts, tuple(moves))


def measure_compaction(size: Size) -> tuple[dict[str, float], dict[str, Any]]:
    """The same pack time and again, its holes closed beside it or left."""
    model = a_model(size)
    where = SlotRange.of(0, size.rows, size.capacity)
    arena = an_arena(model, [size.rows * size.capacity], 0)
    stage = Stage("bench", model.blocks.start, model.blocks.stop)
    worker = ModelWorker(stage, model, arena, embeds=False, heads=False)
    pack, placement = tree_pack(where, size.context)
    hidden = torch.randn((pack.token_count, model.hidden_size), generator=torch.Generator().manual_seed(0))
    body = hidden.numpy().tobytes()

    def step(placement: Placement) -> Work:
        return lambda: worker.stage_out(pack, worker.compute(pack, worker.stage_in(pack, body, placement)))

    left = Placement(placement.layouts)
    took = interleaved({"closed": step(placement), "left": step(left)}, 4 * size.rounds)
    ratio = paired(took["closed"], took["left"])
    low, high = interval([a / b for a, b in zip(took["closed"], took["left"], strict=True)])
    moved = sum(len(one.sources) for one in placement.compactions)
    print(f"compaction of {moved} cells: {ratio:.3f} of the step without, 95 %: {low:.3f} to {high:.3f}")
    each = {name: spread([1e3 * one for one in seconds]) for name, seconds in took.items()}
    return {"compaction_step": ratio}, {"ms_a_step": each, "interval": [low, high], "cells": moved}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the median, by resampling."""
    drawn = random.Random(0)
    found = sorted(median(drawn.choices(values, k=len(values))) for _ in range(2000))
    return found[50], found[-51]


# Memory.


def measure_memory(size: Size) -> tuple[dict[str, float], dict[str, Any]]:
    """Either half of a model in a process of its own, beside what a planner counts for it."""
    details: dict[str, Any] = {}
    reserved, peak = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = a_tiny_model(Path(folder)) if size.is_small else fetch_model(MODEL, user_cache(), print).path
        for place, name in enumerate(("first",) if size.is_small else ("first", "last")):
            arguments = [str(model), str(place), str(size.rows), str(size.context)]
            command = [sys.executable, "-m", "bench.kv_memory", *arguments]
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300).stdout
            one = details[name] = json.loads(output)
            held = one["weights"] + one["kv"]
            reserved.append(one["reserved"] / held)
            peak.append(one["peak"] / (held + one["workspace"] + one["buffers"]))
            print(
                f"memory of the {name} stage: {one['reserved'] / 1e6:.1f} MB of weights and KV, "
                f"{reserved[-1]:.3f} of what is counted; at most {one['peak'] / 1e6:.1f} MB, {peak[-1]:.3f}"
            )
    return {"memory_error": max(abs(one - 1) for one in reserved), "memory_peak": max(peak)}, details


# Prefixes.


def measure_prefix(size: Size) -> tuple[dict[str, float], dict[str, Any]]:
    """64 prompts that share 200 tokens, with these computed once or each time."""
    count, shared, rounds = (3, 40, 1) if size.is_small else (64, 200, max(1, size.rounds // 20))
    with_it, without = kv_prefix.run(count, shared, rounds)
    seconds = paired([one.seconds for one in with_it], [one.seconds for one in without])
    sent = paired([one.sent for one in with_it], [one.sent for one in without])
    took = median([one.seconds for one in with_it])
    first = with_it[0]
    print(
        f"prefix of {shared} tokens, {count} prompts, {first.shared} tokens shared: {took:.2f} s, "
        f"{seconds:.3f} of that without; {first.sent / 1e6:.2f} MB over the hops, {sent:.3f}"
    )
    details = {"with": list(map(asdict, with_it)), "without": list(map(asdict, without))}
    return {"prefix_seconds": seconds, "prefix_bytes": sent}, details


PARTS: Mapping[str, Callable[[Size], tuple[dict[str, float], dict[str, Any]]]] = {
    "alpha": measure_alpha,
    "attention": measure_attention,
    "compaction": measure_compaction,
    "memory": measure_memory,
    "prefix": measure_prefix,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kv", description=__doc__)
    parser.add_argument("--only", help="parts, by comma; default: all, or with --quick those without nodes")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="1: what others do disturbs that least")
    parser.add_argument("--quick", action="store_true", help="smallest size, to see that it runs")
    parser.add_argument("--bars", action="store_true", help="check against bars.toml; exit 1 when short")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = (
        Size({**FIELDS, **SMALL}, 8, 60, 2, True) if args.quick else Size(FIELDS, ROWS, CONTEXT, args.rounds)
    )
    measured: dict[str, float] = {}
    details: dict[str, Any] = {}
    parts = list(PARTS)[: -1 if args.quick else None]
    for part in args.only.split(",") if args.only else parts:
        figures, details[part] = PARTS[part](size)
        measured |= figures
    for name, figure in measured.items():
        print(f"{name}: {figure:.3f}")
    if not args.quick:
        append_result(
            "kv", {"threads": args.threads, "rounds": args.rounds, "measured": measured, "details": details}
        )
    return 0 if not args.bars or print_bars("kv", measured) else 1


if __name__ == "__main__":
    sys.exit(main())
