"""Where blocks go when nobody says: exhaustive search is the oracle."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.errors import ConfigError
from bbquic.plan.splits import weighed_split


@given(blocks=st.integers(1, 12), nodes=st.integers(1, 5), head=st.floats(0, 8))
def test_the_heaviest_node_is_as_light_as_any_split_makes_it(blocks: int, nodes: int, head: float) -> None:
    if nodes > blocks:
        with pytest.raises(ConfigError, match=f"{blocks} blocks do not split over {nodes} nodes"):
            weighed_split(blocks, nodes, head=head)
        return
    ranges = weighed_split(blocks, nodes, head=head)
    assert [block for one in ranges for block in one] == list(range(blocks))
    assert all(ranges)

    def heaviest(counts: list[int]) -> float:
        return max(*counts[:-1], counts[-1] + head) if len(counts) > 1 else counts[0] + head

    cuts = [(0, *inner, blocks) for inner in combinations(range(1, blocks), nodes - 1)]
    best = min(heaviest([b - a for a, b in pairwise(cut)]) for cut in cuts)
    assert heaviest([len(one) for one in ranges]) == pytest.approx(best)
