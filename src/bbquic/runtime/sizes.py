"""A model and a job in the planner's figures: from a manifest and a prompts file, without loading torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import msgspec

from bbquic.errors import RecordError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.model.shape import BYTES_PER_VALUE, kv_shape
from bbquic.plan.cluster import JobShape, ModelSizes
from bbquic.plan.speculation import tree_room
from bbquic.runtime.job import JobFile
from bbquic.runtime.lines import split_lines
from bbquic.runtime.prefixes import shared_beginnings
from bbquic.runtime.ranges import aligned
from bbquic.runtime.record import Record
from bbquic.runtime.resume import MAX_RECORD
from bbquic.runtime.source import PromptTokenizer
from bbquic.units import Bytes

SAMPLE = 256  # lines that are tokenised: a mean of so many is good to a few percent
LONG = 0.9  # share of the lines that a slot has room for; those beyond wait for a range of their own length


def with_trees(shape: JobShape, guesses: int) -> JobShape:
    """The same job, whose slots have room for trees of so many guesses."""
    return replace(shape, slot=aligned(shape.slot + tree_room(guesses)))


def model_sizes(directory: ModelDirectory, manifest: Manifest, dtype: str) -> ModelSizes:
    """A model's sizes when it runs in `dtype`; `manifest` is whole. Raises: KeyError on an unknown dtype."""
    width = BYTES_PER_VALUE[dtype]
    spec = directory.spec
    elements = {name: tensor.elements for name, tensor in manifest.tensors.items()}
    embed, head = spec.weights.embed, head_tensor(directory, manifest)
    prefix = spec.block_prefix(0)
    return replace(
        shape_sizes(directory, dtype),
        block_weights=Bytes(width * sum(n for name, n in elements.items() if name.startswith(prefix))),
        embed_weights=Bytes(width * elements[embed]),
        head_weights=Bytes(width * (elements[head] + elements[spec.weights.norm])),
        tied=head == embed,
    )


def shape_sizes(directory: ModelDirectory, dtype: str) -> ModelSizes:
    """The same but for the weights, which are 0: it takes no manifest."""
    width, fields = BYTES_PER_VALUE[dtype], directory.fields
    kv_heads, head_dim = kv_shape(fields)
    nothing = Bytes(0)
    return ModelSizes(
        name=directory.name,
        blocks=directory.blocks,
        hidden=int(fields["hidden_size"]),
        intermediate=int(fields["intermediate_size"]),
        vocabulary=int(fields["vocab_size"]),
        value_bytes=width,
        block_weights=nothing,
        embed_weights=nothing,
        head_weights=nothing,
        kv_bytes=Bytes(2 * kv_heads * head_dim * width),
    )


def head_tensor(directory: ModelDirectory, manifest: Manifest) -> str:
    """The head's tensor; a tied one is the embedding's."""
    names = directory.spec.weights
    tied = directory.fields.get("tie_word_embeddings") or names.head not in manifest.tensors
    return names.embed if tied else names.head


def job_shape(
    job: JobFile,
    tokenizer: PromptTokenizer,
    context_length: int,
    *,
    answers: Path | None = None,
    sample: int = SAMPLE,
) -> JobShape | None:
    """What is still to be done of a job, by some of its lines, evenly spread.

    An answer counts as long as its limit, until `answers`, of a run that is resumed, shows how long they are.
    None where no line of those looked at can be answered. Raises: JobError where the prompts cannot be read.
    """
    lines = job.count()
    found = list(_prompts(job.sample(sample), tokenizer, context_length))
    if not found:
        return None
    lengths = [(len(prompt), limit) for prompt, limit in found]
    done, generated = _answered(answers)
    limits = [limit for _, limit in lengths]
    longest = max(limits)
    output = min(generated, longest) if generated is not None else fmean(limits)
    needs = sorted(prompt + limit for prompt, limit in lengths)
    return JobShape(
        sequences=max(1, lines - done),
        prompt=fmean(prompt for prompt, _ in lengths),
        shared=fmean(shared_beginnings([prompt for prompt, _ in found])),
        output=max(1.0, output),
        longest=float(longest),
        slot=aligned(needs[min(len(needs) - 1, int(LONG * len(needs)))]),
    )


def _prompts(
    records: Sequence[Record], tokenizer: PromptTokenizer, context_length: int
) -> Iterator[tuple[Sequence[int], int]]:
    """The tokens of the prompt, and how many the answer has at most, of each record that has an answer."""
    for record in records:
        try:
            if record.messages is not None:
                tokens = tokenizer.encode_chat([asdict(message) for message in record.messages])
            else:
                tokens = tokenizer.encode(record.prompt or "")
        except RecordError:
            continue
        if 0 < len(tokens) < context_length:
            yield tokens, min(record.max_tokens, context_length - len(tokens))


class _Answered(msgspec.Struct):
    """Of an answer, what its length is."""

    completion_tokens: int | None = None


def _answered(path: Path | None) -> tuple[int, float | None]:
    """Lines that an answers file has, and the mean answer in tokens; whoever opens it for writing complains
    of what is wrong with it."""
    if path is None or not path.is_file():
        return 0, None
    count, lengths = 0, []
    decoder = msgspec.json.Decoder(_Answered)
    try:
        with path.open("rb") as stream:
            for line in split_lines(stream, MAX_RECORD):
                try:
                    record = decoder.decode(line.raw or b"")
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue
                count += 1
                if record.completion_tokens is not None:
                    lengths.append(record.completion_tokens)
    except OSError:
        return 0, None
    return count, fmean(lengths) if lengths else None
