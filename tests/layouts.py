"""Layout problems for tests: small random ones with all that is nasty, large ones with a known best."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import numpy as np

from bbquic.plan.instance import Floats, Instance, Objective, evaluate, place_of

INFINITE = float("inf")
SIZES = [(1, 6), (2, 6), (3, 5), (3, 6), (4, 4), (4, 2)]  # nodes, blocks: hundreds of solutions at most


def random_instance(rng: np.random.Generator, nodes: int, blocks: int) -> Instance:
    """Ties, zeros, costs of any form, memory that ends anywhere, missing links, legs that separate or not."""
    ways = int(rng.integers(1, 3))

    def draw(*shape: int) -> Floats:
        if rng.random() < 0.5:
            return rng.integers(0, 6, shape).astype(np.float64)
        return rng.random(shape) * 5

    def missing(values: Floats, share: float) -> Floats:
        return np.where(rng.random(values.shape) < share, INFINITE, values)

    shape = (nodes, 4, blocks + 1)
    busy = missing(draw(*shape), 0.05)
    most = rng.integers(0, 2 * blocks + 1, (nodes, 4, 1))  # blocks that memory holds
    busy[(np.arange(blocks + 1) > most) | (np.arange(blocks + 1) == 0)] = INFINITE
    passes = busy if rng.random() < 0.5 else np.where(busy < INFINITE, missing(draw(*shape), 0.02), INFINITE)
    hop_busy = missing(draw(ways, nodes, nodes), 0.1)
    hop_passes = missing(draw(ways, nodes, nodes), 0.05)
    back = draw(1, nodes) + (np.zeros((nodes, 1)) if rng.random() < 0.5 else draw(nodes, nodes))
    legs = missing(draw(nodes), 0.05), missing(np.broadcast_to(back, (nodes, nodes)), 0.05)
    return Instance(busy, passes, hop_busy, hop_passes, *legs, int(rng.integers(1, 6)))


def every_value(instance: Instance, objective: Objective) -> dict[tuple[int, ...], float]:
    """The best value for each order of used nodes, by trying all blocks; orders without any are left out."""
    values: dict[tuple[int, ...], float] = {}
    for count in range(1, min(instance.nodes, instance.blocks) + 1):
        for order in permutations(range(instance.nodes), count):
            for inner in combinations(range(1, instance.blocks), count - 1):
                blocks = tuple(b - a for a, b in pairwise((0, *inner, instance.blocks)))
                if not possible(instance, order, blocks):
                    continue
                value = evaluate(instance, objective, order, blocks).value
                if value < values.get(order, INFINITE):
                    values[order] = value
    return values


def possible(instance: Instance, order: tuple[int, ...], blocks: tuple[int, ...]) -> bool:
    """Whether every stage holds its blocks and both legs exist: without these no objective is finite.

    A stage that is busy for ever but passes is possible: the sum of passes does not look at it.
    """
    stages = [
        (node, place_of(at, len(order)), held)
        for at, (node, held) in enumerate(zip(order, blocks, strict=True))
    ]
    legs = instance.lead[order[0]] + instance.back[order[0], order[-1]]
    return bool(legs < INFINITE and all(instance.passes[stage] < INFINITE for stage in stages))


def planted_instance(
    rng: np.random.Generator, nodes: int, chain: int, blocks: int, *, separates: bool = True
) -> tuple[Instance, float, float]:
    """An instance whose best solution is known for every objective, with its cycle and its loop.

    Memory: no `chain - 1` nodes hold all blocks, and the hidden ones together just do. Each block passes in
    1 s or more, each hop in 1 s or more, each leg in 1 s or more, and the hidden chain's take just that: no
    loop is shorter. Links between clouds are busy for longer than the hidden cycle, and no cloud can hold
    all blocks within less: no cycle is shorter either. Any other solution has a longer cycle or loop or
    more stages, or ties.
    """
    cycle = 10.0
    order = rng.permutation(nodes)
    hidden = order[:chain]
    cloud = np.concatenate([np.zeros(chain, int), 1 + np.arange(nodes - chain) // chain])[np.argsort(order)]
    held = np.full(chain, blocks // chain)
    held[: blocks % chain] += 1
    for _ in range(chain):  # unequal ones, none below half of the mean
        a, b = rng.choice(chain, 2, replace=False)
        if held[a] > blocks // chain // 2 + 1:
            held[a], held[b] = held[a] - 1, held[b] + 1
    most = rng.integers(1, held.min() + 1, nodes)
    most[hidden] = held
    rate = cycle / most * rng.uniform(1.0, 2.0, nodes)  # seconds a block
    rate[hidden] = cycle / held
    each = rng.uniform(1.0, 2.0, nodes)
    each[hidden] = 1.0
    counts = np.arange(blocks + 1)
    fits = (counts > 0) & (counts <= most[:, None])
    busy = np.where(fits, rate[:, None] * counts, INFINITE)
    passes = np.where(fits, each[:, None] * counts, INFINITE)
    near = cloud[:, None] == cloud[None, :]
    hop_busy = (
        np.where(near, rng.uniform(0.0, 0.9, (nodes, nodes)), rng.uniform(2.2, 6.0, (nodes, nodes))) * cycle
    )
    hop_passes = rng.uniform(1.05, 5.0, (nodes, nodes))
    hop_passes[hidden[:-1], hidden[1:]] = 1.0
    lead = rng.uniform(1.0, 5.0, nodes)
    back = rng.uniform(1.0, 5.0, (1 if separates else nodes, nodes)) + np.zeros((nodes, 1))
    lead[hidden[0]] = 1.0
    back[slice(None) if separates else hidden[0], hidden[-1]] = 1.0
    ways = np.stack([hop_busy, hop_busy * 0.5]), np.stack([hop_passes, hop_passes + 2.0])
    busy, passes = np.repeat(busy[:, None], 4, axis=1), np.repeat(passes[:, None], 4, axis=1)
    instance = Instance(busy, passes, *ways, lead, back, int(rng.integers(5, 20)))
    return instance, cycle, float(blocks + chain - 1 + 2)
