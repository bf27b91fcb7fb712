"""Statistics as words and columns. Pure text: `render` puts it on a screen."""

from __future__ import annotations

from bbquic.runtime.accounting import Loop
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.limits import loop_shares
from bbquic.runtime.telemetry import FirstTokens, JobStatistics
from bbquic.units import Bytes, BytesPerSecond, Seconds

UNKNOWN = "-"


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
    if job.drafts is not None and job.drafts.guesses and job.drafts.tokens_a_pass is not None:
        parts.append(f"{job.drafts.tokens_a_pass:.2f} tokens a pass")
    if job.first_tokens is not None:
        parts.append(f"first token {first_tokens(job.first_tokens)}")
    parts.append(f"{duration(job.elapsed)} so far")
    return parts


def first_tokens(times: FirstTokens) -> str:
    """Times to first token: "0.8 s (95 %: 2.1 s)"."""
    return f"{duration(times.median)} (95 %: {duration(times.p95)})"


def plain_line(job: JobStatistics) -> str:
    """The whole of a job's state in one line, for a log."""
    left = [] if job.eta is None else [f"{duration(job.eta)} left"]
    waiting = [] if job.waiting_for is None else [f"waiting for {printable(job.waiting_for)}"]
    limit = [] if job.limit is None else [f"limit: {printable(job.limit)}"]
    return ", ".join([f"progress: {progress(job)}", *speeds(job), *left, *waiting, *limit])


def fill(parts: list[str], width: int) -> list[str]:
    """As many parts a line as fit `width`, so that a line never breaks inside one that could be whole."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


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
        shared = f" ({job.shared_tokens:,} of them shared)" if job.shared_tokens else ""
        tokens = f"{job.prompt_tokens:,} prompt tokens{shared}, {job.generated_tokens:,} generated"
        lines.append(f"{tokens}: {token_rate(rate)}")
    if job.first_tokens is not None:
        lines.append(f"time to first token: {first_tokens(job.first_tokens)}")
    if job.drafts is not None:
        lines.append(f"drafts: {drafts_in_words(job.drafts, job.elapsed)}")
    if job.loop is not None:
        lines.append(f"average step: {step_in_words(job.loop)}")
    if job.limit is not None:
        lines.append(f"limit over the run: {printable(job.limit)}")
    for hop in job.hops:
        if hop.codec and hop.why:
            way = f"{printable(hop.source)} -> {printable(hop.target)}"
            lines.append(f"compression {way}: {printable(hop.codec)}, {printable(hop.why)}")
    lines.append(f"answers: {printable(answers)}")
    if not job.finished:
        left = "" if job.total is None else f"{job.total - job.settled:,} left; "
        how = "run the same command again to go on" if resumable else "only a file (-o) can be gone on with"
        lines.append(f"unfinished: {left}{how}")
    return lines


def drafts_in_words(drafts: Drafts, elapsed: Seconds) -> str:
    """What it came to: "1.84 tokens a pass, 1,234 of 4,000 guesses accepted (31 %), drafter busy 12 %"."""
    if not drafts.guesses:
        return "no guesses were made"
    accepted = share(drafts.accepted / drafts.guesses)
    guesses = f"{drafts.accepted:,} of {drafts.guesses:,} guesses accepted ({accepted})"
    busy = f"drafter busy {share(drafts.seconds / elapsed if elapsed > 0 else None)}"
    a_pass = UNKNOWN if drafts.tokens_a_pass is None else f"{drafts.tokens_a_pass:.2f}"
    return f"{a_pass} tokens a pass, {guesses}, {busy}"


def step_in_words(loop: Loop) -> str:
    """An average step and what it goes to, the most first: "85.0 ms: compute 48 %, latency 37 %, ..."."""
    shares = sorted(loop_shares(loop).items(), key=lambda pair: -pair[1])
    parts = [f"{cause} {share(seconds / loop.measured)}" for cause, seconds in shares if seconds > 0]
    return f"{milliseconds(loop.measured)}: {', '.join(parts)}"


def _scaled(count: float) -> str:
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.1f} TB"
