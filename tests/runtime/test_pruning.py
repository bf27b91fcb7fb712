"""What the first stage decides of trees, what it tells, and whose pruner it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.draft.pruner_file import NAME, PrunerFile, find_pruner
from bbquic.errors import ConfigError, ModelError, PlanRefused, RemoteProtocolError
from bbquic.kv.ranges import SlotRange
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest, manifest_of
from bbquic.runtime.layout import for_stage
from bbquic.runtime.protocol import PackHeader, PlanHeader, Row, Stage, TokensHeader, Tree, WirePruner
from bbquic.runtime.pruner_choice import PruneOptions, with_pruner
from bbquic.runtime.pruning import guesses_of, kept_by, pruner_part
from bbquic.runtime.trees import answers_by_row, kept_places, onward
from bbquic.transport.message import decode_header_untrusted, encode_header
from pruners import random_file

JOB = "0" * 16
WHERE = SlotRange.of(0, 8, 64)


def a_pack(seed: int) -> PackHeader:
    """Prompts, plain rows, and trees that may be pruned already."""
    drawn, rows = random.Random(seed), list[Row]()
    for slot in range(drawn.randint(1, 6)):
        kind = drawn.random()
        if kind < 0.3:
            rows.append(Row(slot, 1, 3, drawn.randint(1, 4), drawn.random() < 0.5, None))
            continue
        nodes = [0, *sorted(drawn.sample(range(1, 30), drawn.randint(0, 9)))]
        parents = [0, *(drawn.choice(nodes[:place]) for place in range(1, len(nodes)))]
        kept = {0}
        for node, parent in zip(nodes[1:], parents[1:], strict=True):
            if parent in kept and drawn.random() < 0.8:
                kept.add(node)
        told = None if kind < 0.6 else tuple(sorted(kept))
        rows.append(Row(slot, 1, 3, len(nodes), True, None, Tree(tuple(nodes), tuple(parents), told)))
    count = sum(row.count for row in rows)
    ids = np.array([drawn.randrange(300) for _ in range(count)], dtype="<i4")
    return PackHeader(JOB, 0, 0, 1, WHERE.numbers, tuple(rows), ids.tobytes())


def scored(pack: PackHeader, scores: Sequence[float]) -> list[dict[int, float]]:
    """Of each row, the scores of its tree's guesses by node id."""
    left = iter(scores)
    return [{node: next(left) for node in row.tree.nodes[1:]} if row.tree else {} for row in pack.rows]


@given(
    seed=st.integers(0, 10**6),
    threshold=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    levels=st.sampled_from([2, 100]),
)
def test_a_guess_stays_when_it_and_all_above_it_score_enough(
    seed: int, threshold: float, levels: int
) -> None:
    pack, drawn = a_pack(seed), random.Random(seed)
    count = sum(row.count - 1 for row in pack.rows if row.tree)
    scores = [drawn.randint(0, levels) / levels for _ in range(count)]
    decided = kept_by(pack, np.array(scores, np.float32), threshold)
    for row, before, mine in zip(decided.rows, pack.rows, scored(pack, scores), strict=True):
        if row.tree is None or before.tree is None:
            assert row == before
            continue
        up = dict(zip(row.tree.nodes, row.tree.parents, strict=True))
        told = set(before.tree.nodes if before.tree.kept is None else before.tree.kept)
        expected = []
        for node in row.tree.nodes:
            path = [node]
            while path[-1]:
                path.append(up[path[-1]])
            fits = all(one in told and np.float32(mine[one]) >= np.float32(threshold) for one in path if one)
            expected += [node] if fits else []
        assert list(row.tree.nodes if row.tree.kept is None else row.tree.kept) == expected
    assert msgspec.msgpack.decode(encode_header(decided), type=PackHeader) == decided, "it is what may travel"
    places = kept_places(decided)
    assert onward(decided).token_count == (pack.token_count if places is None else len(places))


@given(seed=st.integers(0, 10**6))
def test_guesses_are_judged_where_their_parents_lie(seed: int) -> None:
    pack = a_pack(seed)
    found, expected = guesses_of(pack), []
    ids, start = np.frombuffer(pack.tokens, "<i4"), 0
    for number, row in enumerate(pack.rows):
        nodes = row.tree.nodes if row.tree else (0,)
        for place in range(1, len(nodes)):
            assert row.tree is not None
            up = nodes.index(row.tree.parents[place])
            expected.append((start + up, ids[start + place], (number, up) if up else None, (number, place)))
        start += row.count
    if found is None:
        assert not expected
        return
    places, node, tokens, above, depth = found
    assert len(set(places.tolist())) == len(places), "each node is computed once"
    order = [one[3] for one in expected]
    for guess, (place, token, parent, _) in enumerate(expected):
        assert (places[node[guess]], tokens[guess]) == (place, token)
        assert above[guess] == (len(expected) if parent is None else order.index(parent))
    deepest = 0
    for guess in range(len(expected)):
        steps = 1
        while above[guess] < len(expected):
            guess, steps = above[guess], steps + 1
        deepest = max(deepest, steps)
    assert depth == deepest


def test_how_many_nodes_reached_the_end_is_checked_against_the_tree() -> None:
    rows = (
        Row(0, 1, 3, 1, True, None),
        Row(1, 1, 8, 4, True, None, Tree((0, 1, 2, 3), (0, 0, 1, 0), (0, 1, 2))),
    )
    ids, said = (10, 20, 22, 23, 25), (7, 22, 99)
    assert [one.kept for one in answers_by_row(rows, ids, said, [(0, 1)])] == [0, 2]
    assert [one.kept for one in answers_by_row(rows, ids, said, [(0, 1)], [2])] == [0, 1]
    with pytest.raises(ValueError, match="5 nodes of a tree that had fewer"):
        answers_by_row(rows, ids, said, [(0, 1)], [5])


@pytest.mark.parametrize(
    ("reached", "why"),
    [((), "0 numbers of nodes for 1 paths"), ((3, 3), "2 numbers"), ((2,), "did not reach")],
)
def test_tokens_that_tell_of_other_trees_are_refused(reached: tuple[int, ...], why: str) -> None:
    good = TokensHeader(JOB, 0, 0, 1, (5, 6, 7), paths=((0, 1, 2),), reached=(3,))
    assert decode_header_untrusted(TokensHeader, encode_header(good)) == good
    data = msgspec.msgpack.encode(msgspec.to_builtins(good) | {"reached": reached})
    with pytest.raises(RemoteProtocolError, match=why):
        decode_header_untrusted(TokensHeader, data)


@pytest.fixture(scope="module")
def held(tiny: Path) -> tuple[ModelDirectory, Manifest]:
    directory = ModelDirectory(tiny, "tiny")
    return directory, manifest_of(directory)


def a_plan(manifest: Manifest, first: int = 2) -> PlanHeader:
    stages = (Stage("a", 0, first), Stage("b", first, 4))
    return PlanHeader(JOB, 0, "tiny", "float32", stages, (256,), 1, 1, manifest)


def test_the_first_stage_alone_gets_the_part_for_its_blocks(
    held: tuple[ModelDirectory, Manifest], tmp_path: Path
) -> None:
    directory, manifest = held
    file = random_file(tmp_path / NAME, manifest, range(1, 4), 0.25)
    assert (file.depths, file.words, file.threshold) == ((1, 2, 3), "1 to 3", 0.25)
    said: list[str] = []
    plan = with_pruner(a_plan(manifest), directory, manifest, PruneOptions(file.path), said.append)
    assert plan.pruner is not None
    assert (plan.pruner.data, plan.pruner.threshold) == (file.part(2), 0.25)
    assert said == [f"guesses with a retention score below 0.25 end on a ({file.path})"]
    first, last = (for_stage(plan, stage, directory) for stage in plan.stages)
    assert first.pruner == plan.pruner
    assert pruner_part(first, directory) is not None
    assert last.pruner is None
    other = with_pruner(a_plan(manifest), directory, manifest, PruneOptions(file.path, 0.75), said.append)
    assert other.pruner is not None
    assert other.pruner.threshold == 0.75
    alone = msgspec.structs.replace(a_plan(manifest), stages=(Stage("a", 0, 4),))
    assert with_pruner(alone, directory, manifest, PruneOptions(file.path), said.append) == alone


def test_a_run_without_a_pruner_for_its_first_stage_says_so(
    held: tuple[ModelDirectory, Manifest], tmp_path: Path
) -> None:
    directory, manifest = held
    file, said, plan = random_file(tmp_path / NAME, manifest, range(1, 3)), list[str](), a_plan(manifest, 3)
    assert with_pruner(plan, directory, manifest, PruneOptions(), said.append) == plan
    assert with_pruner(plan, directory, manifest, PruneOptions(file.path), said.append) == plan
    assert with_pruner(plan, directory, manifest, PruneOptions(is_on=False), said.append) == plan
    assert said == [
        "no learned pruner for tiny: guesses are left out by draft probability alone",
        f"the pruner {file.path} is for first stages of 1, 2 blocks, and this one has 3: "
        "guesses are left out by draft probability alone",
    ]
    with pytest.raises(ConfigError, match="nothing is pruned"):
        PruneOptions(threshold=0.5, is_on=False)


def test_another_models_pruner_is_refused_by_name(
    held: tuple[ModelDirectory, Manifest], tmp_path: Path
) -> None:
    directory, manifest = held
    tokenizer = msgspec.structs.replace(manifest, model="other", tokenizer="0" * 64)
    file = random_file(tmp_path / NAME, tokenizer, range(1, 4))
    with pytest.raises(ModelError, match=f"of another model, other {tokenizer.digest[:12]}, than tiny"):
        find_pruner(directory, manifest, file.path)
    with pytest.raises(ModelError, match="cannot read the pruner"):
        find_pruner(directory, manifest, tmp_path / "missing")
    (tmp_path / "damaged").write_bytes(file.path.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot read the pruner"):
        PrunerFile.open(tmp_path / "damaged")
    with pytest.raises(ModelError, match="is not a pruner of this version: its format is 'pt'"):
        PrunerFile.open(directory.path / "model.safetensors")
    pruner = WirePruner(file.part(2), "0" * 64, 0.5)
    plan = for_stage(
        msgspec.structs.replace(a_plan(manifest), pruner=pruner), a_plan(manifest).stages[0], directory
    )
    with pytest.raises(
        PlanRefused, match=r"is not of tiny: it was trained with a model\.embed_tokens\.weight of sha256 0000"
    ):
        pruner_part(plan, directory)
