"""A model with a sliding window, through our blocks and attention, against transformers' own."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from bbquic.kv.attention import PackedAttention
from bbquic.kv.ranges import SlotRange, Tiers
from bbquic.kv.rows import Layout, RowSpan
from bbquic.kv.slab import Arena
from bbquic.model.blocks import StageModel
from bbquic.model.spec import parse_family

TEXT = 40
CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_a_window_shorter_than_the_text_gives_the_logits_of_transformers(
    window: int | None, kv_heads: int
) -> None:
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        vocab_size=50,
        sliding_window=window,
        initializer_range=0.3,
    )
    torch.manual_seed(4)
    reference = MistralForCausalLM(config).eval()
    text = torch.randint(0, 50, (TEXT,))
    with torch.inference_mode():
        expected = reference(text[None]).logits[0]
    llama = (files("bbquic.model") / "families" / "llama.yaml").read_text("utf-8").split("gguf:")[0]
    spec = parse_family(llama.replace("llama", "mistral").replace("Llama", "Mistral"), "mistral")
    tensors = {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}
    model = StageModel(spec, config, tensors, blocks=range(3), embeds=True, heads=True)
    where = SlotRange.of(0, 2, 64)
    arena = Arena(
        blocks=range(3),
        tiers=Tiers((128,)),
        kv_heads=kv_heads,
        head_dim=8,
        dtype=torch.float32,
        device=CPU,
    )
    # in chunks, by single tokens, then as a tree of one line that lies in its place or behind a hole
    line = tuple(max(0, node - 1) for node in range(7))
    for first, count in [(0, 9), (9, 13), *((place, 1) for place in range(22, 33)), (33, 7)]:
        rows = [RowSpan(slot, first, count) for slot in (0, 1)]
        if first == 33:
            layouts = [Layout(first, first + hole, (), line) for hole in (0, 5)]
            rows = [RowSpan(slot, first, count, layout) for slot, layout in enumerate(layouts)]
        span = slice(first, first + count)
        ids = torch.cat([text[span]] * 2)
        positions = torch.arange(first, first + count).repeat(2)
        packed = PackedAttention(rows, where, arena, device=CPU)
        got = model.logits(model.run(model.embed(ids), positions, packed))
        torch.testing.assert_close(got, torch.cat([expected[span]] * 2), atol=1e-3, rtol=1e-3)
