"""The learned pruner at work in the first stage: a pack's trees as it judges them, and what it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from bbquic.draft.pruner import Guesses, Pruner, PrunerPart
from bbquic.errors import PlanRefused
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.runtime.protocol import PackHeader, PlanHeader, Tree
from bbquic.runtime.trees import kept_places, starts, token_ids
from bbquic.units import Bytes

Bring = Callable[[bytes, torch.dtype], torch.Tensor]
Body = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Pruning:
    """Nodes whose retention score is below the threshold go no further, nor does what is behind them."""

    pruner: Pruner
    threshold: float

    @classmethod
    def of(cls, plan: PlanHeader, part: PrunerPart | None, model: StageModel) -> Pruning | None:
        """For the plan's first stage; `part` as `pruner_part` found it."""
        if part is None or plan.pruner is None:
            return None
        return cls(Pruner(part, model.embedding), plan.pruner.threshold)

    def guesses(self, pack: PackHeader, bring: Bring) -> Guesses | None:
        """A pack's guesses where they are judged; None where it has none. Its token ids have been checked."""
        found = guesses_of(pack)
        if found is None:
            return None
        *numbers, depth = found
        together = bring(np.concatenate(numbers).tobytes(), torch.int64)  # one copy in place of four
        nodes, node, tokens, above = torch.split(together, [len(one) for one in numbers])
        return Guesses(nodes, node, tokens, above, depth)

    def pruned(self, pack: PackHeader, scores: NDArray[np.float32], body: Body) -> tuple[PackHeader, Body]:
        """The pack that says what is kept by the guesses' scores [G], and of the tensor `body` that much."""
        decided = kept_by(pack, scores, self.threshold)
        places = kept_places(decided)
        if places is None:
            return decided, body
        rows = np.frombuffer(body, np.uint8).reshape(pack.token_count, -1)[places]
        return decided, np.ascontiguousarray(rows).reshape(-1).data


Numbers = NDArray[np.int64]


def guesses_of(pack: PackHeader) -> tuple[Numbers, Numbers, Numbers, Numbers, int] | None:
    """`draft.pruner.Guesses` of all trees of a pack, as arrays; row after row, a tree's nodes in order."""
    ids = token_ids(pack) if pack.has_trees else np.empty(0, np.int32)
    nodes: list[int] = []  # places of parents
    node: list[int] = []
    above: list[int] = []
    tokens: list[Numbers] = []
    deepest = 0
    for row, start in zip(pack.rows, starts(pack), strict=True):
        if row.tree is None or row.count == 1:
            continue
        place = {number: index for index, number in enumerate(row.tree.nodes)}
        depths, behind, first = [0], dict[int, int](), len(node)  # of the row's nodes; of places, in `nodes`
        for parent in (place[number] for number in row.tree.parents[1:]):
            if parent not in behind:
                behind[parent] = len(nodes)
                nodes.append(start + parent)
            node.append(behind[parent])
            above.append(first + parent - 1 if parent else -1)
            depths.append(depths[parent] + 1)
        deepest = max(deepest, *depths)
        tokens.append(ids[start + 1 : start + row.count].astype(np.int64))
    if not node:
        return None
    over = np.array(above)
    over[over < 0] = len(node)
    return np.array(nodes), np.array(node), np.concatenate(tokens), over, deepest


def kept_by(pack: PackHeader, scores: NDArray[np.float32], threshold: float) -> PackHeader:
    """The pack whose trees keep those of what they kept that score `threshold` at least, with all above them;
    scores are in the order of `guesses_of`."""
    is_enough = iter((scores >= np.float32(threshold)).tolist())
    rows = []
    for row in pack.rows:
        tree = row.tree
        if tree is not None:
            kept, allowed = {0}, tree.nodes if tree.kept is None else set(tree.kept)
            for number, parent in zip(tree.nodes[1:], tree.parents[1:], strict=True):
                if next(is_enough) and parent in kept and number in allowed:
                    kept.add(number)
            now = None if len(kept) == row.count else tuple(sorted(kept))
            row = msgspec.structs.replace(row, tree=Tree(tree.nodes, tree.parents, now))
        rows.append(row)
    return msgspec.structs.replace(pack, rows=tuple(rows))


def pruner_part(plan: PlanHeader, directory: ModelDirectory) -> PrunerPart | None:
    """The plan's pruner, None where it has none. Raises: PlanRefused for another model's; ModelError for what
    is no pruner."""
    if plan.pruner is None:
        return None
    name = directory.spec.weights.embed
    mine = plan.manifest.tensors[name].sha256 if name in plan.manifest.tensors else "none"
    if plan.pruner.embedding != mine:
        raise PlanRefused(
            f"the pruner that came with the plan is not of {plan.model}: it was trained with a {name} "
            f"of sha256 {plan.pruner.embedding[:12]}, the model's is {mine[:12]}",
            hint="train one with `bbquic draft train-pruner`, or run with --no-prune",
        )
    width, vocabulary = int(directory.config.hidden_size), int(directory.config.vocab_size)
    return PrunerPart.read_untrusted(plan.pruner.data, width=width, vocabulary=vocabulary)


def pruner_bytes(part: PrunerPart | None, directory: ModelDirectory) -> Bytes:
    """Memory that it takes where the first stage computes."""
    return Bytes(0) if part is None else Pruner.bytes_for(part, int(directory.config.vocab_size))
