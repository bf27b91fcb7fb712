"""Puts together what a run tells about itself: one frozen snapshot a look."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bbquic.runtime.accounting import Loop, LoopSums, is_known
from bbquic.runtime.coordinator import JobLoop
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.limits import (
    COORDINATOR,
    DRAFTER,
    Cause,
    Load,
    believed_rate,
    hop_names,
    limit_of,
    link_load,
    stage_loads,
)
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.source import RecordSource
from bbquic.runtime.telemetry import (
    HopStatistics,
    JobStatistics,
    RateMeter,
    StageStatistics,
    Window,
    remaining_time,
)
from bbquic.runtime.timing import Hop
from bbquic.units import Bytes, BytesPerSecond, Seconds

WINDOW = Seconds(20.0)  # "lately"


class Monitor:
    """Reads the source's counters and the coordinator's; owns the clocks and the sliding windows."""

    def __init__(self, source: RecordSource, loop: JobLoop, *, total: int | None) -> None:
        self._source = source
        self._loop = loop
        self._total = total
        self._start = self._now()
        self._prompt = RateMeter(WINDOW, start=self._start)
        self._generated = RateMeter(WINDOW, start=self._start)
        self._seen = (0, 0)
        self._none = _Sums(LoopSums.none(len(loop.statistics().stages)), Seconds(0.0), Drafts())
        self._window = Window(WINDOW, self._start, self._none)

    def snapshot(self) -> JobStatistics:
        """The job as it is, "lately" being the last `WINDOW`."""
        now, seen = self._now(), self._loop.statistics()
        self._window.add(now, _Sums(seen.sums, Seconds(seen.spent), seen.drafts))
        return self._snapshot(now, seen, *self._window.before)

    def whole_run(self) -> JobStatistics:
        """The same with everything since the start as "lately": what a run leaves to say when it ends."""
        return self._snapshot(self._now(), self._loop.statistics(), self._start, self._none)

    def _snapshot(self, now: Seconds, seen: LoopStatistics, since: Seconds, before: _Sums) -> JobStatistics:
        source = self._source
        prompt, generated = seen.prompt_tokens, seen.generated_tokens
        sent = prompt - seen.shared_tokens
        self._prompt.add(now, sent - self._seen[0])
        self._generated.add(now, generated - self._seen[1])
        self._seen = (sent, generated)
        decode = self._generated.rate(now)
        read = self._prompt.rate(now)
        failed = sum(source.failures.values())
        elapsed = Seconds(now - self._start)
        settled = source.done + failed
        left = None if self._total is None else self._total - settled - source.skipped
        change = _Sums(
            seen.sums.since(before.loop), Seconds(seen.spent - before.spent), seen.drafts.since(before.drafts)
        )
        lately = _Lately(seen, Seconds(now - since), change)
        return JobStatistics(
            done=source.done,
            failed=failed,
            skipped=source.skipped,
            total=self._total,
            prompt_tokens=prompt,
            shared_tokens=seen.shared_tokens,
            generated_tokens=generated,
            tokens_per_second=None if decode is None or read is None else decode + read,
            decode_tokens_per_second=decode,
            in_flight_sequences=seen.in_flight_sequences,
            elapsed=elapsed,
            eta=None if left is None else remaining_time(settled, left, elapsed),
            waiting_for=seen.waiting_for,
            failures=tuple(sorted(source.failures.items())),
            hops=lately.hops(),
            stages=lately.stages(),
            loop=lately.loop,
            first_tokens=seen.first_tokens,
            drafts=change.drafts if seen.drafts.guesses else None,
            limit=lately.limit(),
            decisions=seen.decisions,
        )

    @staticmethod
    def _now() -> Seconds:
        return Seconds(time.monotonic())


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of the loop, of the coordinator's own time, and of drafting."""

    loop: LoopSums
    spent: Seconds
    drafts: Drafts


class _Lately:
    """The loop over some time: `change` of the sums in `elapsed`."""

    def __init__(self, seen: LoopStatistics, elapsed: Seconds, change: _Sums) -> None:
        self._seen = seen
        self._elapsed = elapsed
        self._change = change.loop
        self._spent = change.spent
        self._drafts = change.drafts
        self._stages = [one.stage for one in seen.stages]
        self._names = [stage.node for stage in self._stages]
        reports = [one.report for one in seen.stages]
        between = [None if report is None else report.link for report in reports[:-1]]
        self._links = [seen.to_first.link, *between, None]  # nobody tells us of the way back
        self._codecs = [
            None if report is None else (report.codec, report.why) for report in (None, *reports[:-1], None)
        ]
        self._queued = [None if report is None else report.queued for report in reports]
        self.loop: Loop | None = change.loop.mean([believed_rate(link) for link in self._links])

    def hops(self) -> tuple[HopStatistics, ...]:
        """Coordinator to the first stage, stage to stage, last stage back; each as far as it is known."""
        names = [COORDINATOR, *self._names, COORDINATOR]
        blocks = [*(f"{one.first}-{one.stop - 1}" for one in self._stages), None]
        return tuple(
            self._hop(place, names[place], names[place + 1], blocks[place]) for place in range(len(blocks))
        )

    def stages(self) -> tuple[StageStatistics, ...]:
        return tuple(self._stage(place) for place in range(len(self._stages)))

    def limit(self) -> str | None:
        limit = limit_of(self._loads(), self.loop, self._names)
        return None if limit is None else limit.sentence

    def _loads(self) -> list[Load]:
        if self._elapsed <= 0 or not self._change.steps:
            return []
        loads = [Load(Cause.COORDINATOR, COORDINATOR, self._spent / self._elapsed)]
        if self._drafts.seconds:
            loads.append(Load(Cause.DRAFTER, DRAFTER, self._drafts.seconds / self._elapsed))
        for name, parts in zip(self._names, self._change.stages, strict=True):
            loads += stage_loads(name, parts, self._change.steps, self._elapsed)
        for way, hop, link in zip(hop_names(self._names), self._change.hops, self._links, strict=True):
            load = link_load(way, hop.sent, self._elapsed, believed_rate(link))
            loads += [load] if load is not None else []
        return loads

    def _hop(self, place: int, source: str, target: str, blocks: str | None) -> HopStatistics:
        link, so_far, change = self._links[place], self._seen.sums.hops[place], self._change.hops[place]
        mean = None if self.loop is None else self.loop.hops[place]
        rtt, sent, messages = None if link is None else _seconds(link.rtt), so_far.sent, so_far.messages
        if place == 0 or blocks is None:
            end = self._seen.from_last if place else self._seen.to_first
            rtt, sent, messages = _seconds(end.rtt), end.traffic, end.messages
        codec, why = self._codecs[place] or (None, None)
        load = link_load("", change.sent, self._elapsed, believed_rate(link))
        return HopStatistics(
            source,
            target,
            blocks,
            rtt,
            Bytes(sent),
            messages,
            BytesPerSecond(change.sent / self._elapsed) if self._elapsed > 0 else None,
            link_rate=None if link is None or link.rate is None else BytesPerSecond(link.rate),
            rate_is_lower_bound=link is not None and link.is_lower_bound,
            loss=None if link is None else link.loss,
            raw=Bytes(so_far.raw) if 0 < place < len(self._stages) else None,
            to_wire=None if mean is None else mean.to_wire,
            flight=shown_flight(mean),
            uncertainty=None if mean is None or not is_known(mean) else mean.uncertainty,
            busy=None if load is None else load.busy,
            codec=codec,
            why=why,
        )

    def _stage(self, place: int) -> StageStatistics:
        blocks = self._stages[place].blocks
        split = None if self.loop is None else self.loop.stages[place]
        return StageStatistics(
            node=self._names[place],
            first_block=blocks[0],
            last_block=blocks[-1],
            compute=None if split is None else split.compute,
            queue=None if split is None else split.queue,
            busy=self._change.stages[place].compute / self._elapsed if self._elapsed > 0 else None,
            split=split,
            queued=self._queued[place],
        )


def shown_flight(hop: Hop | None) -> Seconds | None:
    """A flight for people: never below 0, however wrong the clocks; None where they are not known."""
    return None if hop is None or not is_known(hop) else Seconds(max(0.0, hop.flight))


def _seconds(value: float | None) -> Seconds | None:
    return None if value is None else Seconds(value)
