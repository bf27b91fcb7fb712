"""`bbquic plan`: what a run would be on this cluster, why, and what would change it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bbquic.cli.cluster import joined
from bbquic.cli.draw_plan import Alternative, plan_document, plan_lines
from bbquic.cli.generate import DEFAULT_MODEL, open_model, planning_options
from bbquic.cli.render import print_note
from bbquic.errors import BBQuicError, ConfigError, JobError
from bbquic.plan.cluster import Cluster, JobShape
from bbquic.plan.cost import MemoryOptions
from bbquic.plan.whatif import with_link_rate, with_node, without
from bbquic.runtime.cluster import ClusterDeadlines, describe_all, dialled
from bbquic.runtime.drafters import GUESSES
from bbquic.runtime.generate import RunModel
from bbquic.runtime.hop import CodecMode
from bbquic.runtime.job import JobFile
from bbquic.runtime.layout import CoordinatorPlace, LayoutOptions
from bbquic.runtime.planning import USUAL_JOB, PlanningOptions, Question, ask, best_plan
from bbquic.runtime.protocol import MAX_TREE
from bbquic.runtime.record import Defaults
from bbquic.runtime.sizes import job_shape, with_trees
from bbquic.runtime.survey import SurveyOptions
from bbquic.units import BytesPerSecond

WHAT_IF_HINT = "link=home-a:cloud-b:200 (Mbit/s), without=home-a, or add=home-a (one more machine like it)"

Changed = Callable[[Cluster], Cluster]


def plan(
    peers: Annotated[Path, typer.Option(help="The cluster's peers.toml.")] = Path("peers.toml"),
    model: Annotated[str, typer.Option(help="A known model's name, or a directory.")] = DEFAULT_MODEL,
    job: Annotated[
        Path | None, typer.Option(help="The prompts file to plan for. Default: 256 prompts of usual length.")
    ] = None,
    certs: Annotated[Path, typer.Option(help="Where this machine's key lies.")] = Path("certs"),
    key: Annotated[Path | None, typer.Option(help="Which key, where several here are pinned.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Names from peers.toml, a,b,c: all of them, in this order.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in flight. Default: the best.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Default: the best number.")] = None,
    offload: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of every stage's sequences whose KV is in host memory. Default: the least that fits.",
        ),
    ] = None,
    codec: Annotated[CodecMode, typer.Option(help="What hops may use.")] = CodecMode.AUTO,
    coordinator: Annotated[
        CoordinatorPlace,
        typer.Option(help="In this process, on the first stage's node, or where it is best."),
    ] = CoordinatorPlace.AUTO,
    guesses: Annotated[
        int, typer.Option(min=0, max=MAX_TREE - 1, help="Guesses for a sequence and step at most; 0: none.")
    ] = GUESSES,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="For lines that do not say.")] = 256,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help=f"Plan with one thing changed, too: {WHAT_IF_HINT}; may be repeated."),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Measure nodes and links anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure a cluster and say how a job would run: where, how fast, what limits it. Nothing is run."""
    changes = [(text, parse_what_if(text)) for text in what_if or ()]
    memory = MemoryOptions(offload=offload, guesses=guesses)
    layout = LayoutOptions(codec=codec, coordinator=coordinator, dtype=dtype, memory=memory)
    names = tuple(nodes.split(",")) if nodes else ()
    options = planning_options(layout, batch, microbatches, names)
    options = replace(options, survey=SurveyOptions(fresh=fresh))
    held = open_model(model)
    shape = with_trees(USUAL_JOB if job is None else _shape(job, held, max_tokens), guesses)
    question = asyncio.run(_ask(peers, certs, key, names, held, shape, layout, options))
    chosen = asyncio.run(best_plan(question))
    explanation = question.explain(chosen)
    others = tuple(alternative(text, change, question) for text, change in changes)
    if as_json:
        typer.echo(json.dumps(plan_document(question, chosen, explanation, others), indent=2))
        return
    for line in plan_lines(question, chosen, explanation, others, is_assumed=job is None):
        typer.echo(line)


def _shape(path: Path, model: RunModel, max_tokens: int) -> JobShape:
    directory = model.directory
    job = JobFile(path, Defaults(max_tokens=max_tokens))
    shape = job_shape(job, directory.tokenizer, directory.context_length)
    if shape is None:
        raise JobError(f"{path} has no line that can be answered, of those looked at")
    return shape


async def _ask(
    peers: Path,
    certs: Path,
    key: Path | None,
    names: tuple[str, ...],
    model: RunModel,
    job: JobShape,
    layout: LayoutOptions,
    options: PlanningOptions,
) -> Question:
    deadlines = ClusterDeadlines()
    async with joined(peers, certs, key, names) as found:
        options = replace(options, prices=found.prices, host=found.host)
        known = {peer.name: peer for peer in found.nodes}
        optional = None if names else print_note
        async with dialled(found.endpoint, found.nodes, deadlines, optional) as channels:
            return await ask(
                channels,
                [known[channel.peer.name] for channel in channels],
                await describe_all(channels, deadlines),
                model.directory,
                model.manifest,
                job,
                options,
                dtype=layout.dtype,
                report=print_note,
            )


def parse_what_if(text: str) -> Changed:
    """`link=a:b:200`, `without=a` or `add=a`, as what it does to a cluster. Raises: ConfigError."""
    kind, _, value = text.partition("=")
    if kind == "link":
        source, _, rest = value.partition(":")
        target, _, number = rest.partition(":")
        try:
            rate = BytesPerSecond(float(number) * 1e6 / 8)
        except ValueError:
            rate = BytesPerSecond(0.0)
        if source and target and 0 < rate < float("inf"):
            return lambda cluster: with_link_rate(cluster, source, target, rate)
    elif kind == "without" and value:
        return lambda cluster: without(cluster, value)
    elif kind == "add" and value:
        return lambda cluster: _one_more(cluster, value)
    raise ConfigError(f"{text!r} is not a change to plan with", hint=WHAT_IF_HINT)


def _one_more(cluster: Cluster, name: str) -> Cluster:
    """Another machine like one that is there, with links like its; between the two, its slowest ones'."""
    like = next((node for node in cluster.nodes if node.name == name), None)
    if like is None:
        raise ConfigError(f"there is no node {name} to add another one like")
    other = f"{name}-2"
    swap = {name: other}
    links = {
        (swap.get(a, a), swap.get(b, b)): link for (a, b), link in cluster.links.items() if name in (a, b)
    }
    between = min(
        (link for pair, link in cluster.links.items() if name in pair),
        key=lambda link: link.rate,
        default=None,
    )
    if between is not None:
        links |= {(name, other): between, (other, name): between}
    return with_node(cluster, replace(like, name=other), links)


def alternative(text: str, change: Changed, question: Question) -> Alternative:
    """The plan of the changed cluster; where there is none, the reason."""
    try:
        changed = replace(question, cluster=change(question.cluster))
        return Alternative(text, changed.answer(), None)
    except BBQuicError as error:
        return Alternative(text, None, error.message)
