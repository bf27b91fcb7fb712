"""What transformers answers to a prompt alone, and whether an answer of ours is that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TIE = 1e-4  # logits closer than this at the top are a tie, and either token is right


class Oracle:
    """transformers in float32. Counts ties, which are to stay below one in a thousand tokens."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.tokens = 0
        self.ties = 0

    def prompt(self, record: dict[str, Any]) -> list[int]:
        if "messages" in record:
            encoded = self.tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True)
            return list(encoded["input_ids"])
        return list(self.tokenizer(record["prompt"]).input_ids)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens, the end token included where it came."""
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def check_greedy(self, prompt: Sequence[int], answer: Sequence[int], max_tokens: int) -> None:
        """Fails unless each token of the answer is the argmax behind those before it, ties aside.

        One pass over prompt and answer, which by induction is what `generate` would have chosen: much
        cheaper than generating. The answer ends where it must: at the first end token, or the limit.
        """
        ids = torch.tensor([[*prompt, *answer]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
        for place, token in enumerate(answer):
            self.tokens += 1
            best = int(logits[place].argmax())
            if token != best:
                gap = float(logits[place, best] - logits[place, token])
                assert gap < TIE, f"token {place} is {token}, transformers has {best}, {gap:.2g} above it"
                self.ties += 1
        ended = [place for place, token in enumerate(answer) if token in self.ends]
        assert ended in ([], [len(answer) - 1])
        assert len(answer) == max_tokens or ended
        assert self.ties <= 1 + self.tokens / 1000
