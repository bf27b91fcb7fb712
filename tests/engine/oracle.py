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

    def check_generated(self, record: dict[str, Any], answer: dict[str, Any]) -> None:
        """Fails unless an answer's record is what `generate` gives for its prompt alone."""
        expected = self.generate(self.prompt(record), record["max_tokens"])
        assert answer["text"] == self.tokenizer.decode(expected, skip_special_tokens=True)
        assert answer["completion_tokens"] == len(expected)

    def check_answer(self, record: dict[str, Any], answer: dict[str, Any]) -> None:
        """The same, by one pass of the model where the text's tokens can be read back: much cheaper.

        What that pass does not confirm is generated, since a text can be written in other tokens too.
        """
        prompt = self.prompt(record)
        assert answer["prompt_tokens"] == len(prompt)
        tokens = list(self.tokenizer(answer["text"]).input_ids)
        ends = len(tokens) == answer["completion_tokens"] - 1
        whole = ends or len(tokens) == answer["completion_tokens"] == record["max_tokens"]
        if not whole or not self.is_greedy(prompt, tokens, ends=ends):
            self.check_generated(record, answer)

    @torch.inference_mode()
    def is_greedy(self, prompt: Sequence[int], answer: Sequence[int], *, ends: bool) -> bool:
        """Whether each token is what `generate` would have chosen, ties aside, by induction.

        With `ends`, an end token comes next. Raises: AssertionError when ties come too often.
        """
        logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :]
        ties = 0
        for place, token in enumerate(answer):
            best = int(logits[place].argmax())
            if token != best:
                if float(logits[place, best] - logits[place, token]) >= TIE:
                    return False
                ties += 1
        self.tokens += len(answer)
        self.ties += ties
        assert self.ties <= 1 + self.tokens / 1000
        return not ends or int(logits[len(answer)].argmax()) in self.ends
