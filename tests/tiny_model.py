"""A small random Llama as a Hugging Face directory, for tests that need a model but not a good one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 (bos), 2 (eos)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    " the and of to in is that it was for on are with as his they be at one have this from or had by but"
    " some what there we can out other were all your when up use word how said an each she which do their"
)


def make_tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    blocks: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 320,
    context: int = 512,
    intermediate: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """Writes the model into `directory` and returns it; the same arguments write the same bytes.
    `intermediate` is twice `hidden` where it is not given.

    The weights are scaled so that logits spread over tens: two within 1e-4 at the top are rare.
    """
    assert vocab > len(SPECIAL_TOKENS) + 256, "a byte-level vocabulary needs every byte"
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, vocab)
    intermediate = intermediate or 2 * hidden
    _write_config(directory, blocks, hidden, heads, kv_heads, vocab, context, intermediate, tied, dtype)
    tensors = _random_tensors(seed, blocks, hidden, heads, kv_heads, vocab, intermediate, tied)
    _write_shards(directory, {name: tensor.to(dtype) for name, tensor in tensors.items()}, shards)
    return directory


def _random_tensors(
    seed: int,
    blocks: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    intermediate: int,
    tied: bool,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    kv = hidden // heads * kv_heads
    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden) * hidden**0.5}
    for block in range(blocks):
        prefix = f"model.layers.{block}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": 2 * matrix(hidden, hidden),  # attends to few
            prefix + "self_attn.k_proj.weight": 2 * matrix(kv, hidden),
            prefix + "self_attn.v_proj.weight": 2 * matrix(kv, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, hidden),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": 2 * matrix(intermediate, hidden),
            prefix + "mlp.up_proj.weight": 2 * matrix(intermediate, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, intermediate),
        }
    tensors["model.norm.weight"] = norm()
    if not tied:
        tensors["lm_head.weight"] = matrix(vocab, hidden) * hidden**0.5
    return tensors


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)  # in the order of the blocks, as real checkpoints are cut
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: tensors[name] for name in held}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_config(
    directory: Path,
    blocks: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
    intermediate: int,
    tied: bool,
    dtype: torch.dtype,
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(config))
    generation = {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(generation))


def _write_tokenizer(directory: Path, vocab: int) -> None:
    """Byte-level BPE: every byte, then whole words of `WORDS` grown letter by letter, then filler."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in WORDS.split():
        grown = "Ġ"
        for letter in word:
            if grown + letter not in tokens and len(tokens) < vocab:
                merges.append((grown, letter))
                tokens.append(grown + letter)
            grown += letter
    tokens += [f"filler{number}" for number in range(vocab - len(tokens))]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def first_blocks(source: Path, directory: Path, blocks: int) -> Path:
    """A model of another's first blocks, with its ends and tokenizer: it guesses well what that one says."""
    shutil.copytree(source, directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": blocks}))
    held = load_file(directory / "model.safetensors")
    kept = {name: value for name, value in held.items() if ".layers." not in name}
    for block in range(blocks):
        kept |= {name: value for name, value in held.items() if f".layers.{block}." in name}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
