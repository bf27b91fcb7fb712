"""What the learned pruner leaves out of draft trees, what it costs in accepted tokens, and how long it takes.

The whole model answers held-out prompts greedily; along each answer a drafter's trees go through the first
stage's blocks and are judged there, as in a run. See bench/METHODOLOGY.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from bbquic.draft.drafter import Ask, Drafter
from bbquic.draft.load import load_drafter
from bbquic.draft.ngram import NgramDrafter
from bbquic.draft.observe import Observer
from bbquic.draft.pruner import Guesses, Pruner, PrunerPart
from bbquic.draft.pruner_file import find_pruner
from bbquic.draft.small import ModelDrafterOptions
from bbquic.draft.tree import DraftTree
from bbquic.kv.attention import PackedAttention
from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange, Tiers
from bbquic.kv.rows import Layout, RowSpan, positions
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import manifest_of
from bbquic.model.registry import user_cache
from bbquic.model.sampling import Sampling
from bbquic.model.weights import load_tensors, tensors_for
from bbquic.runtime.memory import host_memory_free
from bbquic.runtime.protocol import PackHeader, Row, Tree
from bbquic.runtime.pruning import guesses_of
from bench.common import append_result, median, print_bars, spread

MODEL = "smollm2-135m"
CPU = torch.device("cpu")
TOGETHER = 16  # prompts
KEPT = (0.9, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)  # of accepted tokens, at which the states are told
ROWS, GUESSES = 32, 16  # of the step that is timed
JOB = "0" * 16


@dataclass(slots=True)
class Judged:
    """Of G guesses of all passes: retention scores, the draft's weights, whether each was accepted, and the
    number of its tree."""

    trees: int = 0
    scores: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)

    def add(self, tree: DraftTree, path: Sequence[int], scores: Sequence[float]) -> None:
        self.trees += 1
        self.scores += scores
        self.weights += tree.weights[1:]
        self.accepted += [node in path for node in range(1, len(tree.tokens))]


class FirstStage:
    """The target's first blocks over sequences of one batch, and its pruner."""

    def __init__(self, directory: ModelDirectory, depth: int, pruner: Path | None) -> None:
        tensors = load_tensors(
            directory,
            tensors_for(directory.spec, directory.config, range(depth), embeds=True, heads=False),
            torch.float32,
            CPU,
        )
        self.model = StageModel(
            directory.spec, directory.config, tensors, blocks=range(depth), embeds=True, heads=False
        )
        file = find_pruner(directory, manifest_of(directory), pruner)
        if file is None:
            raise SystemExit(f"there is no pruner for {directory.name}; train one, and say --pruner")
        config = directory.config
        part = PrunerPart.read_untrusted(
            file.part(depth), width=config.hidden_size, vocabulary=config.vocab_size
        )
        self.pruner, self.threshold = Pruner(part, self.model.embedding), file.threshold

    def begin(self, sequences: int, capacity: int) -> None:
        cells = -(-capacity // CELL_ALIGNMENT) * CELL_ALIGNMENT
        self._where = SlotRange.of(0, sequences, cells)
        self._arena = Arena(
            blocks=self.model.blocks,
            tiers=Tiers((sequences * cells,)),
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        self._stored = [0] * sequences

    def forget(self) -> None:
        """What is stored is of sequences that are over."""
        self._stored = [0] * len(self._stored)

    @torch.inference_mode()
    def scores(self, sequences: Sequence[tuple[int, Sequence[int], DraftTree]]) -> list[list[float]]:
        """Of each tree's guesses. A row has what is new of its sequence, and the tree behind it."""
        spans, tokens, rows, kept = [], list[int](), list[Row](), list[int]()
        for slot, committed, tree in sequences:
            first = self._stored[slot]
            new = len(committed) - 1 - first  # before the tree's root
            parents = [max(0, place - 1) for place in range(new + 1)]
            parents += [new + parent for parent in tree.parents[1:]]
            spans.append(RowSpan(slot, first, len(parents), Layout(first, first, (), tuple(parents))))
            kept += range(len(tokens) + new, len(tokens) + len(parents))
            tokens += [*committed[first:-1], *tree.tokens]
            nodes = tuple(range(len(tree.tokens)))
            rows.append(Row(slot, 1, first + new, len(nodes), True, None, Tree(nodes, tree.parents)))
            self._stored[slot] = len(committed) - 1
        attention = PackedAttention(spans, self._where, self._arena, device=CPU)
        hidden = self.model.run(
            self.model.embed(torch.tensor(tokens)), torch.tensor(np.asarray(positions(spans))), attention
        )
        ids = np.array([tokens[place] for place in kept], dtype="<i4").tobytes()
        guesses = judged(PackHeader(JOB, 0, 0, 1, self._where.numbers, tuple(rows), ids))
        if guesses is None:
            return [[] for _ in sequences]
        found = iter(self.pruner.scores(hidden[kept], guesses).tolist())
        return [[next(found) for _ in range(tree.guesses)] for *_, tree in sequences]


def judged(pack: PackHeader) -> Guesses | None:
    found = guesses_of(pack)
    if found is None:
        return None
    nodes, node, tokens, above, depth = found
    places, parents, said, over = (torch.from_numpy(one) for one in (nodes, node, tokens, above))
    return Guesses(places, parents, said, over, depth)


def passes(
    prompt: Sequence[int], answer: Sequence[int], tree_of: Callable[[Sequence[int]], DraftTree | None]
) -> Iterator[tuple[list[int], DraftTree, list[int]]]:
    """Along a known answer: what is committed, the tree, and the path in it that the model accepts."""
    done = 1  # the first token comes with the prompt
    while done < len(answer):
        committed = [*prompt, *answer[:done]]
        tree = tree_of(committed) or DraftTree.root(committed[-1])
        path, children = (
            [0],
            {(p, t): n for n, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True)) if n},
        )
        while done + len(path) - 1 < len(answer) and (path[-1], answer[done + len(path) - 1]) in children:
            path.append(children[path[-1], answer[done + len(path) - 1]])
        yield committed, tree, path
        done += len(path)


def judge(
    stage: FirstStage,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    guesses: int,
) -> Judged:
    """All passes over some answers, the sequences one behind the other."""
    found = Judged()
    stage.begin(1, max(map(len, prompts)) + max(map(len, answers)) + guesses + 1)
    for key, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        stage.forget()

        def tree_of(committed: Sequence[int], key: int = key, answer: Sequence[int] = answer) -> DraftTree:
            left = len(prompts[key]) + len(answer) - len(committed)
            (tree,) = drafter.draft([Ask(key, committed, Sampling(), guesses, min(guesses, max(1, left)))])
            return tree

        for committed, tree, path in passes(prompt, answer, tree_of):
            if tree.guesses:
                (scores,) = stage.scores([(0, committed, tree)])
                found.add(tree, path, scores)
                drafter.learn(key, tree, path)
            else:
                found.trees += 1
        drafter.forget(key)
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """With a threshold: the shares of guesses that go on, and of accepted tokens that are still."""

    threshold: float
    states: float
    accepted: float


def curve(by: Sequence[float], accepted: Sequence[bool]) -> list[Point]:
    """Over all thresholds, from what keeps least to what keeps all. A guess never scores above its parent, so
    a threshold keeps paths from their roots on."""
    scores, right = np.array(by), np.array(accepted)
    order = np.argsort(-scores, kind="stable")
    kept = np.cumsum(right[order]) / right.sum() if right.any() else np.ones(len(right))
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # of those that score alike
    return [Point(float(scores[order[n]]), (n + 1) / len(order), float(kept[n])) for n in last.tolist()]


def states_for(points: Sequence[Point], accepted: float) -> Point:
    """The fewest states that keep so many of the accepted tokens."""
    return next(one for one in points if one.accepted >= accepted - 1e-12)


def accepted_at(points: Sequence[Point], states: float) -> float:
    """Accepted tokens kept with so many states at most."""
    return max((one.accepted for one in points if one.states <= states + 1e-12), default=0.0)


def timed(pruner: Pruner, width: int, rounds: int) -> list[float]:
    """Seconds of one step's scores: trees of any shape, hidden states at random."""
    drawn = np.random.default_rng(0)
    rows = []
    for slot in range(ROWS):
        parents = (0, *(int(drawn.integers(0, place)) for place in range(1, GUESSES + 1)))
        nodes = tuple(range(GUESSES + 1))
        rows.append(Row(slot, 1, 9, GUESSES + 1, True, None, Tree(nodes, parents)))
    count = ROWS * (GUESSES + 1)
    ids = drawn.integers(0, 300, count).astype("<i4").tobytes()
    guesses = judged(PackHeader(JOB, 0, 0, 1, SlotRange.of(0, ROWS, 64).numbers, tuple(rows), ids))
    assert guesses is not None
    hidden, found = torch.randn(count, width), []
    for _ in range(rounds + 3):
        began = time.perf_counter()
        pruner.scores(hidden, guesses)
        found.append(time.perf_counter() - began)
    return found[3:]


def answered(
    directory: ModelDirectory, depth: int, prompts: Sequence[Sequence[int]], most: int
) -> list[list[int]]:
    """The whole model's greedy answers, but for their last token."""
    observer, found = Observer(directory, [depth]), list[list[int]]()
    for start in range(0, len(prompts), TOGETHER):
        some = prompts[start : start + TOGETHER]
        seen = observer.answers(some, most)
        found += [seen.tokens[(seen.sequence == row) & seen.is_answer].tolist() for row in range(len(some))]
    return found


def the_drafter(name: str, directory: ModelDirectory) -> Drafter:
    if name == "ngram":
        return NgramDrafter()
    draft = ModelDirectory(Path(name), Path(name).name)
    return load_drafter(draft, directory, ModelDrafterOptions(), free=host_memory_free())


@dataclass(frozen=True, slots=True)
class Told:
    """The figures of one drafter and number of guesses, as results keep them."""

    trees: int
    guesses: float  # a tree
    tokens_a_pass: float
    own_dropped: float  # below the pruner's own threshold
    own_accepted: float
    own_tokens_a_pass: float
    own_accepted_by_draft: float  # with as many states
    dropped_at_96: float
    dropped_at_96_by_draft: float
    curve: list[dict[str, float]]


def told(name: str, found: Judged, threshold: float) -> Told:
    """Printed too."""
    pruned, weighed = curve(found.scores, found.accepted), curve(found.weights, found.accepted)
    each = sum(found.accepted) / found.trees
    guesses = len(found.scores) / found.trees
    print(f"{name}: {found.trees} trees of {guesses:.1f}, {1 + each:.3f} tokens a pass")
    rows = []
    for wanted in KEPT:
        ours, theirs = states_for(pruned, wanted), states_for(weighed, wanted)
        same = accepted_at(weighed, ours.states)
        rows.append(
            {
                "accepted": wanted,
                "threshold": ours.threshold,
                "states": ours.states,
                "states_by_draft": theirs.states,
                "accepted_by_draft": same,
            }
        )
        print(
            f"  {wanted:.0%} of accepted tokens: {1 - ours.states:.1%} of states dropped below "
            f"{ours.threshold:.3g}, by draft probability {1 - theirs.states:.1%}; "
            f"with as many states that keeps {same:.1%}"
        )
    at = [one for one in pruned if one.threshold >= threshold]
    own = at[-1] if at else Point(threshold, 0.0, 0.0)
    print(f"  below {threshold:.3g}, the pruner's own: {1 - own.states:.1%} dropped, {own.accepted:.1%} kept")
    return Told(
        found.trees,
        guesses,
        1 + each,
        1 - own.states,
        own.accepted,
        1 + own.accepted * each,
        accepted_at(weighed, own.states),
        1 - states_for(pruned, 0.96).states,
        1 - states_for(weighed, 0.96).states,
        rows,
    )


def tokens_of(directory: ModelDirectory, path: Path, most: int) -> list[list[int]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [line["prompt"] for line in lines if isinstance(line.get("prompt"), str)]
    return [directory.tokenizer.encode(text) for text in texts[:most]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pruning", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts.jsonl"))
    parser.add_argument("--count", type=int, default=64, help="prompts at most")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--depth", type=int, default=10, help="blocks of the first stage")
    parser.add_argument("--pruner", type=Path, help="default: the one that is found for the model")
    parser.add_argument("--draft", default="ngram", help="ngram, or a draft model's directory")
    parser.add_argument("--guesses", default="8,16,32")
    parser.add_argument("--quick", action="store_true", help="two prompts: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    directory = fetch_model(MODEL, user_cache(), print)
    prompts = tokens_of(directory, args.prompts, 2 if args.quick else args.count)
    stage = FirstStage(directory, args.depth, args.pruner)
    answers = answered(directory, args.depth, prompts, 16 if args.quick else args.tokens)
    measured: dict[str, float] = {}
    details: dict[str, object] = {
        "depth": args.depth,
        "draft": Path(args.draft).name,
        "prompts": len(prompts),
    }
    for guesses in (int(one) for one in args.guesses.split(",")):
        drafter = the_drafter(args.draft, directory)
        found = judge(stage, drafter, prompts, answers, guesses)
        figures = told(f"{drafter.name}, {guesses} guesses", found, stage.threshold)
        details[f"of_{guesses}"] = asdict(figures)
        measured[f"dropped_at_96_{guesses}"] = figures.dropped_at_96
        measured[f"own_dropped_{guesses}"] = figures.own_dropped
        measured[f"own_accepted_{guesses}"] = figures.own_accepted
        measured[f"over_draft_{guesses}"] = figures.own_accepted - figures.own_accepted_by_draft
    seconds = timed(stage.pruner, stage.model.hidden_size, 3 if args.quick else 51)
    measured["step_ms"] = 1e3 * median(seconds)
    details["step"] = spread(seconds)
    for bar, value in measured.items():
        print(f"{bar}: {value:.3g}")
    if not args.quick:
        append_result("pruning", {"measured": measured, **details})
    return 0 if not args.bars or print_bars("pruning", measured) else 1


if __name__ == "__main__":
    sys.exit(main())
