"""What tests of a coordinator on the first stage's node share."""

from __future__ import annotations

from typing import Any

from engine_helpers import options

from bbquic.runtime.coordination import (
    AttachHeader,
    CoordinateHeader,
    EndedHeader,
    OutcomesHeader,
    ProgressHeader,
    RequestsHeader,
    WireCompletion,
    WireError,
    WireRequest,
    WireUnanswerable,
)
from bbquic.runtime.generate import RunOptions
from bbquic.runtime.layout import CoordinatorPlace
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.protocol import Stage, WireSampling
from bbquic.runtime.telemetry import FirstTokens
from bbquic.transport.message import Kind, encode_header
from bbquic.units import Seconds

JOB = "0123456789abcdef"
STAGES = (Stage("node-1", 0, 2), Stage("node-2", 2, 4))


def at_stage(**layout: Any) -> RunOptions:
    """As `options`, the coordinator on the first stage's node."""
    return options(coordinator=CoordinatorPlace.STAGE, **layout)


def a_request(line: int, tokens: int = 2) -> WireRequest:
    sampling = WireSampling(0.5, 0.9, 3, 2**60)
    return WireRequest(line, b"\1\0\0\0" * tokens, 8, sampling, ("stop",))


def coordinate(job: str = JOB, **changes: Any) -> CoordinateHeader:
    fields = {
        "slots": 2, "start": 1, "prefill_tokens": 8, "look_ahead": 2, "window": 6, "ends": (2,),
        "heartbeat": 0.05, "slow": 5.0, "stall": 60.0,
    }  # fmt: skip
    return CoordinateHeader(job, 0, **(fields | changes))  # type: ignore[arg-type]


def progress(number: int = 1, job: str = JOB) -> ProgressHeader:
    statistics = LoopStatistics.none(STAGES)
    return ProgressHeader(job, 0, number, statistics)


def ended(error: WireError | None = None) -> EndedHeader:
    if error is not None:
        return EndedHeader(JOB, 0, error=error)
    first = FirstTokens(3, Seconds(0.25), Seconds(0.5))
    none = LoopStatistics.none(STAGES)
    return EndedHeader(JOB, 0, LoopStatistics(none.stages, none.sums, first_tokens=first))


def outcomes(*lines: int) -> OutcomesHeader:
    completion = tuple(WireCompletion(line, b"\5\0\0\0", "ü", 2, "stop") for line in lines)
    return OutcomesHeader(JOB, 0, completion)


TO_NODES: list[tuple[Kind, bytes]] = [
    (Kind.COORDINATE, encode_header(coordinate())),
    (Kind.REQUESTS, encode_header(RequestsHeader(JOB, 0, 0, (a_request(1), a_request(2)), True))),
    (Kind.ATTACH, encode_header(AttachHeader(JOB, 0))),
]
TO_COMMANDS: list[tuple[Kind, bytes]] = [
    (Kind.PROGRESS, encode_header(progress())),
    (Kind.OUTCOMES, encode_header(outcomes(1, 2))),
    (
        Kind.OUTCOMES,
        encode_header(OutcomesHeader(JOB, 0, unanswerable=(WireUnanswerable(3, "does_not_fit", "no"),))),
    ),
    (Kind.ENDED, encode_header(ended())),
    (Kind.ENDED, encode_header(ended(WireError("stage_failed", "it burnt", None, "node-2", "fire")))),
]
