"""Which guesses a model would have made itself (architecture: sampling without state).

A drafted token is accepted iff it is the token that would have been chosen there anyway, noise included. So
speculation changes no token, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path`: ids of the accepted nodes, from the root on; `tokens`: what is chosen behind each of them.

    All tokens but the last are the accepted guesses; the last one is new.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def verify(
    nodes: Sequence[int], parents: Sequence[int], tokens: Sequence[int], chosen: Callable[[int], int]
) -> Verdict:
    """Walk a tree from its root as far as its guesses are right.

    `nodes` are ids, rising, root first, `parents` their parents' ids, `tokens` their tokens. `chosen` gives
    the token that the model chooses behind the node at a place in these; it is asked of accepted ones alone.
    """
    children = {
        (parent, token): place
        for place, (parent, token) in enumerate(zip(parents, tokens, strict=True))
        if place
    }
    place, path, said = 0, [nodes[0]], list[int]()
    while True:
        said.append(chosen(place))
        following = children.get((nodes[place], said[-1]))
        if following is None:
            return Verdict(tuple(path), tuple(said))
        place = following
        path.append(nodes[place])
