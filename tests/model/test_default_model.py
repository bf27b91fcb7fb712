"""The default model as it comes out of the cache, against what transformers makes of it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bbquic.model.directory import ModelDirectory
from bbquic.model.weights import load_tensors, tensors_for

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def reference(default_model: ModelDirectory) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        default_model.path, dtype=torch.float32, local_files_only=True
    )
    assert isinstance(model, torch.nn.Module)
    return model.eval()


def generate(reference: torch.nn.Module, default_model: ModelDirectory, tokens: list[int], most: int) -> str:
    prompt = torch.tensor([tokens])
    answer = reference.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False
    )
    return default_model.tokenizer.decode(answer[0, len(tokens) :].tolist())


def test_it_is_the_model_its_maker_describes(default_model: ModelDirectory) -> None:
    config = default_model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.tie_word_embeddings
    assert default_model.context_length == 8192
    assert default_model.eos == {2}


def test_it_knows_the_capital_of_france(reference: torch.nn.Module, default_model: ModelDirectory) -> None:
    text = default_model.tokenizer.encode("The capital of France is")
    assert generate(reference, default_model, text, 1) == " Paris"
    chat = default_model.tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    assert generate(reference, default_model, chat, 12) == "The capital of France is Paris."


def test_english_does_not_surprise_it(reference: torch.nn.Module, default_model: ModelDirectory) -> None:
    text = (
        "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to make sugar "
        "and oxygen. It takes place in the chloroplasts, which hold a green pigment called chlorophyll."
    )
    tokens = torch.tensor([default_model.tokenizer.encode(text)])
    with torch.inference_mode():
        logits = reference(tokens).logits[0, :-1]
    perplexity = torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).exp().item()
    assert perplexity < 12  # rows of q and k in the wrong order give hundreds


def test_its_chat_template_introduces_itself(default_model: ModelDirectory) -> None:
    tokens = default_model.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    spelled = AutoTokenizer.from_pretrained(default_model.path).decode(tokens)
    assert spelled == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_stage_gets_the_weights_transformers_gets(
    reference: torch.nn.Module, default_model: ModelDirectory
) -> None:
    needed = tensors_for(default_model.spec, default_model.config, range(28, 30), embeds=False, heads=True)
    loaded = load_tensors(default_model, needed, torch.float32, "cpu")
    theirs = reference.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in loaded.items())
    assert len(loaded) == 2 * 9 + 2
