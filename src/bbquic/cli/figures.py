"""Statistics as words and columns. Pure text: `render` puts it on a screen."""

from __future__ import annotations

from bbquic.runtime.telemetry import HopStatistics, JobStatistics, StageStatistics
from bbquic.units import Bytes, BytesPerSecond, Seconds

UNKNOWN = "-"
COLUMNS = ("hop", "blocks", "compute", "queue", "busy", "rtt", "sent", "rate")


def duration(seconds: Seconds | None) -> str:
    """Two units at the most: 0.4 s, 12 s, 3 min 05 s, 2 h 10 min, 4 d 03 h."""
    if seconds is None:
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02} h"


def milliseconds(seconds: Seconds | None) -> str:
    if seconds is None:
        return UNKNOWN
    value = seconds * 1000
    return f"{value:.1f} ms" if value < 99.95 else f"{value:,.0f} ms"


def size(count: Bytes) -> str:
    """Decimal units, as links are sold: 999 B, 1.0 kB, 12.3 MB."""
    return f"{count} B" if count < 1000 else _scaled(count)


def throughput(rate: BytesPerSecond | None) -> str:
    return UNKNOWN if rate is None else f"{_scaled(rate)}/s"


def token_rate(rate: float | None) -> str:
    if rate is None:
        return f"{UNKNOWN} tok/s"
    return f"{rate:.1f} tok/s" if rate < 99.95 else f"{rate:,.0f} tok/s"


def share(value: float | None) -> str:
    """0 to 1 as a percentage, which says 100 only when nothing is missing."""
    if value is None:
        return UNKNOWN
    percent = round(value * 100)
    return f"{99 if percent == 100 and value < 1 else percent} %"


def printable(text: str) -> str:
    """Without control characters, which in a peer's or a file's name could steer the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def progress(job: JobStatistics) -> str:
    """How far a job is, without its speed: "412 of 1,000 (41 %)"."""
    if job.total is None:
        return f"{job.settled:,} lines"
    return f"{job.settled:,} of {job.total:,} ({share(job.settled / job.total if job.total else 1.0)})"


def speeds(job: JobStatistics) -> list[str]:
    """What there is to say beside the progress, the most useful first."""
    parts = [f"{token_rate(job.decode_tokens_per_second)} generated"]
    if job.tokens_per_second is not None:
        parts.append(f"{token_rate(job.tokens_per_second)} with prompts")
    parts.append(f"{job.in_flight_sequences} in flight")
    if job.failed:
        parts.append(f"{job.failed:,} failed")
    if job.skipped:
        parts.append(f"{job.skipped:,} had their answer")
    parts.append(f"{duration(job.elapsed)} so far")
    return parts


def plain_line(job: JobStatistics) -> str:
    """The whole of a job's state in one line, for a log."""
    left = [] if job.eta is None else [f"{duration(job.eta)} left"]
    waiting = [] if job.waiting_for is None else [f"waiting for {printable(job.waiting_for)}"]
    return ", ".join([f"progress: {progress(job)}", *speeds(job), *left, *waiting])


def fill(parts: list[str], width: int) -> list[str]:
    """As many parts a line as fit `width`, so that a line never breaks inside one that could be whole."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def loop_rows(job: JobStatistics) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each hop with the stage it leads to, then any stage that no hop leads to."""
    rows: list[tuple[str, ...]] = []
    reached: set[int] = set()
    for hop in job.hops:
        index = _stage_of(hop, job.stages)
        if index is not None:
            reached.add(index)
        stage = None if index is None else job.stages[index]
        name = f"{printable(hop.source)} -> {printable(hop.target)}"
        link = (milliseconds(hop.rtt), size(hop.bytes_sent), throughput(hop.bytes_per_second))
        rows.append((name, hop.blocks or "", *_stage_cells(stage), *link))
    for index, stage in enumerate(job.stages):
        if index not in reached:
            rows.append((printable(stage.node), _blocks(stage), *_stage_cells(stage), "", "", ""))
    return rows


def summary_lines(job: JobStatistics, answers: str, *, resumable: bool = True) -> list[str]:
    """What a run leaves to say when it ends, finished or not. `answers` names where they are."""
    of = "" if job.total is None else f" of {job.total:,}"
    counted = [f"answered {job.done:,}{of} {'line' if (job.total or job.done) == 1 else 'lines'}"]
    if job.skipped:
        counted.append(f"{job.skipped:,} had their record before")
    if job.failed:
        codes = ", ".join(f"{count:,} {code}" for code, count in job.failures)
        counted.append(f"{job.failed:,} failed" + (f" ({codes})" if codes else ""))
    lines = [f"{', '.join(counted)}, in {duration(job.elapsed)}"]
    if job.prompt_tokens or job.generated_tokens:
        rate = job.generated_tokens / job.elapsed if job.elapsed > 0 else None
        tokens = f"{job.prompt_tokens:,} prompt tokens, {job.generated_tokens:,} generated"
        lines.append(f"{tokens}: {token_rate(rate)}")
    lines.append(f"answers: {printable(answers)}")
    if not job.finished:
        left = "" if job.total is None else f"{job.total - job.settled:,} left; "
        how = "run the same command again to go on" if resumable else "only a file (-o) can be gone on with"
        lines.append(f"unfinished: {left}{how}")
    return lines


def _scaled(count: float) -> str:
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.1f} TB"


def _blocks(stage: StageStatistics) -> str:
    return f"{stage.first_block}-{stage.last_block}"


def _stage_cells(stage: StageStatistics | None) -> tuple[str, str, str]:
    if stage is None:
        return ("", "", "")
    return (milliseconds(stage.compute), milliseconds(stage.queue), share(stage.busy))


def _stage_of(hop: HopStatistics, stages: tuple[StageStatistics, ...]) -> int | None:
    """The stage a hop leads to; None where that is the coordinator."""
    if hop.blocks is None:
        return None
    there = [index for index, stage in enumerate(stages) if stage.node == hop.target]
    exact = [index for index in there if _blocks(stages[index]) == hop.blocks]
    return next(iter(exact or there), None)
