"""Puts together what a run tells about itself: one frozen snapshot a look."""

from __future__ import annotations

import time
from itertools import pairwise

from bbquic.runtime.coordinator import Coordinator, StageActivity
from bbquic.runtime.source import RecordSource
from bbquic.runtime.telemetry import (
    HopStatistics,
    JobStatistics,
    RateMeter,
    StageStatistics,
    remaining_time,
)
from bbquic.units import Bytes, BytesPerSecond, Seconds

WINDOW = Seconds(20.0)  # "lately"


class Monitor:
    """Reads the source's and the coordinator's counters; owns the clocks and the sliding windows."""

    def __init__(self, source: RecordSource, coordinator: Coordinator, *, total: int | None) -> None:
        self._source = source
        self._coordinator = coordinator
        self._total = total
        self._start = self._now()
        self._prompt = RateMeter(WINDOW, start=self._start)
        self._generated = RateMeter(WINDOW, start=self._start)
        self._seen = (0, 0)
        self._sent = [RateMeter(WINDOW, start=self._start) for _ in coordinator.stages]
        self._sent_before = [0] * len(coordinator.stages)
        self._busy = [RateMeter(WINDOW, start=self._start) for _ in coordinator.stages]
        self._busy_before = [0.0] * len(coordinator.stages)

    def snapshot(self) -> JobStatistics:
        now = self._now()
        source, counters = self._source, self._coordinator.counters
        prompt, generated = counters.prompt_tokens, counters.generated_tokens
        self._prompt.add(now, prompt - self._seen[0])
        self._generated.add(now, generated - self._seen[1])
        self._seen = (prompt, generated)
        decode = self._generated.rate(now)
        read = self._prompt.rate(now)
        failed = sum(source.failures.values())
        elapsed = Seconds(now - self._start)
        settled = source.done + failed
        left = None if self._total is None else self._total - settled - source.skipped
        return JobStatistics(
            done=source.done,
            failed=failed,
            skipped=source.skipped,
            total=self._total,
            prompt_tokens=prompt,
            generated_tokens=generated,
            tokens_per_second=None if decode is None or read is None else decode + read,
            decode_tokens_per_second=decode,
            in_flight_sequences=self._coordinator.in_flight_sequences,
            elapsed=elapsed,
            eta=None if left is None else remaining_time(settled, left, elapsed),
            waiting_for=self._coordinator.waiting_for(),
            failures=tuple(sorted(source.failures.items())),
            hops=self._hops(now),
            stages=tuple(
                self._stage(now, place, stage) for place, stage in enumerate(self._coordinator.stages)
            ),
        )

    def _hops(self, now: Seconds) -> tuple[HopStatistics, ...]:
        """Coordinator to the first stage, stage to stage, last stage back; each as far as it is known."""
        stages = self._coordinator.stages
        first, last = stages[0], stages[-1]
        to_first = first.link.channel.statistics()
        from_last = last.link.channel.statistics()
        hops = [
            HopStatistics(
                "command",
                first.link.stage.node,
                _blocks(first),
                to_first.rtt,
                to_first.bytes_sent,
                to_first.messages_sent,
                None,
            )
        ]
        for place, (source, target) in enumerate(pairwise(stages)):
            meter = self._sent[place]
            meter.add(now, source.sent - self._sent_before[place])
            self._sent_before[place] = source.sent
            rate = meter.rate(now)
            hops.append(
                HopStatistics(
                    source.link.stage.node,
                    target.link.stage.node,
                    _blocks(target),
                    None,
                    Bytes(source.sent),
                    source.steps,
                    None if rate is None else BytesPerSecond(rate),
                )
            )
        hops.append(
            HopStatistics(
                last.link.stage.node,
                "command",
                None,
                from_last.rtt,
                from_last.bytes_received,
                from_last.messages_received,
                None,
            )
        )
        return tuple(hops)

    def _stage(self, now: Seconds, place: int, stage: StageActivity) -> StageStatistics:
        meter = self._busy[place]
        meter.add(now, stage.busy - self._busy_before[place])
        self._busy_before[place] = stage.busy
        blocks = stage.link.stage.blocks
        return StageStatistics(
            node=stage.link.stage.node,
            first_block=blocks[0],
            last_block=blocks[-1],
            compute=stage.compute,
            queue=stage.queue,
            busy=meter.rate(now),
        )

    @staticmethod
    def _now() -> Seconds:
        return Seconds(time.monotonic())


def _blocks(stage: StageActivity) -> str:
    return f"{stage.link.stage.first}-{stage.link.stage.stop - 1}"
