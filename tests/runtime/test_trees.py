"""Trees of drafts through a model's stages: at each accepted node comes the token that transformers gives."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bbquic.errors import RemoteProtocolError, StageFailed
from bbquic.kv.compaction import TOGETHER, CompactionFailed, Compactor, PackCompaction
from bbquic.kv.ranges import SlotRange, Tiers
from bbquic.kv.regions import Regions, SlotCompaction
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.directory import ModelDirectory
from bbquic.model.weights import load_tensors, tensors_for
from bbquic.runtime.ledger import Ledger
from bbquic.runtime.placement import CompactionPolicy, Placement
from bbquic.runtime.protocol import PackHeader, Row, Stage, TokensHeader, Tree
from bbquic.runtime.stage import ModelWorker, stage_errors
from bbquic.runtime.trees import onward, token_ids, verdicts

CAPACITY, TIERS = 48, (144, 96)  # three slots in one tier, two in the other
WHERE = SlotRange.of(0, 3, CAPACITY, 144, 2)
ANSWER = 14
HIDDEN = 64  # of the tiny model
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def answers(tiny: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and what transformers says to each alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    drawn = random.Random(5)
    made = []
    for length in (3, 17, 1, 9, 24):
        text = [drawn.randrange(3, 300) for _ in range(length)]
        with torch.inference_mode():
            for _ in range(ANSWER):  # not `generate`, which would end at an end token
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        made.append((text[:length], text[length:]))
    return made


def workers_of(model: Path, stages: int, on_host: int) -> list[ModelWorker]:
    directory = ModelDirectory(model, "tiny")
    cuts = [directory.blocks * place // stages for place in range(stages + 1)]
    made = []
    for place, (first, stop) in enumerate(pairwise(cuts)):
        embeds, heads = place == 0, place == stages - 1
        names = tensors_for(directory.spec, directory.config, range(first, stop), embeds=embeds, heads=heads)
        tensors = load_tensors(directory, names, torch.float32, CPU)
        loaded = StageModel(
            directory.spec, directory.config, tensors, blocks=range(first, stop), embeds=embeds, heads=heads
        )
        arena = Arena(
            blocks=range(first, stop),
            tiers=Tiers(TIERS),
            on_host=on_host,
            kv_heads=loaded.kv_heads,
            head_dim=loaded.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        stage = Stage(f"node-{place + 1}", first, stop)
        made.append(ModelWorker(stage, loaded, arena, embeds=embeds, heads=heads))
    return made


@dataclass
class Drafting:
    """A sequence whose drafter knows the answer, and proposes much beside it."""

    slot: int
    prompt: list[int]
    answer: list[int]
    done: int = 0  # tokens of the answer that came back right
    stored: int = 0  # tokens in the KV of the stages, as the next row's first
    accepted: tuple[int, ...] | None = None
    right: tuple[int, ...] = ()  # the path in the tree on its way that follows the answer

    def next_row(self, drawn: random.Random) -> tuple[Row, list[int]]:
        left = len(self.prompt) - self.stored
        if left > 0:
            count = drawn.randint(1, left)
            tokens = self.prompt[self.stored : self.stored + count]
            wants = count == left
            return Row(self.slot, 1, self.stored, count, wants, None), tokens
        last = (self.prompt + self.answer)[self.stored]
        accepted, self.accepted = self.accepted, None
        if drawn.random() < 0.2:
            return Row(self.slot, 1, self.stored, 1, True, None, None, accepted), [last]
        tree, tokens = self.a_tree(drawn, last)
        return Row(self.slot, 1, self.stored, len(tokens), True, None, tree, accepted), tokens

    def a_tree(self, drawn: random.Random, last: int) -> tuple[Tree, list[int]]:
        room = CAPACITY - self.stored
        nodes, parents, tokens, right = [0], [0], [last], [0]
        for _ in range(drawn.randint(0, min(room, 8) - 1)):
            place = self.done + len(right) - 1
            nodes.append(nodes[-1] + drawn.randint(1, 3))
            if drawn.random() < 0.4 and place < len(self.answer) - 1:
                parents.append(right[-1])
                tokens.append(self.answer[place])
                right.append(nodes[-1])
            else:
                parent = drawn.choice(nodes[:-1])
                known = {tokens[nodes.index(node)] for node in nodes[:-1] if node != 0}
                wrong = [t for t in range(3, 300) if t not in known and t not in self.answer]
                parents.append(parent)
                tokens.append(drawn.choice(wrong))
        self.right = tuple(right)
        kept: list[int] = []  # some nodes that are not right are not
        for node, parent in zip(nodes, parents, strict=True):
            if node in right or (parent in kept and drawn.random() < 0.5):
                kept.append(node)
        return Tree(tuple(nodes), tuple(parents), tuple(kept) if drawn.random() < 0.7 else None), tokens

    def take(self, row: Row, tokens: Sequence[int], path: tuple[int, ...]) -> None:
        """The tokens that came back for a row: those of the right path, which are the answer's."""
        if row.tree is None:
            self.stored += row.count
            if row.wants_token:
                assert list(tokens) == [self.answer[self.done]]
                self.done += 1
            return
        assert path == self.right
        assert list(tokens) == self.answer[self.done : self.done + len(path)], "the answer at each node"
        self.done += len(path)
        self.stored += len(path)
        self.accepted = self.right


def drive(
    workers: list[ModelWorker], policy: CompactionPolicy, sequences: list[Drafting], drawn: random.Random
) -> int:
    """Step after step until all answers are there; how many steps."""
    ledgers = [Ledger[None](tiers=TIERS, micro_batches=1, depth=1, policy=policy) for _ in workers]
    step = 0
    while running := [one for one in sequences if one.done < ANSWER]:
        step += 1
        chosen = drawn.sample(running, drawn.randint(1, len(running)))
        made = [one.next_row(drawn) for one in chosen]
        ids = b"".join(np.array(tokens, dtype="<i4").tobytes() for _, tokens in made)
        pack = PackHeader("0" * 16, 0, 0, step, WHERE.numbers, tuple(row for row, _ in made), ids)
        body: bytes | memoryview = b""
        for ledger, worker in zip(ledgers, workers, strict=True):
            (due,) = ledger.admit(pack, None)
            staged = worker.stage_in(pack, body, due.placement)
            output = worker.stage_out(pack, worker.compute(pack, staged, due.copies))
            body = output.body
            if output.tokens is None:
                pack = onward(pack)
                assert len(body) == 4 * HIDDEN * pack.token_count
                assert len(pack.tokens) == (4 * pack.token_count if pack.has_trees else 0)
        assert output.tokens is not None
        came, paths = iter(output.tokens), iter(output.paths)
        for one, row in zip(chosen, pack.rows, strict=True):
            path = () if row.tree is None else next(paths)
            one.take(row, [next(came) for _ in range(len(path) or row.wants_token)], path)
        assert next(came, None) is None
        assert next(paths, None) is None
    return step


@pytest.mark.parametrize("policy", CompactionPolicy)
@pytest.mark.parametrize(("stages", "on_host"), [(1, 0), (1, 2), (2, 0), (2, 1)])
def test_at_each_accepted_node_comes_the_token_of_the_reference(
    tiny: Path,
    answers: list[tuple[list[int], list[int]]],
    stages: int,
    on_host: int,
    policy: CompactionPolicy,
) -> None:
    for seed in range(3):
        workers = workers_of(tiny, stages, on_host)
        slots = random.Random(seed).sample(list(WHERE.slots()), 5)
        sequences = [Drafting(slot, *answer) for slot, answer in zip(slots, answers, strict=True)]
        drive(workers, policy, sequences, random.Random(seed))


def test_the_thread_that_moves_cells_ends_with_its_worker(tiny: Path) -> None:
    (worker,) = workers_of(tiny, 1, 0)
    staged = worker.stage_in(a_pack(1, 0), b"", Placement({}, (SlotCompaction(WHERE, 0, (9,), 8),)))
    worker.stage_out(a_pack(1, 0), worker.compute(a_pack(1, 0), staged))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("compaction")]
    assert threads
    del worker, staged
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def a_pack(step: int, first: int) -> PackHeader:
    rows = (Row(0, 1, first, 1, True, None),)
    return PackHeader("0" * 16, 0, 0, step, WHERE.numbers, rows, b"\5\0\0\0")


BEYOND = SlotCompaction(WHERE, 0, (CAPACITY,), 0)  # a cell that no slot has


def test_a_compaction_that_fails_is_its_packs_failure_with_the_block(tiny: Path) -> None:
    (worker,) = workers_of(tiny, 1, 0)
    pack = a_pack(1, 0)
    staged = worker.stage_in(pack, b"", Placement({}, (BEYOND,)))
    computed = worker.compute(pack, staged)
    with pytest.raises(StageFailed) as caught, stage_errors(worker.stage, pack):
        worker.stage_out(pack, computed)
    assert (caught.value.node, caught.value.code) == ("node-1", "compaction")
    message = caught.value.message
    assert "node-1 (blocks 0-3) failed at micro-batch 0, step 1" in message
    assert "closing the holes of micro-batch 0, step 1 failed in block 0: IndexError" in message


def test_a_block_is_not_read_again_before_its_moves_are_known_to_be_good(tiny: Path) -> None:
    (worker,) = workers_of(tiny, 1, 0)
    compactor = Compactor(worker.arena)
    beside = PackCompaction(compactor, (BEYOND,), "the pack before")
    for block in range(TOGETHER):
        beside.before(block)
        beside.after(block)
    after = PackCompaction(compactor, (), "a pack")
    with pytest.raises(CompactionFailed, match="closing the holes of the pack before failed in block 0"):
        after.before(2)
    with pytest.raises(CompactionFailed, match="failed in block 0"):
        compactor.wait_all()


A_TREE = ((0, 2, 3, 5), (0, 0, 2, 0))


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ((2, 3), "nodes of it, in order, with its root"),
        ((0, 3, 2), "nodes of it, in order"),
        ((0, 4), "nodes of it, in order"),
        ((0, 3), "without its parent"),
    ],
)
def test_what_is_kept_of_a_tree_is_a_tree_of_its_nodes(kept: tuple[int, ...], why: str) -> None:
    assert Tree(*A_TREE, (0, 2, 3)).kept == (0, 2, 3)
    with pytest.raises(ValueError, match=why):
        Tree(*A_TREE, kept)


@pytest.mark.parametrize("path", [(1,), (0, 2, 2), (0, 3, 2)])
def test_a_path_that_leads_nowhere_is_refused(path: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="begins at the root"):
        TokensHeader("0" * 16, 0, 0, 1, (5,) * len(path), paths=(path,))


def test_what_is_pruned_goes_no_further_than_the_first_stage() -> None:
    rows = (
        Row(0, 1, 3, 2, False, None),
        Row(1, 1, 8, 4, True, None, Tree(*A_TREE, (0, 2))),
        Row(2, 1, 5, 1, True, None, None, (0, 1)),
    )
    ids = np.array([10, 11, 20, 22, 23, 25, 30], dtype="<i4")
    pack = PackHeader("0" * 16, 0, 0, 1, WHERE.numbers, rows, ids.tobytes())
    went = onward(pack)
    assert went.rows == (rows[0], Row(1, 1, 8, 2, True, None, Tree((0, 2), (0, 0))), rows[2])
    assert token_ids(went).tolist() == [10, 11, 20, 22, 30]
    assert onward(went) == went
    lost = msgspec.structs.replace(onward(pack), tokens=b"")
    with pytest.raises(RemoteProtocolError, match="0 bytes of token ids for 5 tokens"):
        token_ids(lost)


def test_a_tree_without_its_tokens_is_refused_behind_the_first_stage(tiny: Path) -> None:
    _, last = workers_of(tiny, 2, 0)
    row = Row(0, 1, 0, 2, True, None, Tree((0, 1), (0, 0)))
    pack = PackHeader("0" * 16, 0, 0, 1, WHERE.numbers, (row,))
    layout = Regions().layout(0, (0, 0))
    with pytest.raises(RemoteProtocolError, match="0 bytes of token ids for 2 tokens"):
        last.stage_in(pack, bytes(2 * 4 * HIDDEN), Placement({0: layout}))


def test_what_is_chosen_is_asked_at_visited_nodes_alone() -> None:
    """Noise for one row takes a millisecond."""
    asked: list[int] = []

    def chosen(place: int) -> int:
        asked.append(place)
        return {0: 7, 1: 22, 2: 99}[place]

    rows = (Row(0, 1, 3, 1, True, None), Row(1, 1, 8, 4, True, None, Tree(*A_TREE)))
    ids = np.array([10, 20, 22, 23, 25], dtype="<i4")
    pack = PackHeader("0" * 16, 0, 0, 1, WHERE.numbers, rows, ids.tobytes())
    assert verdicts(pack, chosen) == ((7, 22, 99), ((0, 2),))
    assert asked == [0, 1, 2]
