"""A job's hops and stages as tables of text. Pure: `render` puts them on a screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bbquic.cli.draw_bars import bar, stage_parts
from bbquic.cli.figures import UNKNOWN, milliseconds, printable, share, size, throughput
from bbquic.runtime.telemetry import HopStatistics, StageStatistics
from bbquic.units import BytesPerSecond, Seconds

GAP = 2  # columns between two cells
SPLIT_WIDTH = 24  # columns of a stage's bar


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under `columns`. On a narrow screen columns go in the order of `dropped_first`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    dropped_first: tuple[str, ...]
    left: frozenset[str]  # columns of text; the others hold figures and stand to the right

    def fitted(self, width: int) -> Table:
        """The table with as many columns as fit."""
        widths = {
            name: max(len(name), *(len(row[place]) for row in self.rows)) if self.rows else len(name)
            for place, name in enumerate(self.columns)
        }
        kept = list(self.columns)
        for name in self.dropped_first:
            if sum(widths[one] + GAP for one in kept) - GAP <= width:
                break
            kept.remove(name)
        places = [self.columns.index(name) for name in kept]
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return Table(tuple(kept), rows, (), self.left)


def hop_table(hops: Sequence[HopStatistics]) -> Table:
    """A row for each hop: what the link is, what it carries, how long a message is on its way."""
    return Table(
        ("hop", "link", "rtt", "loss", "carries", "busy", "sent", "codec", "ratio", "flight"),
        tuple(map(_hop_row, hops)),
        ("ratio", "carries", "sent", "codec", "loss", "flight", "busy", "rtt", "link"),
        frozenset({"hop"}),
    )


def codec_lines(hops: Sequence[HopStatistics]) -> list[str]:
    """What each hop does about compression, and why."""
    return [
        f"{printable(hop.source)} -> {printable(hop.target)}: {printable(hop.codec)}, {printable(hop.why)}"
        for hop in hops
        if hop.codec and hop.why
    ]


def stage_table(stages: Sequence[StageStatistics]) -> Table:
    """A row for each stage: its part of a step by lane, packs in its queues, busy and bubble share."""
    return Table(
        ("stage", "blocks", "in step", "split of it", "queues", "busy", "bubble"),
        tuple(map(_stage_row, stages)),
        ("queues", "blocks", "bubble", "in step", "split of it", "busy"),
        frozenset({"stage", "blocks", "split of it"}),
    )


def link_rate(hop: HopStatistics) -> str:
    """What the link carries: "25.0 MB/s", or ">1.2 MB/s" where it never was seen full."""
    rate = throughput(hop.link_rate)
    return f">{rate}" if hop.link_rate is not None and hop.rate_is_lower_bound else rate


def flight(value: Seconds | None, uncertainty: Seconds | None) -> str:
    """A one-way time with how far it may be off: "21.3 ±0.4 ms"."""
    if value is None or uncertainty is None:
        return UNKNOWN
    return f"{value * 1000:.1f} ±{uncertainty * 1000:.1f} ms"


def queues(stage: StageStatistics) -> str:
    """Packs before decoding, computing, copying out, sending: "0 2 0 1"."""
    return UNKNOWN if stage.queued is None else " ".join(map(str, stage.queued))


def split(stage: StageStatistics, width: int = SPLIT_WIDTH) -> str:
    return UNKNOWN if stage.split is None else bar(stage_parts(stage.split), width)


def ratio(hop: HopStatistics) -> str:
    return UNKNOWN if hop.ratio is None else f"{hop.ratio:.2f}"


def loss(hop: HopStatistics) -> str:
    return UNKNOWN if hop.loss is None else f"{hop.loss * 100:.1f} %"


def blocks(stage: StageStatistics) -> str:
    return f"{stage.first_block}-{stage.last_block}"


def _hop_row(hop: HopStatistics) -> tuple[str, ...]:
    return (
        f"{printable(hop.source)} -> {printable(hop.target)}",
        link_rate(hop),
        milliseconds(hop.rtt),
        loss(hop),
        throughput(None if hop.bytes_per_second is None else BytesPerSecond(hop.bytes_per_second)),
        share(hop.busy),
        size(hop.bytes_sent),
        printable(hop.codec) if hop.codec else UNKNOWN,
        ratio(hop),
        flight(hop.flight, hop.uncertainty),
    )


def _stage_row(stage: StageStatistics) -> tuple[str, ...]:
    return (
        printable(stage.node),
        blocks(stage),
        milliseconds(None if stage.split is None else stage.split.total),
        split(stage),
        queues(stage),
        share(stage.busy),
        share(stage.bubble),
    )
