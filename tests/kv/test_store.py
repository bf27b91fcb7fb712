"""A stage's KV store against lists of tokens: trees, holes, compaction, moves, refills, two tiers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from bbquic.kv.attention import PackedAttention
from bbquic.kv.compaction import Compactor, PackCompaction
from bbquic.kv.ranges import SlotCopy, SlotRange, Tiers
from bbquic.kv.rows import RowSpan
from bbquic.kv.slab import Arena
from bbquic.runtime.ledger import Due, Ledger
from bbquic.runtime.placement import CompactionPolicy
from bbquic.runtime.protocol import Move, PackHeader, Row, Tree

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
CPU = torch.device("cpu")
BLOCKS = range(3, 9)  # more than are handed over at once
RANGES = (SlotRange.of(0, 2, 20, 128, 1), SlotRange.of(48, 2, 32, 160, 1))
TIERS = (112, 96)  # the second in host memory


@dataclass
class Sequence:
    """A slot as a list: a token is the number that its keys, values and queries are made of."""

    generation: int = 0
    tokens: list[int] = field(default_factory=list)
    tree: Tree | None = None
    drafts: dict[int, int] = field(default_factory=dict)  # tokens by node
    step: int = 0


def parts(token: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [HEADS, HEAD_DIM], key and value [KV_HEADS, HEAD_DIM] of a token in a block."""
    made = torch.randn(HEADS + 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(token))
    made = made + block
    return made[:HEADS], made[HEADS : HEADS + KV_HEADS], made[HEADS + KV_HEADS :] * 0.1


def alone(token: int, seen: list[int], block: int) -> torch.Tensor:
    q = parts(token, block)[0].view(KV_HEADS, -1, HEAD_DIM)
    k = torch.stack([parts(one, block)[1] for one in seen], 1)
    v = torch.stack([parts(one, block)[2] for one in seen], 1)
    weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM), -1)
    return (weights @ v).reshape(HEADS, HEAD_DIM)


class StoreMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(CompactionPolicy))
    def begin(self, policy: CompactionPolicy) -> None:
        self.arena = Arena(
            blocks=BLOCKS,
            tiers=Tiers(TIERS),
            on_host=1,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=CPU,
        )
        self.ledger: Ledger[None] = Ledger(tiers=TIERS, micro_batches=2, depth=1, policy=policy)
        self.compactor = Compactor(self.arena)
        self.steps = [0, 0]
        self.held = {(batch, slot): Sequence() for batch in (0, 1) for slot in RANGES[batch].slots()}
        self.made = 0

    @rule(policy=st.sampled_from(CompactionPolicy))
    def change_the_policy(self, policy: CompactionPolicy) -> None:
        self.ledger.policy = policy

    @rule(data=st.data(), batch=st.sampled_from([0, 1]))
    def compute_a_pack(self, data: st.DataObject, batch: int) -> None:
        where = RANGES[batch]
        self.steps[batch] += 1
        moves = self.some_moves(data, batch)
        targets = [move.target for move in moves]
        others = [slot for slot in where.slots() if slot not in targets]
        slots = data.draw(st.permutations([*targets, *data.draw(st.sets(st.sampled_from(others)))]))
        rows, expected = [], []
        for slot in slots or [others[0]]:
            row, seen = self.a_row(data, self.held[batch, slot], slot, where.capacity)
            rows.append(row)
            expected += seen
            self.held[batch, slot].step = self.steps[batch]
        pack = PackHeader(
            "0" * 16, 0, batch, self.steps[batch], where.numbers, tuple(rows), moves=tuple(moves)
        )
        (due,) = self.ledger.admit(pack, None)
        self.check(due, expected, finishes=data.draw(st.booleans()))

    def some_moves(self, data: st.DataObject, batch: int) -> list[Move]:
        """A sequence of the other micro-batch comes here, now and then."""
        sources = [
            slot
            for slot in RANGES[1 - batch].slots()
            for held in [self.held[1 - batch, slot]]
            if held.tokens and len(held.tokens) + len(held.drafts) + 1 <= RANGES[batch].capacity
        ]
        if not sources or data.draw(st.integers(0, 2)):
            return []
        slot = data.draw(st.sampled_from(sources))
        target = data.draw(st.sampled_from(list(RANGES[batch].slots())))
        held, there = self.held[1 - batch, slot], self.held[batch, target].generation + 1
        self.held[1 - batch, slot] = Sequence(held.generation)
        self.held[batch, target] = Sequence(there, held.tokens, held.tree, held.drafts)
        count = len(held.tokens)
        return [Move(1 - batch, slot, held.generation, held.step, target, there, count)]

    def a_row(
        self, data: st.DataObject, held: Sequence, slot: int, capacity: int
    ) -> tuple[Row, list[tuple[int, list[int]]]]:
        """A slot's next row, and each of its tokens with those that it sees."""
        accepted = None
        if held.tree is not None:
            accepted = a_path(data, held.tree)
            held.tokens = held.tokens + [held.drafts[node] for node in accepted]
            held.tree, held.drafts = None, {}
        room = capacity - len(held.tokens)
        if room < 1 or not data.draw(st.integers(0, 7)) or not held.generation:
            held.generation, held.tokens, accepted, room = held.generation + 1, [], None, capacity
        count, first = data.draw(st.integers(1, min(room, 6))), len(held.tokens)
        new = list(range(self.made, self.made + count))
        self.made += count
        if data.draw(st.booleans()):
            seen = [(token, held.tokens + new[: place + 1]) for place, token in enumerate(new)]
            held.tokens = held.tokens + new
            return Row(slot, held.generation, first, count, True, None, None, accepted), seen
        held.tree = a_tree(data, count)
        held.drafts = dict(zip(held.tree.nodes, new, strict=True))
        seen = []
        for node in held.tree.nodes:
            line = [node]
            while line[0] != 0:
                line.insert(0, held.tree.parents[held.tree.nodes.index(line[0])])
            seen.append((held.drafts[node], held.tokens + [held.drafts[one] for one in line]))
        return Row(slot, held.generation, first, count, True, None, held.tree, accepted), seen

    def check(self, due: Due[None], expected: list[tuple[int, list[int]]], *, finishes: bool) -> None:
        pack, layouts = due.pack, due.placement.layouts
        for moving in due.copies:
            if isinstance(moving, SlotCopy):
                self.compactor.wait_all()
                self.arena.copy(moving)
            else:
                self.compactor.move_now([moving])
        spans = [
            RowSpan(row.slot, row.first, row.count, layouts.get(place)) for place, row in enumerate(pack.rows)
        ]
        beside = PackCompaction(self.compactor, due.placement.compactions, "the pack")
        attention = PackedAttention(spans, pack.slot_range, self.arena, device=CPU, compaction=beside)
        for block in BLOCKS:
            made = [parts(token, block) for token, _ in expected]
            q, k, v = (torch.stack([one[part] for one in made], 1)[None] for part in range(3))
            got = attention.attend(block, q, k, v, scale=None)[0]
            if block in (BLOCKS[0], BLOCKS[-1]):
                right = torch.stack([alone(token, seen, block) for token, seen in expected])
                torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)
        if finishes:
            beside.finish()


def a_tree(data: st.DataObject, count: int) -> Tree:
    """With ids as they are once some nodes were pruned."""
    nodes = [0]
    parents = [0]
    for _ in range(count - 1):
        parents.append(data.draw(st.sampled_from(nodes)))
        nodes.append(nodes[-1] + data.draw(st.integers(1, 3)))
    return Tree(tuple(nodes), tuple(parents))


def a_path(data: st.DataObject, tree: Tree) -> tuple[int, ...]:
    path = [0]
    while True:
        pairs = zip(tree.nodes[1:], tree.parents[1:], strict=True)
        children = [node for node, parent in pairs if parent == path[-1]]
        if not children or not data.draw(st.integers(0, 3)):
            return tuple(path)
        path.append(data.draw(st.sampled_from(children)))


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=16, deadline=None)
TestStore = StoreMachine.TestCase
