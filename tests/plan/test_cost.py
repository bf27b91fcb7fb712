"""Each equation against figures worked by hand; memory by properties."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import AttentionCost, CodecSpeed, Curve, NodeProfile
from bbquic.plan.cost import (
    ROW_BYTES,
    WIRE,
    Load,
    MemoryOptions,
    block_time,
    circulating_step,
    communication_time,
    ends_time,
    held_memory,
    hop_time,
    leg_time,
    load_of,
    overlapped_block_time,
    pipeline_throughput,
    serial_throughput,
    stage_memory,
    steady_time,
    weights_bytes,
    whole_slots,
)
from bbquic.units import Bytes, BytesPerSecond
from clusters import link, random_node, simple_node, small_job, small_model

TWO_SPEEDS = replace(
    simple_node("a"),
    mlp=Curve(((0, 1.0), (10, 2.0))),
    attention=AttentionCost(0.5, 0.1, 0.01),
    attention_host=AttentionCost(1.0, 0.4, 0.04),
)


def test_equation_2_adds_the_attention_of_both_by_alpha() -> None:
    # t_mlp(4) = 1.4; on the device 0.5 + 4 (0.1 + 0.2) = 1.7, on the host 1 + 4 (0.4 + 0.8) = 5.8
    assert block_time(TWO_SPEEDS, 4, 20) == pytest.approx(1.4 + 1.7)
    assert block_time(TWO_SPEEDS, 4, 20, 0.25) == pytest.approx(1.4 + 0.75 * 1.7 + 0.25 * 5.8)


def test_attention_on_the_host_runs_beside_the_device_s_and_prompts_come_on_top() -> None:
    # device: 3 rows, 0.5 + 3 · 0.3 = 1.4; host: 1 row, 1 + 1.2 = 2.2; prompts: 0.5 + 6 (0.1 + 0.05) = 1.4
    load = Load(4, 20, prompt_tokens=6, prompt_context=5)
    assert overlapped_block_time(TWO_SPEEDS, load, 0.25) == pytest.approx(2.0 + 2.2 + 1.4)
    one_cpu = replace(TWO_SPEEDS, host_beside=False)  # which attends to one after the other
    assert overlapped_block_time(one_cpu, load, 0.25) == pytest.approx(2.0 + 1.4 + 2.2 + 1.4)
    assert overlapped_block_time(TWO_SPEEDS, load) == pytest.approx(2.0 + 1.7 + 1.4)
    assert overlapped_block_time(TWO_SPEEDS, Load(4, 20), 1.0) == pytest.approx(1.4 + 5.8)


def test_a_node_without_attention_on_the_host_cannot_have_alpha() -> None:
    with pytest.raises(ValueError, match="a does not compute attention in host memory"):
        block_time(simple_node("a"), 1, 1, 0.5)
    with pytest.raises(ValueError, match="a does not compute attention in host memory"):
        overlapped_block_time(simple_node("a"), Load(1, 1), 0.5)


def test_the_ends_carry_embedding_and_head_and_prompts_alone_pass_the_head_by() -> None:
    node = replace(simple_node("a"), embed=Curve(((0, 0.0), (10, 1.0))), head=Curve(((0, 2.0), (10, 3.0))))
    load = Load(4, 20, prompt_tokens=1)
    assert ends_time(node, load, embeds=True, heads=False) == pytest.approx(0.5)
    assert ends_time(node, load, embeds=False, heads=True) == pytest.approx(2.4)
    assert ends_time(node, load, embeds=True, heads=True) == pytest.approx(2.9)
    assert ends_time(node, Load(0, 0, prompt_tokens=10), embeds=False, heads=True) == 0.0


def test_equation_3_is_latency_and_bytes_over_rate() -> None:
    assert communication_time(link(1000, 0.25), 500) == pytest.approx(0.75)


def test_a_hop_is_busy_with_its_slowest_part_and_passes_through_all() -> None:
    sender = simple_node("a", to_host=BytesPerSecond(1e4), codecs={Way.H8: CodecSpeed(0.5, 1e-3, 7.0)})
    receiver = simple_node("b", to_device=BytesPerSecond(2e4), codecs={Way.H8: CodecSpeed(0.9, 7.0, 2e-3)})
    hop = hop_time(sender, receiver, link(1000, 10.0), 1000, Way.H8)
    assert hop.out == pytest.approx(0.1 + 1.0)  # copied, encoded by the sender
    assert hop.wire == pytest.approx(0.5 * WIRE)  # by the sender's ratio
    assert hop.into == pytest.approx(2.0 + 0.05)  # decoded by the receiver, copied
    assert hop.busy == hop.into
    assert hop.passes == pytest.approx(1.1 + 0.5 * WIRE + 10.0 + 2.05)
    raw = hop_time(sender, receiver, link(1000, 10.0), 1000, Way.RAW)
    assert (raw.out, raw.wire, raw.into) == pytest.approx((0.1, WIRE, 0.05))


def test_a_hop_without_a_link_or_with_a_codec_unknown_to_an_end_never_ends() -> None:
    able, other = simple_node("a", codecs={Way.H8: CodecSpeed(0.5, 0.0, 0.0)}), simple_node("b")
    for hop in (
        hop_time(able, other, link(), 10, Way.H8),
        hop_time(other, able, link(), 10, Way.H8),
        hop_time(able, other, None, 10, Way.RAW),
    ):
        assert hop.busy == hop.passes == float("inf")


def test_prompts_go_out_with_the_outer_leg_and_not_back() -> None:
    load = Load(3, 20, prompt_tokens=100)
    assert leg_time(link(1000, 0.5), load) == pytest.approx(0.5 + (4 * 103 + ROW_BYTES * 3) * WIRE / 1000)
    assert leg_time(link(1000, 0.5), load, back=True) == pytest.approx(0.5 + ROW_BYTES * 3 * WIRE / 1000)
    assert leg_time(None, load) == 0.0


def test_equations_1_and_4_commit_a_batch_a_step() -> None:
    assert serial_throughput(12, [1, 2], [3]) == pytest.approx(12 / 6)
    assert pipeline_throughput(12, 4, [1, 2], [1.5]) == pytest.approx(12 / ((4 + 2 - 1) * 2))
    assert pipeline_throughput(12, 4, [1, 2], [2.5, 2.0]) == pytest.approx(12 / (5 * 2.5))
    assert pipeline_throughput(12, 4, [3], []) == pytest.approx(12 / (4 * 3))


def test_a_step_circulates_as_fast_as_the_bottleneck_or_the_loop_lets_it() -> None:
    assert circulating_step(4, 0.1, 0.3) == pytest.approx(0.4)
    assert circulating_step(2, 0.1, 0.3) == pytest.approx(0.3)


def test_a_job_takes_its_answers_tokens_over_the_batch_in_steps() -> None:
    job = small_job(100, output=30)
    assert steady_time(job, 20, 0.5) == pytest.approx(100 * 30 / 20 * 0.5)
    assert steady_time(job, 1000, 0.5) == pytest.approx(30 * 0.5)  # no more in flight than there are


def test_a_pack_carries_its_rows_and_their_share_of_prompts() -> None:
    load = load_of(small_job(100, prompt=60, output=30), 20, 4)
    assert (load.rows, load.context, load.prompt_tokens, load.prompt_context) == (5, 75, 10, 30)
    assert load.tokens == 15
    assert load_of(small_job(8), 20, 4).rows == 2


def test_tied_weights_are_held_once_where_both_ends_are_on_a_node() -> None:
    for tied, both in ((False, 2900), (True, 2500)):
        model = small_model(tied=tied)
        assert weights_bytes(model, 2, embeds=True, heads=True) == both
        assert weights_bytes(model, 2, embeds=True, heads=False) == 2400
        assert weights_bytes(model, 2, embeds=False, heads=True) == 2500
        assert weights_bytes(model, 2, embeds=False, heads=False) == 2000


def test_what_a_stage_holds_by_hand() -> None:
    held = held_memory(
        small_model(),
        MemoryOptions(pack_tokens=5),
        blocks=2,
        batch=6,
        rows=3,
        slot=20,
        embeds=False,
        heads=True,
    )
    assert held.weights == 2500
    assert held.kv == 6 * 2 * 20 * 10
    assert held.workspace == 8 * (600 + 30) * 2 + 8 * 3 * 10  # 8 tokens; logits in float32, twice
    assert held.buffers == 6 * 8 * 200
    assert held.device == 2500 + 2400 + 10320 + 9600
    moved = held.offloading(4, 6)
    assert (moved.kv, moved.host_kv, moved.device) == (800, 1600, held.device - 1600)


SIZES: dict[str, st.SearchStrategy[int]] = {
    "blocks": st.integers(1, 8),
    "batch": st.integers(1, 40),
    "rows": st.integers(1, 40),
    "slot": st.integers(1, 100),
    "embeds": st.booleans(),
    "heads": st.booleans(),
}


@given(sizes=st.fixed_dictionaries(SIZES), which=st.sampled_from(sorted(SIZES)))
def test_more_of_anything_never_takes_less_memory(sizes: dict[str, int], which: str) -> None:
    model, options = small_model(8, tied=True), MemoryOptions(pack_tokens=5)
    more = sizes | {which: True if which in ("embeds", "heads") else sizes[which] + 1}
    assert held_memory(model, options, **more).device >= held_memory(model, options, **sizes).device  # type: ignore[arg-type]


@given(
    sizes=st.fixed_dictionaries(SIZES),
    random=st.randoms(use_true_random=False),
    share=st.floats(0.5, 1.0),
    offload=st.none() | st.floats(0, 1),
)
def test_a_stage_that_fits_is_within_both_memories_and_offloads_as_little_as_does(
    sizes: dict[str, int], random: Random, share: float, offload: float | None
) -> None:
    node = random_node(random, "a", memory=(15_000, 60_000))
    batch, micro_batches = sizes["batch"], random.randint(1, sizes["batch"])
    model, options = small_model(8), MemoryOptions(share, 1, offload)
    room, beside = int(node.memory * share), int(node.host_memory * share)
    less = {name: value for name, value in sizes.items() if name != "rows"}
    found = stage_memory(node, model, options, micro_batches=micro_batches, **less)  # type: ignore[arg-type]
    alone = held_memory(model, options, **sizes | {"rows": -(-batch // micro_batches)})  # type: ignore[arg-type]

    def held_with(on_host: int) -> bool:
        both = alone.offloading(on_host, batch)
        return alone.device <= room if node.is_host else both.device <= room and both.host_kv <= beside

    if found is None:
        able = range(batch + 1) if offload is None else [round(offload * batch)]
        assert not any(map(held_with, able))
        return
    held, on_host = found
    assert held_with(on_host)
    assert held == alone.offloading(on_host, batch)
    fewest = next(k for k in range(batch + 1) if held_with(k)) if offload is None else round(offload * batch)
    evenly = batch - (batch - fewest) // micro_batches * micro_batches  # whole slots of each on the device
    assert on_host == (evenly if fewest and held_with(evenly) and not node.is_host else fewest)


def test_a_node_that_does_not_offload_keeps_all_keys_or_does_not_fit() -> None:
    able = simple_node(
        "a",
        memory=20_000,
        offloads=True,
        host_memory=Bytes(10_000),
        attention_host=AttentionCost(0.1, 0.1, 0.1),
    )

    def kept(node: NodeProfile, batch: int, offload: float | None = None) -> int | None:
        found = stage_memory(
            node,
            small_model(),
            MemoryOptions(1.0, 1, offload),
            blocks=2,
            batch=batch,
            micro_batches=batch,
            slot=20,
            embeds=False,
            heads=False,
        )
        return None if found is None else found[1]

    # weights 2,000, workspace 2,520, buffers 2,400: 13,080 are left for slots of 400
    assert [kept(able, batch) for batch in (32, 33, 57, 58)] == [0, 1, 25, None]
    for unable in (replace(able, offloads=False), replace(able, attention_host=None)):
        assert [kept(unable, batch) for batch in (32, 33)] == [0, None]
        assert [kept(unable, 32, share) for share in (0.0, 0.5)] == [0, None]
    assert [kept(able, batch, 0.5) for batch in (32, 50, 52)] == [16, 25, None]
    assert kept(able, 57, 0.1) is None  # six slots are not the 25 for which the device has no room
    # where device and host are one memory, it holds all slots wherever they are said to be
    one = replace(able, offloads=False, host_memory=Bytes(0))
    assert [kept(one, batch, 0.5) for batch in (32, 33)] == [16, None]


def test_slots_on_the_host_are_as_many_of_each_micro_batch() -> None:
    assert [whole_slots(k, 32, 4) for k in (0, 1, 4, 5, 10, 32)] == [0, 4, 4, 8, 12, 32]
    assert whole_slots(4, 10, 4) == 6  # of 6 that the device holds it has one of each
