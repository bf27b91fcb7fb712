"""What a beginning that all prompts share saves, on two local nodes with the real model: see `bench.kv`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bbquic.model.directory import ModelDirectory
from bbquic.model.fetch import fetch_model
from bbquic.model.manifest import manifest_of
from bbquic.model.registry import user_cache
from bbquic.runtime.generate import RunModel
from bbquic.runtime.layout import LayoutOptions
from bbquic.runtime.local import LocalTurns, local_nodes
from bbquic.runtime.memory import host_memory_free
from bbquic.transport.channel import Role
from bbquic.transport.threaded import open_endpoint
from bbquic.units import Bytes
from bench.generate import MODEL, TEXT, Nodes

OWN = 24  # tokens of a prompt behind what all share
NODES = 2


@dataclass(frozen=True, slots=True)
class Prefill:
    """One run with a single token an answer, which is nearly all prefill."""

    seconds: float
    sent: int  # bytes of messages over all hops
    shared: int  # tokens that were copied


def prompts_of(directory: ModelDirectory, count: int, shared: int) -> list[list[int]]:
    """`shared` tokens that are alike, and OWN that begin differently."""
    tokens = directory.tokenizer.encode(TEXT * (1 + (shared + OWN) // 8))
    return [[*tokens[:shared], 1000 + line, *tokens[: OWN - 1]] for line in range(count)]


async def prefills(count: int, shared: int, rounds: int) -> tuple[list[Prefill], list[Prefill]]:
    """With sharing and without, in turns; a few prompts before, which are not counted, bring the nodes up."""
    directory = fetch_model(MODEL, user_cache(), print)
    prompts = prompts_of(directory, count, shared)
    turns = LocalTurns.of(None, nodes=NODES, cores=1)
    layout = LayoutOptions(batch=count, micro_batches=turns.micro_batches, depth=turns.depth, dtype="float32")
    memory = Bytes(int(0.5 * host_memory_free()) // NODES)
    found: dict[bool, list[Prefill]] = {True: [], False: []}
    async with local_nodes(NODES, models=[], turns=turns, memory=memory) as local:
        endpoint = await open_endpoint(local.identity, local.peers, Role.COMMAND, host="127.0.0.1")
        model = RunModel(directory, manifest_of(directory))
        for number in range(rounds + 1):
            for shares in (True, False):
                nodes = Nodes(endpoint, local, model, layout, shares=shares)
                one = await _prefill(nodes, prompts if number else prompts[:4])
                found[shares] += [one] if number else []
        await endpoint.close()
    return found[True], found[False]


async def _prefill(nodes: Nodes, prompts: Sequence[Sequence[int]]) -> Prefill:
    seconds = await nodes.run(prompts, 1)
    assert nodes.statistics is not None
    sent = sum(hop.sent for hop in nodes.statistics.sums.hops)
    return Prefill(seconds, sent, nodes.statistics.shared_tokens)


def run(count: int, shared: int, rounds: int) -> tuple[list[Prefill], list[Prefill]]:
    return asyncio.run(prefills(count, shared, rounds))
