"""What a person sees, all of it on standard error. The only importer of rich.

Colour only repeats what the words say already; NO_COLOR and dumb terminals lose nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from bbquic.cli.draw_bars import COMPUTE, FLIGHT, LEGEND, QUEUE, bar, loop_parts
from bbquic.cli.draw_cluster import cluster_tables, limit_lines, snapshot_lines
from bbquic.cli.draw_loop import GAP, Table, codec_lines, hop_table, stage_table
from bbquic.cli.figures import (
    duration,
    fill,
    milliseconds,
    plain_line,
    printable,
    progress,
    speeds,
    summary_lines,
)
from bbquic.errors import BBQuicError
from bbquic.runtime.accounting import Loop
from bbquic.runtime.telemetry import ClusterStatistics, JobStatistics
from bbquic.units import Seconds

Source = Callable[[], JobStatistics]
ClusterSource = Callable[[], ClusterStatistics]
Draw = Callable[[int], RenderableType]  # a frame no wider than so many columns
Pause = Callable[[float], Awaitable[None]]

_FRAME = Seconds(0.25)  # between two frames of the live view: figures can be read, and cost little
PLAIN_INTERVAL = Seconds(5.0)
DECISIONS = 2  # of the controller's newest lines are shown
_LEAST_BAR = 10  # columns; a shorter bar says less than the figures beside it
_WIDEST_BAR = 100
_LETTERS = {
    COMPUTE: "green",
    QUEUE: "dim",
    FLIGHT: "blue",
}  # colours of a bar's letters, beside their meaning


class View(Protocol):
    """Something that shows a run while it lasts."""

    async def run(self) -> None:
        """Show until cancelled, or until the screen is gone. Leaves the terminal as it was."""


class LiveView:
    """A view that redraws itself in place, as wide as the terminal is at that moment."""

    def __init__(self, draw: Draw, console: Console, *, pause: Pause = asyncio.sleep) -> None:
        self._draw = draw
        self._console = console
        self._pause = pause

    async def run(self) -> None:
        try:
            # Standard output is left alone: it may carry the answers.
            with Live(
                self._frame(), console=self._console, auto_refresh=False, redirect_stdout=False
            ) as live:
                try:
                    while True:
                        await self._pause(_FRAME)
                        live.update(self._frame(), refresh=True)
                finally:
                    live.update(self._frame())  # drawn as the view ends, and left on the screen
        except OSError:
            return  # nobody looks any more; the run itself goes on

    def _frame(self) -> RenderableType:
        return self._draw(self._console.width)


class PlainView:
    """A view for logs: a few lines now and then, and never a control character."""

    def __init__(
        self,
        lines: Callable[[], list[str]],
        out: TextIO,
        *,
        interval: Seconds = PLAIN_INTERVAL,
        pause: Pause = asyncio.sleep,
    ) -> None:
        if interval <= 0:
            raise ValueError(f"an interval is above 0, not {interval}")
        self._lines = lines
        self._out = out
        self._interval = interval
        self._pause = pause

    async def run(self) -> None:
        try:
            while True:
                await self._pause(self._interval)
                print(*self._lines(), sep="\n", file=self._out, flush=True)
        except OSError:
            return


def make_view(
    source: Source, *, title: str = "", interval: Seconds = PLAIN_INTERVAL, plain: bool = False
) -> View:
    """The view that suits standard error. `plain` asks for lines even on a terminal, for instance
    because the answers go there too."""
    console = make_console()
    if plain or not sys.stderr.isatty() or console.is_dumb_terminal:
        return PlainView(lambda: [plain_line(source())], sys.stderr, interval=interval)
    return LiveView(lambda width: draw_job(source(), title, width), console)


def make_cluster_view(source: ClusterSource) -> View:
    """The view of a cluster that suits standard error."""
    console = make_console()
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        return PlainView(lambda: [*snapshot_lines(source()), *limit_lines(source())], sys.stderr)
    return LiveView(lambda width: draw_cluster(source(), width), console)


def make_lines_view(lines: Callable[[], list[str]]) -> View:
    """A view of some lines that change, as it suits standard error."""
    console = make_console()
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        return PlainView(lines, sys.stderr)
    return LiveView(lambda width: Group(*(Text(one) for one in lines())), console)


@asynccontextmanager
async def showing(view: View) -> AsyncIterator[None]:
    """Run a view beside the body; when the body ends, however it does, the terminal is restored."""
    task = asyncio.create_task(view.run(), name="view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


def make_console(out: TextIO | None = None) -> Console:
    return Console(file=out, stderr=out is None, highlight=False, markup=False, emoji=False)


def print_error(error: BBQuicError, console: Console | None = None) -> None:
    """A sentence, and a hint where there is one."""
    console = console or make_console()
    _print_labelled(console, "error:", "bold red", error.message)
    if error.hint:
        _print_labelled(console, "hint:", "bold cyan", error.hint)


def print_note(message: str, console: Console | None = None) -> None:
    """A line about what is being done."""
    (console or make_console()).print(Text(printable(message)), soft_wrap=True)


def print_summary(
    job: JobStatistics, answers: str, console: Console | None = None, *, resumable: bool = True
) -> None:
    console = console or make_console()
    for line in summary_lines(job, answers, resumable=resumable):
        console.print(Text(line), soft_wrap=True)


def draw_job(job: JobStatistics, title: str, width: int) -> RenderableType:
    """One frame of the live view, no wider than `width` columns."""
    parts: list[RenderableType] = [_draw_progress(job, title, width), *map(Text, fill(speeds(job), width))]
    if job.waiting_for is not None:
        parts.append(Text(f"waiting for {printable(job.waiting_for)}", style="yellow"))
    if job.limit is not None:
        parts.append(Text(f"limit: {printable(job.limit)}", style="bold"))
    parts += [Text(f"decided: {printable(one)}", style="dim") for one in job.decisions[-DECISIONS:]]
    if job.hops:
        parts.append(_draw_table(hop_table(job.hops), width))
        parts += [Text(line, style="dim") for line in codec_lines(job.hops)]
    if job.stages:
        parts.append(_draw_table(stage_table(job.stages), width))
    if job.loop is not None:
        parts += _draw_step(job.loop, width)
    return Group(*parts)


def draw_cluster(cluster: ClusterStatistics, width: int) -> RenderableType:
    """One frame of a cluster that one is not driving."""
    tables = [_draw_table(table, width) for table in cluster_tables(cluster)]
    limits = [Text(f"limit of {line}", style="bold") for line in limit_lines(cluster)]
    legend = [Text(line, style="dim") for line in fill(LEGEND.split("  "), width)]
    return Group(*tables, *limits, *(legend if cluster.limits else []))


def _draw_step(loop: Loop, width: int) -> list[RenderableType]:
    """An average step as one bar in the order in which it happens, and what the letters are."""
    label = f"step {milliseconds(loop.measured)} "
    room = min(width, _WIDEST_BAR) - len(label)
    line = [_coloured(f"{label}{bar(loop_parts(loop), room)}", len(label))] if room >= _LEAST_BAR else []
    return [*line, *(Text(line, style="dim") for line in fill(LEGEND.split("  "), width))]


def _coloured(text: str, start: int = 0) -> Text:
    """A bar whose letters have their colours, from `start` on."""
    runs = ("".join(run) for _, run in groupby(text[start:]))
    return Text.assemble(text[:start], *((run, _LETTERS.get(run[0], "")) for run in runs))


def _draw_progress(job: JobStatistics, title: str, width: int) -> RenderableType:
    figures = progress(job) + ("" if job.eta is None else f"  {duration(job.eta)} left")
    title = printable(title)
    room = width - len(figures) - GAP
    bar = room - (len(title) + GAP if title else 0)
    if job.total is None or room < _LEAST_BAR:
        return Text(figures, style="bold")
    if bar < _LEAST_BAR:
        title, bar = "", room
    line = RichTable.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    total = float(max(job.total, 1))
    drawn = ProgressBar(total=total, completed=min(job.settled, total), width=min(bar, 60))
    cells: list[RenderableType] = [drawn, Text(figures, style="bold")]
    line.add_row(*([Text(title), *cells] if title else cells))
    return line


def _draw_table(table: Table, width: int) -> RenderableType:
    """As many columns as fit; the first always stays, cut short if it must be."""
    fitted = table.fitted(width)
    drawn = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in fitted.columns:
        drawn.add_column(
            name,
            justify="left" if name in fitted.left else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in fitted.rows:
        cells = zip(fitted.columns, row, strict=True)
        drawn.add_row(*(_coloured(cell) if name == "split of it" else Text(cell) for name, cell in cells))
    return drawn


def _print_labelled(console: Console, label: str, style: str, message: str) -> None:
    text = Text.assemble((label, style), " ", printable(message))
    console.print(text, soft_wrap=True)
