"""What a pass commits with a draft: trees of the real drafter along what the target says, without a network.

`python -m bench.drafts [--draft DIR] [--prompts FILE,...] [--count 32] [--tokens 128] [--quick] [--bars]`

The target's greedy answers are computed once and kept in `--cache`. METHODOLOGY.md says what the
figures mean.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from bbquic.draft.distill.corpus import read_corpus
from bbquic.draft.distill.teacher import Teacher
from bbquic.draft.drafter import Ask, Drafter
from bbquic.draft.load import load_drafter
from bbquic.draft.ngram import NgramDrafter
from bbquic.draft.small import ModelDrafterOptions
from bbquic.draft.tree import DraftTree
from bbquic.draft.verify import verify
from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import manifest_of
from bbquic.model.registry import KNOWN, resolve_model, user_cache
from bbquic.model.sampling import Sampling
from bbquic.runtime.memory import host_memory_free
from bench.common import append_result, print_bars

MODEL = "smollm2-135m"
PROMPTS = Path(__file__).parent / "data" / "held_out_prompts.jsonl"
CONTEXT = 512  # tokens of a prompt at most, the newest
CHAIN = 3
TREES = (8, 16, 32)
TOGETHER = 16  # prompts that the target answers at once


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's tokens and what the target says greedily behind them."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """Passes behind each answer's first token, what they committed, and the guesses they carried."""

    passes: int
    committed: int
    guesses: int

    @property
    def per_pass(self) -> float:
        """1 where every answer came with its prompt."""
        return self.committed / self.passes if self.passes else 1.0


def answers(
    target: ModelDirectory, files: Sequence[Path], count: int, tokens: int, cache: Path
) -> list[Answered]:
    """The first `count` prompts of each file and the target's answers, from `cache` where it has them."""
    prompts = [
        passage.tokens
        for file in files
        for passage in read_corpus(file, target.tokenizer, prompt_tokens=CONTEXT, text_tokens=CONTEXT)[:count]
        if passage.is_prompt
    ]
    key = hashlib.sha256(repr((manifest_of(target).digest, tokens, prompts)).encode()).hexdigest()[:24]
    kept = cache / f"{key}.json"
    if kept.is_file():
        return msgspec.json.decode(kept.read_bytes(), type=list[Answered])
    teacher = Teacher(target)
    found = []
    for start in range(0, len(prompts), TOGETHER):
        group = prompts[start : start + TOGETHER]
        for prompt, lesson in zip(group, teacher.lessons(group, tokens), strict=True):
            found.append(Answered(prompt, tuple(lesson.tokens[len(prompt) :].tolist())))
        print(f"answered {len(found)} of {len(prompts)}", file=sys.stderr, flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(msgspec.json.encode(found))
    return found


def tree_of(drafter: Drafter, asks: Sequence[Ask]) -> list[DraftTree]:
    return drafter.draft(asks)


def chain_of(drafter: Drafter, asks: Sequence[Ask]) -> list[DraftTree]:
    """The likeliest next token, and the likeliest behind it, as far as an ask's guesses go."""
    paths: list[list[int]] = [[] for _ in asks]
    weights: list[list[float]] = [[1.0] for _ in asks]
    for _ in range(max(ask.guesses for ask in asks)):
        longer = [
            Ask(ask.key, [*ask.tokens, *path], ask.sampling, 1, 1)
            for ask, path in zip(asks, paths, strict=True)
        ]
        for place, tree in enumerate(drafter.draft(longer)):
            if tree.guesses and len(weights[place]) == len(paths[place]) + 1:
                paths[place].append(tree.tokens[1])
                weights[place].append(weights[place][-1] * tree.weights[1])
    return [
        DraftTree((ask.tokens[-1], *path), (0, *range(len(path))), tuple(weight))
        for ask, path, weight in zip(asks, paths, weights, strict=True)
    ]


def walk(drafter: Drafter, answered: Sequence[Answered], guesses: int, *, chain: bool = False) -> Walk:
    """All answers side by side, pass after pass, as a run with one micro-batch would; the drafter learns."""
    at = {
        key: 1 for key, one in enumerate(answered) if len(one.answer) > 1
    }  # the first comes with the prompt
    passes = committed = carried = 0
    drafts = chain_of if chain else tree_of
    while at:
        asks = [
            Ask(key, [*answered[key].prompt, *answered[key].answer[:place]], Sampling(), guesses, guesses)
            for key, place in at.items()
        ]
        for ask, tree in zip(asks, drafts(drafter, asks), strict=True):
            answer, place = answered[ask.key].answer, at[ask.key]
            nodes = range(len(tree.tokens))
            chosen = partial(_said, answer, place, tree.depths)
            verdict = verify(nodes, tree.parents, tree.tokens, chosen)
            said = min(len(verdict.tokens), len(answer) - place)
            drafter.learn(ask.key, tree, verdict.path)
            passes, committed, carried = passes + 1, committed + said, carried + tree.guesses
            at[ask.key] += said
            if at[ask.key] == len(answer):
                del at[ask.key]
                drafter.forget(ask.key)
    return Walk(passes, committed, carried)


def _said(answer: Sequence[int], place: int, depths: Sequence[int], node: int) -> int:
    """What the target chooses behind a node; behind the answer's end something that no guess is."""
    at = place + depths[node]
    return answer[at] if at < len(answer) else -1


def measure(name: str, drafter: Drafter, answered: Sequence[Answered], *, quick: bool) -> dict[str, float]:
    """Tokens per pass by shape. Each shape begins with a drafter that has learnt from those before it."""
    measured = {}
    chains = [] if drafter.is_instant else [CHAIN]  # n-grams keep no account of tokens that are taken back
    shapes = [*((count, True) for count in chains), *((count, False) for count in TREES)]
    for guesses, chain in shapes[:2] if quick else shapes:
        found = walk(drafter, answered, guesses, chain=chain)
        shape = f"chain_{guesses}" if chain else f"tree_{guesses}"
        measured[f"{name}_{shape}"] = found.per_pass
        each = found.guesses / max(1, found.passes)
        print(
            f"{name} {shape}: {found.per_pass:.3f} tokens a pass, {each:.1f} guesses each, over "
            f"{found.committed:,} tokens",
            flush=True,
        )
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.drafts", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="the target")
    parser.add_argument("--draft", help="a draft model's directory; without, n-grams alone")
    parser.add_argument("--prompts", default=str(PROMPTS), help="files of prompts: a,b")
    parser.add_argument("--count", type=int, default=32, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--cache", type=Path, help="where answers are kept")
    parser.add_argument("--quick", action="store_true", help="four short answers: does it start?")
    parser.add_argument("--bars", action="store_true", help="check against bench/bars.toml; exit 1 if short")
    args = parser.parse_args(argv)
    if args.model in KNOWN:
        fetch_model(args.model, user_cache(), partial(print, file=sys.stderr))
    target = resolve_model(args.model, user_cache())
    count, tokens = (4, 12) if args.quick else (args.count, args.tokens)
    files = [Path(file) for file in args.prompts.split(",")]
    answered = answers(target, files, count, tokens, args.cache or user_cache() / "bench_drafts")
    measured = measure("ngram", NgramDrafter(), answered, quick=args.quick)
    if args.draft is not None:
        draft = resolve_model(args.draft, user_cache())
        drafter = load_drafter(draft, target, ModelDrafterOptions(), free=host_memory_free())
        measured |= measure("draft", drafter, answered, quick=args.quick)
    if not args.quick:
        names = [file.name for file in files]
        append_result("drafts", {"measured": measured, "prompts": names, "count": count, "tokens": tokens})
    return 0 if not args.bars or print_bars("drafts", measured) else 1


if __name__ == "__main__":
    sys.exit(main())
