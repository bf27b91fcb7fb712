"""A plan as text and as a document. Pure: figures in, lines out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bbquic.cli.figures import duration, milliseconds, printable
from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import COMMAND, Layout
from bbquic.plan.cost import StageMemory
from bbquic.plan.explain import Explanation
from bbquic.plan.guessing import in_words
from bbquic.plan.predict import Prediction
from bbquic.plan.search import Plan
from bbquic.runtime.planning import Question


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan with one thing changed; None where nothing would fit, for `trouble`."""

    change: str
    plan: Plan | None
    trouble: str | None


def plan_lines(
    question: Question,
    plan: Plan,
    explanation: Explanation,
    others: tuple[Alternative, ...] = (),
    *,
    is_assumed: bool = False,
) -> list[str]:
    """The whole of a plan. `is_assumed`: no prompts file was named."""
    model, job = question.model, question.job
    shared = f" ({job.shared:.0f} of them shared)" if job.shared >= 0.5 else ""
    lines = [
        f"{model.name} in {question.dtype}, {model.blocks} blocks, on {len(plan.layout.stages)} of "
        f"{len(question.cluster.nodes)} nodes",
        f"job{' (assumed)' if is_assumed else ''}: {job.sequences:,} sequences, prompts of {job.prompt:.0f} "
        f"tokens{shared}, answers of {job.output:.0f}, {job.longest:.0f} at most",
        "",
        *_stage_lines(question, plan),
        "",
        *_choice_lines(plan.layout),
        *_figure_lines(plan),
        f"limit: {explanation.limit}",
    ]
    lines += [f"  {change}" for change in explanation.changes]
    guessing = in_words(explanation.guessing)
    lines += [guessing] if guessing else []
    lines += [f"left out: {one.node}: {one.reason}" for one in explanation.left_out]
    lines += [f"note: {note}" for note in question.notes]
    lines += [_other_line(other, plan) for other in others]
    return [printable(line) for line in lines]


def _stage_lines(question: Question, plan: Plan) -> list[str]:
    width = max(len(stage.node) for stage in plan.layout.stages)
    lines = []
    for stage, held in zip(plan.layout.stages, plan.memory, strict=True):
        node = question.cluster.node(stage.node)
        offloaded = ""
        if stage.offloaded:
            alpha = stage.offloaded / plan.layout.batch
            offloaded = (
                f"; KV of {stage.offloaded} sequences (α {alpha:.2f}) on the host, {_gb(held.host_kv)}"
            )
        lines.append(
            f"  {stage.node:{width}}  blocks {stage.first}-{stage.stop - 1}: {_memory(held)} of "
            f"{_gb(node.memory)} free{offloaded}"
        )
    return lines


def _memory(held: StageMemory) -> str:
    other = held.workspace + held.buffers
    return f"weights {_gb(held.weights)}, KV {_gb(held.kv)}, buffers {_gb(other)}"


def _choice_lines(layout: Layout) -> list[str]:
    where = "in the command's process" if layout.coordinator == COMMAND else f"on {layout.coordinator}"
    packs = "1 micro-batch" if layout.micro_batches == 1 else f"{layout.micro_batches} micro-batches"
    lines = [f"{layout.batch} sequences in flight, in {packs}; the coordinator {where}"]
    hops = zip(layout.nodes, layout.nodes[1:], layout.ways, strict=False)
    coded = [f"{source} -> {target} {way}" for source, target, way in hops if way is not Way.RAW]
    if coded:
        lines.append(f"compression expected to pay: {', '.join(coded)}")
    return lines


def _figure_lines(plan: Plan) -> list[str]:
    prediction = plan.prediction
    lines = [
        f"predicted: {prediction.tokens_per_second:.1f} tokens/s generated, a step of "
        f"{milliseconds(prediction.step)}, the job in {duration(prediction.job_time)}"
    ]
    if plan.cost is not None:
        lines.append(f"price: {plan.cost:.2f} dollars a million generated tokens")
    return lines


def _other_line(other: Alternative, plan: Plan) -> str:
    if other.plan is None:
        return f"with {other.change}: {other.trouble}"
    now, then = plan.prediction, other.plan.prediction
    stages = ", ".join(f"{stage.node} {stage.blocks}" for stage in other.plan.layout.stages)
    return (
        f"with {other.change}: {then.tokens_per_second:.1f} tokens/s, the job in "
        f"{duration(then.job_time)} ({then.job_time / now.job_time:.2f} of the time); blocks {stages}"
    )


def plan_document(
    question: Question, plan: Plan, explanation: Explanation, others: tuple[Alternative, ...] = ()
) -> dict[str, Any]:
    """The same for programs: seconds, bytes, bytes a second. What is infinite is null."""
    return {
        "model": question.model.name,
        "dtype": question.dtype,
        "job": asdict(question.job),
        "plan": _plan_document(plan),
        "limit": explanation.limit,
        "changes": [{"what": one.what, "ratio": _finite(one.ratio)} for one in explanation.changes],
        "guessing": [asdict(one) for one in explanation.guessing],
        "left_out": [
            {"node": one.node, "ratio": _finite(one.ratio), "reason": one.reason}
            for one in explanation.left_out
        ],
        "links": [
            {"from": a, "to": b, "rate": link.rate, "delay": link.delay, "loss": link.loss}
            for (a, b), link in question.cluster.links.items()
        ],
        "notes": list(question.notes),
        "what_if": [
            {
                "change": other.change,
                "plan": None if other.plan is None else _plan_document(other.plan),
                "trouble": other.trouble,
            }
            for other in others
        ],
    }


def _plan_document(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "stages": [
            {**asdict(stage), "alpha": stage.offloaded / layout.batch, "memory": asdict(held)}
            for stage, held in zip(layout.stages, plan.memory, strict=True)
        ],
        "batch": layout.batch,
        "micro_batches": layout.micro_batches,
        "codecs": [way.value for way in layout.ways],
        "coordinator": None if layout.coordinator == COMMAND else layout.coordinator,
        "left_out": list(plan.left_out),
        "dollars_per_million_tokens": plan.cost,
        "predicted": _prediction(plan.prediction),
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "step": _finite(prediction.step),
        "cycle": _finite(prediction.cycle),
        "loop": _finite(prediction.loop),
        "tokens_per_second": prediction.tokens_per_second,
        "job_time": _finite(prediction.job_time),
        "limit": str(prediction.limit),
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
