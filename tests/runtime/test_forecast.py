"""What a stage's packs should take, against what they took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bbquic.plan.cluster import AttentionCost, Curve, NodeProfile
from bbquic.runtime.forecast import LEAST_STEPS, OFF, Forecast, load_of_pack, misjudged
from bbquic.runtime.protocol import PackHeader, Row, Tree
from bbquic.units import Bytes

PROFILE = NodeProfile(
    name="a",
    mlp=Curve(((0.0, 1e-3), (100.0, 11e-3))),  # 1 ms and 0.1 ms a token
    attention=AttentionCost(1e-4, 1e-5, 1e-6),
    attention_prompt=AttentionCost(1e-4, 1e-6, 1e-7),
    embed=Curve(((0.0, 1e-3), (100.0, 2e-3))),
    head=Curve(((0.0, 5e-3), (100.0, 15e-3))),
    memory=Bytes(1),
)
rows = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 300), st.booleans()), min_size=1, max_size=20)


def pack_of(parts: list[tuple[int, int, bool]]) -> PackHeader:
    made = tuple(Row(slot, 1, first, count, wants, None) for slot, (first, count, wants) in enumerate(parts))
    return PackHeader("0" * 16, 0, 0, 1, (0, 32, 2048), made)


@given(rows)
def test_a_load_counts_every_token_and_every_key_once(parts: list[tuple[int, int, bool]]) -> None:
    load = load_of_pack(pack_of(parts))
    keys = sum(sum(range(first + 1, first + count + 1)) for first, count, _ in parts)
    assert load.tokens == sum(count for _, count, _ in parts)
    assert load.rows * load.context + load.prompt_tokens * load.prompt_context == pytest.approx(keys)


@given(rows, st.integers(1, 30))
def test_a_stage_takes_its_blocks_and_its_ends(parts: list[tuple[int, int, bool]], blocks: int) -> None:
    pack, load = pack_of(parts), load_of_pack(pack_of(parts))
    each = 1e-3 + 1e-4 * load.tokens
    each += 1e-4 + load.rows * (1e-5 + 1e-6 * load.context) if load.rows else 0
    each += 1e-4 + load.prompt_tokens * (1e-6 + 1e-7 * load.prompt_context) if load.prompt_tokens else 0
    wanted = sum(wants for *_, wants in parts)
    ends = {
        (False, False): 0.0,
        (True, False): 1e-3 + 1e-5 * load.tokens,
        (False, True): 5e-3 + 1e-4 * wanted if wanted else 0.0,
    }
    ends[True, True] = ends[True, False] + ends[False, True]
    for (embeds, heads), beside in ends.items():
        assert Forecast(PROFILE, blocks, embeds, heads)(pack) == pytest.approx(blocks * each + beside)


def test_a_tree_is_a_chunk_whose_every_token_passes_the_head() -> None:
    as_tree = Row(0, 1, 50, 3, True, None, Tree((0, 1, 2), (0, 0, 1)))
    chunk, head = pack_of([(50, 3, False)]), pack_of([(0, 1, True)] * 3)
    tree = replace(chunk, rows=(as_tree,))
    rest = Forecast(PROFILE, 2, embeds=True, heads=False)
    whole = Forecast(PROFILE, 2, embeds=True, heads=True)
    assert rest(tree) == rest(chunk)
    assert whole(tree) - rest(tree) == pytest.approx(whole(head) - rest(head))


def test_a_profile_is_wrong_once_packs_take_far_more_or_less() -> None:
    steps = LEAST_STEPS
    assert misjudged(steps, 1.0, 1.0) is None
    assert misjudged(steps, 1.0, OFF * 0.99) is None
    assert misjudged(steps, OFF * 0.99, 1.0) is None
    assert misjudged(steps, OFF * 1.01, 1.0) == pytest.approx(OFF * 1.01)
    assert misjudged(steps, 1.0, OFF * 1.01) == pytest.approx(1 / (OFF * 1.01))


def test_a_few_packs_or_very_light_ones_say_nothing_of_a_profile() -> None:
    assert misjudged(LEAST_STEPS - 1, 10.0, 1.0) is None
    assert misjudged(1000, 0.9, 0.1) is None
    assert misjudged(LEAST_STEPS, 10.0, 0.0) is None  # nothing was expected
