"""Rows with draft trees in a pack: what of them a stage passes on, and what the last stage makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from bbquic.draft.verify import verify
from bbquic.errors import RemoteProtocolError
from bbquic.runtime.protocol import PackHeader, Path, Row, Tree


def token_ids(pack: PackHeader) -> NDArray[np.int32]:
    """A pack's token ids [T]. Raises: RemoteProtocolError when it has fewer or more."""
    if len(pack.tokens) != 4 * pack.token_count:
        raise RemoteProtocolError(f"{len(pack.tokens)} bytes of token ids for {pack.token_count} tokens")
    return np.frombuffer(pack.tokens, dtype="<i4")


def kept_places(pack: PackHeader) -> NDArray[np.int64] | None:
    """The places [K] of the pack's tokens that go on to the next stage; None: all do."""
    if all(row.tree is None or row.tree.kept is None for row in pack.rows):
        return None
    stays = np.ones(pack.token_count, dtype=np.bool_)
    for row, start in zip(pack.rows, starts(pack), strict=True):
        if row.tree is not None and row.tree.kept is not None:
            stays[start : start + row.count] = np.isin(row.tree.nodes, row.tree.kept)
    return np.flatnonzero(stays)


def onward(pack: PackHeader) -> PackHeader:
    """The pack as the next stage gets it, but for its frame and timings: without what was pruned, and without
    token ids unless a tree is verified by them."""
    tokens = pack.tokens if pack.has_trees else b""
    places = kept_places(pack)
    if places is None:
        return msgspec.structs.replace(pack, tokens=tokens)
    if tokens:
        tokens = token_ids(pack)[places].tobytes()
    return msgspec.structs.replace(pack, rows=tuple(map(_pruned, pack.rows)), tokens=tokens)


def verdicts(
    pack: PackHeader, chosen: Callable[[int], int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The answers of a pass, and the accepted paths of its trees, both in row order.

    `chosen` gives the token behind each that is to be turned into one, numbered through the pack: a row's
    last, and of a tree every node. It is asked of accepted nodes alone.
    """
    answers: list[int] = []
    paths: list[tuple[int, ...]] = []
    ids = token_ids(pack).tolist() if pack.has_trees else []
    asked = 0
    for row, start in zip(pack.rows, starts(pack), strict=True):
        if row.tree is not None:
            tokens = ids[start : start + row.count]
            verdict = verify(row.tree.nodes, row.tree.parents, tokens, partial(_behind, chosen, asked))
            answers += verdict.tokens
            paths.append(verdict.path)
            asked += row.count
        elif row.wants_token:
            answers.append(chosen(asked))
            asked += 1
    return tuple(answers), tuple(paths)


class Answered(NamedTuple):
    """What a row got: tokens, and where it has a tree the accepted path, and how many guesses went on from
    the first stage."""

    tokens: Sequence[int]
    path: Path | None = None
    kept: int = 0


def answers_by_row(
    rows: Sequence[Row],
    ids: Sequence[int],
    tokens: Sequence[int],
    paths: Sequence[Path],
    reached: Sequence[int] | None = None,
) -> list[Answered]:
    """For each row that wants a token, in order, what it got.

    `ids` are the tokens of the rows themselves; `reached` says of each tree how many nodes came to the last
    stage, None: those that the first was told to keep. Raises: ValueError when there are more or fewer, or a
    path is none of the row's tree whose tokens are those that were chosen.
    """
    found: list[Answered] = []
    left, start, place = list(paths), 0, 0
    counts = [_kept(row.tree) for row in rows if row.tree is not None]
    if reached is not None and len(reached) == len(counts):
        if any(
            came > row.count for came, row in zip(reached, (row for row in rows if row.tree), strict=True)
        ):
            raise ValueError(f"{max(reached)} nodes of a tree that had fewer came to the last stage")
        counts = list(reached)
    for row in rows:
        if row.tree is not None and not left:
            raise ValueError(f"{len(paths)} paths for more trees")
        path = left.pop(0) if row.tree is not None else None
        said = tokens[place : place + (len(path) if path else int(row.wants_token))]
        if row.tree is not None and path is not None:
            _check_path(row.tree, ids[start : start + row.count], path, said)
            found.append(Answered(said, path, counts.pop(0) - 1))
        elif row.wants_token:
            found.append(Answered(said))
        start, place = start + row.count, place + (len(path) if path else int(row.wants_token))
    if left or place != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for {place} rows and nodes, and {len(left)} paths too many")
    return found


def _check_path(tree: Tree, ids: Sequence[int], path: Path, said: Sequence[int]) -> None:
    nodes = {node: (parent, token) for node, parent, token in zip(tree.nodes, tree.parents, ids, strict=True)}
    steps = zip(path[1:], path, said, strict=False)
    if path[0] != 0 or any(nodes.get(node) != (parent, token) for node, parent, token in steps):
        raise ValueError(f"{path} is no path of a tree whose tokens were chosen")


def _kept(tree: Tree) -> int:
    return len(tree.nodes if tree.kept is None else tree.kept)


def _behind(chosen: Callable[[int], int], first: int, place: int) -> int:
    return chosen(first + place)


def starts(pack: PackHeader) -> list[int]:
    """The place of each row's first token."""
    return list(accumulate((row.count for row in pack.rows[:-1]), initial=0))


def _pruned(row: Row) -> Row:
    tree = row.tree
    if tree is None or tree.kept is None:
        return row
    parents = dict(zip(tree.nodes, tree.parents, strict=True))
    left = Tree(tree.kept, tuple(parents[node] for node in tree.kept))
    return msgspec.structs.replace(row, count=len(tree.kept), tree=left)
