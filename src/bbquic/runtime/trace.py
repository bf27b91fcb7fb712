"""`--trace`: the run as a Chrome trace, which Perfetto opens: a process a stage, a track a lane.

The file is a JSON array of trace events (the Trace Event Format's "JSON Array Format"), and whole after every
write: its closing bracket is written with each group of events and overwritten by the next. Times are
microseconds on the coordinator's clock since the trace began. What can overlap on a track (arrivals,
sending, flights, whole steps) is a pair of async events, the rest complete events that cannot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from bbquic.errors import ConfigError
from bbquic.runtime.clocks import ClockEstimate, SteadyClock
from bbquic.runtime.limits import COORDINATOR
from bbquic.runtime.observer import Passage
from bbquic.runtime.timing import Mark, StageTiming
from bbquic.units import Bytes, Seconds

COORDINATOR_PROCESS = 1  # stages follow
MOST_BYTES = Bytes(1 << 30)  # no viewer opens more
_GROUP = 200  # events written together
_END = b"\n]\n"
_TOUCH = 5.0  # microseconds: moments are whole ones, so that neighbours on a track may seem to overlap

# track, mark at which its slice begins, mark at which it ends
_LANES = (
    ("decode", Mark.DECODE_BEGAN, Mark.DECODED),
    ("to device", Mark.DECODED, Mark.ON_DEVICE),
    ("compute", Mark.COMPUTE_BEGAN, Mark.COMPUTED),
    ("to host", Mark.COPY_BEGAN, Mark.ON_HOST),
    ("encode", Mark.ON_HOST, Mark.ENCODED),
)
_RECEIVE, _SEND = "receive", "send"
TRACKS = (_RECEIVE, *(name for name, _, _ in _LANES), _SEND)

Event = dict[str, Any]


class TraceWriter:
    """Writes each pack that came around; a `Recorder`. Holds a group of events in memory at most."""

    def __init__(self, path: Path, nodes: Sequence[str], start: Seconds | None = None) -> None:
        """`start` is the trace's time 0 on the coordinator's clock: before any pack leaves. Without it, time 0
        is when the first pack that came around had left. Raises: ConfigError when the file cannot be made."""
        self.path = path
        self.trouble: str | None = None  # why the trace ends before the run
        self._nodes = tuple(nodes)
        self._ids = count(1)
        self._clocks: dict[int, SteadyClock] = {}
        self._followed: dict[int, Seconds] = {}
        self._start = start
        self._pending: list[Event] = []
        self._ended: dict[tuple[int, int], float] = {}  # process and track: where its last slice ends
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write the trace {path}: {error.strerror}") from None
        self._end = 0  # where the next event goes
        self._write(_names(self._nodes), b"[\n")

    def record(self, passage: Passage, clocks: Sequence[ClockEstimate | None]) -> None:
        """Take a pack that came around; one from before all clocks are known is left out."""
        if self._start is None:
            self._start = passage.launch.at
        if self.trouble is not None or None in clocks:
            return
        steady = [self._clock(place, clock) for place, clock in enumerate(clocks) if clock is not None]
        self._pending += self._events(passage, steady)
        if len(self._pending) >= _GROUP:
            self._flush()

    def close(self) -> None:
        """Write what is left. The file was whole before, too."""
        if self._file >= 0:
            self._flush()
            os.close(self._file)
            self._file = -1

    def _clock(self, place: int, estimate: ClockEstimate) -> SteadyClock:
        if place not in self._clocks:
            self._clocks[place] = SteadyClock(estimate)
        elif estimate.at - self._followed[place] > 1:
            self._clocks[place].follow(estimate)
        else:
            return self._clocks[place]
        self._followed[place] = estimate.at
        return self._clocks[place]

    def _events(self, passage: Passage, clocks: Sequence[SteadyClock]) -> list[Event]:
        launch = passage.launch
        name = f"mb {passage.micro_batch} step {passage.step}"
        args = {
            "micro_batch": passage.micro_batch,
            "step": passage.step,
            "rows": launch.rows,
            "tokens": launch.tokens,
        }
        whole = {**args, "answers": passage.answers}
        events = self._pair(COORDINATOR_PROCESS, "step", name, launch.at, passage.came, whole)
        left, source, waited, sent = launch.at, COORDINATOR, 0.0, int(launch.size)
        process = COORDINATOR_PROCESS
        for place, (timing, clock) in enumerate(zip(passage.timings, clocks, strict=True)):
            arrived = clock.ours(Seconds(timing.arrived))
            target = self._nodes[place]
            events += self._flight(process, source, target, name, left + waited, arrived, sent, args)
            process, source = place + 2, target
            events += self._stage(process, timing, clock, name, args)
            left = clock.ours(timing.at(Mark.HANDED))
            waited, sent = timing.to_wire, timing.sent
        return events + self._flight(
            process, source, COORDINATOR, name, left + waited, passage.came, sent, args
        )

    def _stage(
        self, process: int, timing: StageTiming, clock: SteadyClock, name: str, args: Event
    ) -> list[Event]:
        args = {**args, "raw": timing.raw, "sent": timing.sent}
        arrived, delivered = clock.ours(Seconds(timing.arrived)), clock.ours(timing.at(Mark.DELIVERED))
        handed = clock.ours(timing.at(Mark.HANDED))
        events = self._pair(process, _RECEIVE, name, arrived, delivered, args)
        for track, (_, begins, ends) in enumerate(_LANES, start=2):
            began, ended = clock.ours(timing.at(begins)), clock.ours(timing.at(ends))
            if ended > began:
                ts, duration = self._place(process, track, began, ended)
                events.append(
                    {"ph": "X", "pid": process, "tid": track, "ts": ts, "dur": duration, "name": name}
                    | {"cat": TRACKS[track - 1], "args": args}
                )
        return events + self._pair(process, _SEND, name, handed, handed + timing.to_wire, args)

    def _place(self, process: int, track: int, began: float, ended: float) -> tuple[float, float]:
        """Where a slice begins and how long it is, put behind its neighbour where the two seem to touch."""
        ts, end = self._since_start(began), self._since_start(ended)
        before = self._ended.get((process, track), ts)
        if 0 < before - ts < _TOUCH:
            ts, end = before, max(before, end)
        self._ended[process, track] = end
        return ts, round(end - ts, 3)

    def _flight(
        self,
        process: int,
        source: str,
        target: str,
        name: str,
        left: float,
        arrived: float,
        sent: int,
        args: Event,
    ) -> list[Event]:
        kind = f"flight {source} -> {target}"
        return self._pair(process, kind, name, left, max(left, arrived), {**args, "bytes": sent})

    def _pair(
        self, process: int, kind: str, name: str, began: float, ended: float, args: Event
    ) -> list[Event]:
        """Two async events: `kind` is their track, `name` goes into the arguments."""
        common: Event = {"cat": kind, "name": kind, "id": next(self._ids), "pid": process, "tid": 0}
        return [
            {"ph": "b", "ts": self._since_start(began), **common, "args": {"pack": name, **args}},
            {"ph": "e", "ts": self._since_start(max(began, ended)), **common},
        ]

    def _since_start(self, moment: float) -> float:
        assert self._start is not None, "nothing is written before a pack came"
        return round((moment - self._start) * 1e6, 3)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and self.trouble is None:
            self._write(pending, b",\n")

    def _write(self, events: Sequence[Event], before: bytes) -> None:
        """Append events and the closing bracket in one write, so that the file is whole after it."""
        lines = b",\n".join(json.dumps(event, separators=(",", ":")).encode() for event in events)
        try:
            _write_all(self._file, before + lines + _END, self._end)
        except OSError as error:
            self.trouble = f"the trace {self.path} ends early: {error.strerror}"
            with suppress(OSError):  # what was whole before is so again
                _write_all(self._file, _END, self._end)
                os.ftruncate(self._file, self._end + len(_END))
            return
        self._end += len(before) + len(lines)
        if self._end > MOST_BYTES:
            self.trouble = f"the trace {self.path} ends early: it has {MOST_BYTES >> 20} MiB"


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _names(nodes: Sequence[str]) -> list[Event]:
    """Metadata: what processes and tracks are called, and in which order they stand."""
    events = []
    for process, name in enumerate((COORDINATOR, *nodes), start=COORDINATOR_PROCESS):
        events.append(_metadata(process, 0, "process_name", {"name": name}))
        events.append(_metadata(process, 0, "process_sort_index", {"sort_index": process}))
    for place in range(len(nodes)):
        for track, (name, _, _) in enumerate(_LANES, start=2):
            events.append(_metadata(place + 2, track, "thread_name", {"name": name}))
            events.append(_metadata(place + 2, track, "thread_sort_index", {"sort_index": track}))
    return events


def _metadata(process: int, track: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": name, "args": args}
