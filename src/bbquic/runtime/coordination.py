"""What a command and a coordinator on the first stage's node say to each other; types that cannot be wrong.

A command sends COORDINATE for a plan that names the node. The coordinator there attaches itself to all other
stages, and its first PROGRESS says that requests may come. The command has at most `window` of them without
an outcome that it kept, and that is the flow control both ways: neither side ever holds more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct

from bbquic.draft.ngram import NgramDrafter
from bbquic.errors import (
    BBQuicError,
    ConfigError,
    ConnectionLost,
    ModelError,
    PeerRefused,
    PeerUnreachable,
    PlanRefused,
    RemoteProtocolError,
    StageFailed,
    Stalled,
    TransportError,
)
from bbquic.model.sampling import Sampling
from bbquic.runtime.coordinator import CoordinatorOptions
from bbquic.runtime.drafters import ngram_drafter
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.protocol import (
    MAX_TREE,
    JobId,
    Name,
    Natural,
    PlanHeader,
    Positive,
    Text,
    WireSampling,
)
from bbquic.runtime.record import MAX_STOP_LENGTH, MAX_STOPS
from bbquic.runtime.request import Completion, FinishReason, Request, Unanswerable
from bbquic.runtime.scheduler import Scheduler, SchedulerOptions
from bbquic.runtime.speculating import scheduler_of
from bbquic.units import Seconds

GROUP = 64  # requests or outcomes of one message at most
GROUP_BYTES = 1 << 20  # of tokens and text; a larger one travels alone
MOST_HELD = 1 << 16  # slots, and requests read ahead: a coordinator on a node holds no more

Duration = Annotated[float, Meta(gt=0, le=1e7)]  # seconds
TokenIds = Annotated[bytes, Meta(max_length=1 << 24)]  # little-endian int32
Item = TypeVar("Item")


class AttachHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """ATTACH: this connection is the one to the job's coordinator."""

    job: JobId
    epoch: Natural


class AttachedHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """ATTACHED: what the stage has for the coordinator goes there from now on."""

    job: JobId
    epoch: Natural


class CoordinateHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """COORDINATE: run the loop of a job whose plan names you. What is not here, the plan says.

    Raises: ValueError where the window is smaller than what the scheduler is to hold.
    """

    job: JobId
    epoch: Natural
    slots: Annotated[int, Meta(ge=1, le=MOST_HELD)]  # sequences in flight
    start: Annotated[int, Meta(ge=1, le=MOST_HELD)] | None  # micro-batches at first; None: all, for good
    prefill_tokens: Positive
    look_ahead: Annotated[int, Meta(ge=1, le=MOST_HELD)]
    window: Annotated[int, Meta(ge=1, le=3 * MOST_HELD)]  # requests without an outcome that was kept
    ends: Annotated[tuple[Natural, ...], Meta(max_length=1024)]  # tokens that end an answer
    heartbeat: Duration
    slow: Duration
    stall: Duration
    shares_prefixes: bool = True
    drafter: Literal["", "n-grams"] = ""  # what guesses there
    most_guesses: Annotated[int, Meta(ge=0, lt=MAX_TREE)] = 0
    kept_guesses: Annotated[int, Meta(ge=0, lt=MAX_TREE)] | None = None
    always_guesses: bool = False

    def __post_init__(self) -> None:
        if self.window < self.slots + self.look_ahead:  # else both sides would wait for the other
            raise ValueError(f"a window of {self.window} does not fill slots and look-ahead")

    @classmethod
    def of(
        cls,
        plan: PlanHeader,
        work: SchedulerOptions,
        ends: frozenset[int],
        options: CoordinatorOptions,
        drafter: str = "",
    ) -> CoordinateHeader:
        """The window holds what is in flight and read ahead there, and as much again on its way there.

        `drafter`: the name of what guesses. Raises: ConfigError for more than a node holds, and for a drafter
        that it does not have.
        """
        if drafter not in ("", NgramDrafter.name):
            raise ConfigError(
                f"{drafter} cannot draft for a coordinator on a node, which has n-grams alone",
                hint="use --coordinator here, or draft by n-grams",
            )
        if max(work.slots, work.look_ahead) > MOST_HELD:
            raise ConfigError(
                f"a coordinator on a node holds {MOST_HELD} sequences at most",
                hint="use a smaller --batch, or --coordinator here",
            )
        return cls(
            job=plan.job,
            epoch=plan.epoch,
            slots=work.slots,
            start=work.start,
            prefill_tokens=work.prefill_tokens,
            look_ahead=work.look_ahead,
            window=work.slots + 2 * work.look_ahead,
            ends=tuple(sorted(ends)),
            heartbeat=options.heartbeat,
            slow=options.slow,
            stall=options.stall,
            shares_prefixes=work.shares_prefixes,
            drafter="n-grams" if drafter else "",
            most_guesses=work.most_guesses,
            kept_guesses=work.kept_guesses,
            always_guesses=work.always_guesses,
        )

    def work(self, plan: PlanHeader) -> SchedulerOptions:
        """Raises: PlanRefused where the slots do not make the plan's micro-batches."""
        try:
            return SchedulerOptions(
                micro_batches=plan.micro_batches,
                slots=self.slots,
                tiers=plan.tiers,
                prefill_tokens=self.prefill_tokens,
                look_ahead=self.look_ahead,
                depth=plan.depth,
                start=self.start,
                shares_prefixes=self.shares_prefixes,
                most_guesses=self.most_guesses,
                kept_guesses=self.kept_guesses,
                always_guesses=self.always_guesses,
            )
        except ValueError as error:
            raise PlanRefused(f"{plan.coordinator} cannot coordinate job {plan.job}: {error}") from None

    def scheduler(self, plan: PlanHeader) -> Scheduler:
        """One that works so. Raises: PlanRefused as `work` does."""
        drafter = ngram_drafter() if self.drafter else None
        return scheduler_of(self.work(plan), drafter)

    @property
    def options(self) -> CoordinatorOptions:
        return CoordinatorOptions(Seconds(self.heartbeat), Seconds(self.slow), Seconds(self.stall))


class WireRequest(Struct, frozen=True, array_like=True):
    """`request.Request` on the wire."""

    line: Positive
    tokens: Annotated[bytes, Meta(min_length=4, max_length=1 << 24)]  # little-endian int32
    max_tokens: Positive
    sampling: WireSampling | None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)], ...], Meta(max_length=MAX_STOPS)
    ] = ()

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    @classmethod
    def of(cls, request: Request) -> WireRequest:
        sampling = WireSampling.of(request.sampling)
        return cls(request.line, packed(request.tokens), request.max_tokens, sampling, request.stop)

    def plain(self) -> Request:
        sampling = Sampling() if self.sampling is None else self.sampling.plain()
        return Request(self.line, unpacked(self.tokens), self.max_tokens, sampling, self.stop)

    @property
    def weight(self) -> int:
        """Bytes on the wire, about."""
        return len(self.tokens) + sum(map(len, self.stop))


class RequestsHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """REQUESTS: the next ones; numbers rise by one from 0, so that those that overtake can wait their turn.

    Raises: ValueError on a group that is empty and not the last.
    """

    job: JobId
    epoch: Natural
    number: Natural
    requests: Annotated[tuple[WireRequest, ...], Meta(max_length=GROUP)]
    last: bool = False  # no more will come

    def __post_init__(self) -> None:
        if not self.requests and not self.last:
            raise ValueError("a group of no requests is not the last")


class WireCompletion(Struct, frozen=True, array_like=True):
    """`request.Completion` on the wire."""

    line: Positive
    tokens: TokenIds
    text: str
    generated: Positive
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    @classmethod
    def of(cls, one: Completion) -> WireCompletion:
        return cls(one.line, packed(one.tokens), one.text, one.generated, one.finish_reason)

    def plain(self) -> Completion:
        return Completion(self.line, unpacked(self.tokens), self.text, self.generated, self.finish_reason)

    @property
    def weight(self) -> int:
        """Bytes on the wire, about."""
        return len(self.tokens) + len(self.text)


class WireUnanswerable(Struct, frozen=True, array_like=True):
    """`request.Unanswerable` on the wire."""

    line: Positive
    code: Name
    message: Text

    def plain(self) -> Unanswerable:
        return Unanswerable(self.line, self.code, self.message)


class OutcomesHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """OUTCOMES: what became of some requests, each told once. Raises: ValueError when empty."""

    job: JobId
    epoch: Natural
    completions: Annotated[tuple[WireCompletion, ...], Meta(max_length=GROUP)] = ()
    unanswerable: Annotated[tuple[WireUnanswerable, ...], Meta(max_length=GROUP)] = ()

    def __post_init__(self) -> None:
        if not self.completions and not self.unanswerable:
            raise ValueError("a group of no outcomes")


class ProgressHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """PROGRESS: the loop so far, at every heartbeat. The first one asks for requests."""

    job: JobId
    epoch: Natural
    number: Natural  # rises: one that was overtaken is dropped
    statistics: LoopStatistics


class WireError(Struct, frozen=True, forbid_unknown_fields=True):
    """An error of the coordinator's, to be raised again where the command is."""

    kind: Literal[
        "stage_failed", "stalled", "plan_refused", "model", "connection_lost", "unreachable", "peer_refused",
        "protocol", "transport", "other",
    ]  # fmt: skip
    message: Text
    hint: Text | None = None
    node: Text = ""  # of a stage that failed
    code: Text = ""

    @classmethod
    def of(cls, error: BBQuicError) -> WireError:
        kind = next(kind for kind, known in _ERRORS.items() if isinstance(error, known))
        node, code = (error.node, error.code) if isinstance(error, StageFailed) else ("", "")
        hint = None if error.hint is None else error.hint[:4000]
        return cls(kind, error.message[:4000], hint, node[:4000], code[:4000])  # type: ignore[arg-type]

    def error(self) -> BBQuicError:
        if self.kind == "stage_failed":
            return StageFailed(self.message, node=self.node, code=self.code, hint=self.hint)
        return _ERRORS[self.kind](self.message, hint=self.hint)


class EndedHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """ENDED: the loop is over, every outcome was sent, with its last figures; or an error ended it.

    Raises: ValueError unless it is one of the two.
    """

    job: JobId
    epoch: Natural
    statistics: LoopStatistics | None = None
    error: WireError | None = None

    def __post_init__(self) -> None:
        if (self.statistics is None) == (self.error is None):
            raise ValueError("a loop ends with figures or with an error")


_ERRORS: dict[str, type[BBQuicError]] = {  # subclasses first
    "stage_failed": StageFailed,
    "stalled": Stalled,
    "plan_refused": PlanRefused,
    "model": ModelError,
    "connection_lost": ConnectionLost,
    "unreachable": PeerUnreachable,
    "peer_refused": PeerRefused,
    "protocol": RemoteProtocolError,
    "transport": TransportError,
    "other": BBQuicError,
}


def packed(tokens: tuple[int, ...]) -> bytes:
    """Token ids as they travel: little-endian int32."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def grouped(items: Iterable[Item], weight: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items in groups that a message holds: `GROUP` at most and, unless one alone is more, `GROUP_BYTES`."""
    group: list[Item] = []
    size = 0
    for item in items:
        heavy = weight(item)
        if group and (len(group) >= GROUP or size + heavy > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(item)
        size += heavy
    if group:
        yield group


def _check_tokens(data: bytes) -> None:
    if len(data) % 4 or max(data[3::4], default=0) > 127:
        raise ValueError("token ids are not whole numbers of 31 bits")
