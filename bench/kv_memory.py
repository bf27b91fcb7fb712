"""Memory of a stage as it is loaded and computes, in a process of its own, beside what the planner counts.

`python -m bench.kv_memory MODEL PLACE ROWS CONTEXT` prints a JSON line. MODEL is a directory; it is cut into
two stages, of which PLACE (0 or 1) is loaded. `bench.kv` runs it.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from bbquic.kv.ranges import SlotRange
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import manifest_of
from bbquic.model.registry import user_cache
from bbquic.plan.cost import MemoryOptions, held_memory
from bbquic.runtime.loading import DiskLoader, ModelStore
from bbquic.runtime.machine import open_machine
from bbquic.runtime.protocol import PackHeader, PlanHeader, Row, Stage
from bbquic.runtime.ranges import aligned
from bbquic.runtime.rehearsal import decode_rows
from bbquic.runtime.sizes import model_sizes
from bbquic.runtime.stage import ModelWorker

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from tiny_model import make_tiny_llama

CHUNK_ROWS = 2  # slots that the largest pack's prompt tokens go to


def resident(field: str) -> int:
    """Bytes of this process: `RssAnon` are its own, `RssFile` of files that it has mapped, such as code and
    weights on disk; `VmHWM` is the peak of all."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} here")


def a_plan(directory: ModelDirectory, rows: int, cells: int, options: MemoryOptions) -> PlanHeader:
    half = directory.blocks // 2
    stages = (Stage("a", 0, half), Stage("b", half, directory.blocks))
    manifest = manifest_of(directory)
    return PlanHeader(
        "0" * 16,
        0,
        directory.name,
        "float32",
        stages,
        (cells,),
        1,
        1,
        manifest,
        rows=rows,
        pack_tokens=options.pack_tokens,
    )


def largest_pack(where: SlotRange, context: int, tokens: int) -> PackHeader:
    """Decode rows, and a prompt's chunk in each of the last slots."""
    spans = decode_rows(where.count, context)
    rows = [Row(span.slot, 1, span.first, 1, True, None) for span in spans[:-CHUNK_ROWS]]
    count = min(tokens // CHUNK_ROWS, where.capacity)
    rows += [Row(span.slot, 1, 0, count, True, None) for span in spans[-CHUNK_ROWS:]]
    ids = bytes(4 * sum(row.count for row in rows))
    return PackHeader("0" * 16, 0, 0, 1, where.numbers, tuple(rows), ids)


def a_tiny_model(folder: Path) -> Path:
    return make_tiny_llama(folder / "tiny")


@dataclass
class Loaded:
    """A stage that is loaded, all of its arena written to, and a pack for it."""

    worker: ModelWorker
    plan: PlanHeader
    where: SlotRange
    pack: PackHeader

    def run(self) -> None:
        worker, pack = self.worker, self.pack
        body = bytes(worker.body_length(pack))
        worker.stage_out(pack, worker.compute(pack, worker.stage_in(pack, body)))


def load(directory: ModelDirectory, place: int, rows: int, context: int, options: MemoryOptions) -> Loaded:
    where = SlotRange.of(0, rows, aligned(context * 5 // 4 + 16))
    plan = a_plan(directory, rows, rows * where.capacity, options)
    store = ModelStore({directory.name: directory.path}, user_cache())
    loader = DiskLoader(store, open_machine("cpu", 1, None), "bench")
    worker = loader.load(plan, plan.stages[place], lambda _: None)
    assert isinstance(worker, ModelWorker)
    for block in worker.stage.blocks:
        for values in worker.arena.view(block, where):
            values.fill_(0.02)  # address space becomes memory
    return Loaded(worker, plan, where, largest_pack(where, context, options.pack_tokens))


def measured(directory: ModelDirectory, place: int, rows: int, context: int) -> dict[str, int]:
    options = MemoryOptions()
    with tempfile.TemporaryDirectory() as folder:
        first = ModelDirectory(a_tiny_model(Path(folder)), "tiny")
        load(first, place, 4, 16, options).run()  # code, and what it keeps, come with the first stage
    gc.collect()
    before = resident("RssAnon")
    loaded = load(directory, place, rows, context, options)
    gc.collect()
    reserved = resident("RssAnon") - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loaded.run()
    counted = held_memory(
        model_sizes(directory, loaded.plan.manifest, loaded.plan.dtype),
        options,
        blocks=len(loaded.worker.stage.blocks),
        batch=rows,
        rows=rows,
        slot=loaded.where.capacity,
        embeds=place == 0,
        heads=place == 1,
    )
    return {
        "reserved": reserved,
        "peak": resident("VmHWM") - resident("RssFile") - before,
        "weights": counted.weights,
        "kv": counted.kv,
        "workspace": counted.workspace,
        "buffers": counted.buffers,
    }


def main() -> None:
    torch.set_num_threads(1)
    path, *numbers = sys.argv[1:]
    place, rows, context = map(int, numbers)
    print(json.dumps(measured(ModelDirectory(Path(path), "measured"), place, rows, context)))


if __name__ == "__main__":
    main()
