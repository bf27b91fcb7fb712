"""What a search may choose of, and what is given: nodes, batches, micro-batches, place. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from bbquic.errors import ConfigError
from bbquic.plan.breakeven import Way
from bbquic.plan.build import WAYS, Setting
from bbquic.plan.cluster import Cluster, JobShape, ModelSizes
from bbquic.plan.cost import MemoryOptions, load_of
from bbquic.plan.splits import given_split

MOST_ROWS = 4096  # of one pack, as the protocol has it
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What is given and what is free. None: the search decides.

    `nodes` alone may be used; `ordered`: all of them, in that order. `split`: blocks of each, which implies
    the order. `batch` is sequences in flight, never more than the job has; `at_stage` puts the coordinator
    on the first stage's node, or (False) in the command's process. `ways` are the codecs hops may use.
    """

    memory: MemoryOptions = field(default_factory=MemoryOptions)
    batch: int | None = None
    micro_batches: int | None = None
    at_stage: bool | None = None
    ways: tuple[Way, ...] = WAYS
    nodes: tuple[str, ...] | None = None
    ordered: bool = False
    split: tuple[int, ...] | None = None

    @property
    def given(self) -> bool:
        """Whether the nodes are all to be used, in an order that is given."""
        return self.ordered or self.split is not None


def batches(job: JobShape, options: SearchOptions) -> tuple[int, ...]:
    """Candidates for B: powers of two, halfway between them, and the whole job; or the one that is given."""
    most = min(job.sequences, MOST_ROWS)
    if options.batch is not None:
        return (min(options.batch, job.sequences),)
    powers = [1 << power for power in range(MOST_ROWS.bit_length())]
    between = [3 * power // 2 for power in powers if power > 1]
    return tuple(sorted({most, *(size for size in (*powers, *between) if size <= most)}))


def settings(job: JobShape, options: SearchOptions) -> tuple[Setting, ...]:
    """All that a search may choose of, packs of more than MOST_ROWS tokens left out."""
    places = (False, True) if options.at_stage is None else (options.at_stage,)
    found = []
    for batch in batches(job, options):
        given = options.micro_batches
        counts = MICRO_BATCHES if given is None else (min(given, batch),)
        for count in counts:
            load, memory = load_of(job, batch, count), options.memory
            prompts = min(load.prompt_tokens, memory.pack_tokens)
            if count <= batch and memory.decoded(ceil(load.rows)) + prompts <= MOST_ROWS:
                found += [Setting(batch, count, place, options.ways) for place in places]
    return tuple(found)


def allowed(cluster: Cluster, model: ModelSizes, options: SearchOptions) -> Cluster:
    """The nodes that may be used: sorted by name, so that their order in a file decides nothing, unless it
    is given."""
    known = {node.name for node in cluster.nodes}
    names = options.nodes if options.nodes is not None else tuple(node.name for node in cluster.nodes)
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) != len(names) or not names:
        wrong = unknown[0] if unknown else "none or one of them twice"
        raise ConfigError(
            f"nodes to plan with: {wrong}", hint=f"choose each once, of: {', '.join(sorted(known))}"
        )
    if options.split is not None:
        given_split(options.split, blocks=model.blocks, nodes=len(names))
    if any(given is not None and given < 1 for given in (options.batch, options.micro_batches)):
        raise ConfigError("a batch and a number of micro-batches are at least 1")
    return cluster.only(names if options.ordered or options.split else sorted(names))
