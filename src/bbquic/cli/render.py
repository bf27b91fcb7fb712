"""What a person sees, all of it on standard error. The only importer of rich.

Colour only repeats what the words say already; NO_COLOR and dumb terminals lose nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bbquic.cli.figures import (
    COLUMNS,
    duration,
    fill,
    loop_rows,
    plain_line,
    printable,
    progress,
    speeds,
    summary_lines,
)
from bbquic.errors import BBQuicError
from bbquic.runtime.telemetry import JobStatistics
from bbquic.units import Seconds

Source = Callable[[], JobStatistics]
Pause = Callable[[float], Awaitable[None]]

_FRAME = Seconds(0.25)  # between two frames of the live view: figures can be read, and cost little
PLAIN_INTERVAL = Seconds(5.0)
_GAP = 2  # columns between two cells
_LEAST_BAR = 10  # columns; a shorter bar says less than the figures beside it
_DROPPED_FIRST = ("sent", "queue", "rtt", "blocks", "rate", "busy", "compute")  # on a narrow terminal


class View(Protocol):
    """Something that shows a run while it lasts."""

    async def run(self) -> None:
        """Show until cancelled, or until the screen is gone. Leaves the terminal as it was."""


class LiveView:
    """A view that redraws itself in place, as wide as the terminal is at that moment."""

    def __init__(
        self, source: Source, console: Console, *, title: str = "", pause: Pause = asyncio.sleep
    ) -> None:
        self._source = source
        self._console = console
        self._title = title
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
        return draw_job(self._source(), self._title, self._console.width)


class PlainView:
    """A view for logs: a line now and then, and never a control character."""

    def __init__(
        self,
        source: Source,
        out: TextIO,
        *,
        interval: Seconds = PLAIN_INTERVAL,
        pause: Pause = asyncio.sleep,
    ) -> None:
        if interval <= 0:
            raise ValueError(f"an interval is above 0, not {interval}")
        self._source = source
        self._out = out
        self._interval = interval
        self._pause = pause

    async def run(self) -> None:
        try:
            while True:
                await self._pause(self._interval)
                print(plain_line(self._source()), file=self._out, flush=True)
        except OSError:
            return


def make_view(
    source: Source, *, title: str = "", interval: Seconds = PLAIN_INTERVAL, plain: bool = False
) -> View:
    """The view that suits standard error. `plain` asks for lines even on a terminal, for instance
    because the answers go there too."""
    console = make_console()
    if plain or not sys.stderr.isatty() or console.is_dumb_terminal:
        return PlainView(source, sys.stderr, interval=interval)
    return LiveView(source, console, title=title)


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
    rows = loop_rows(job)
    if rows:
        parts.append(_draw_loop(rows, width))
    return Group(*parts)


def _draw_progress(job: JobStatistics, title: str, width: int) -> RenderableType:
    figures = progress(job) + ("" if job.eta is None else f"  {duration(job.eta)} left")
    title = printable(title)
    room = width - len(figures) - _GAP
    bar = room - (len(title) + _GAP if title else 0)
    if job.total is None or room < _LEAST_BAR:
        return Text(figures, style="bold")
    if bar < _LEAST_BAR:
        title, bar = "", room
    line = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    total = float(max(job.total, 1))
    drawn = ProgressBar(total=total, completed=min(job.settled, total), width=min(bar, 60))
    cells: list[RenderableType] = [drawn, Text(figures, style="bold")]
    line.add_row(*([Text(title), *cells] if title else cells))
    return line


def _draw_loop(rows: list[tuple[str, ...]], width: int) -> RenderableType:
    names = _fitting_columns(rows, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        text = name in ("hop", "blocks")
        table.add_column(name, justify="left" if text else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(row[COLUMNS.index(name)]) for name in names))
    return table


def _fitting_columns(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """The columns that fit, in order; the hop's name always stays, cut short if it must be."""
    widths = {name: max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(COLUMNS)}
    names = list(COLUMNS)
    for name in _DROPPED_FIRST:
        if sum(widths[kept] + _GAP for kept in names) - _GAP <= width:
            break
        names.remove(name)
    return names


def _print_labelled(console: Console, label: str, style: str, message: str) -> None:
    text = Text.assemble((label, style), " ", printable(message))
    console.print(text, soft_wrap=True)
