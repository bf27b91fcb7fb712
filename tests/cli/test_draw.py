"""Bars and tables as text: proportions, and what a narrow screen drops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.cli.draw_bars import bar, loop_parts, stage_parts
from bbquic.cli.draw_cluster import SNAPSHOT_COLUMNS, clock, snapshot_lines
from bbquic.cli.draw_loop import GAP, codec_lines, hop_table, link_rate, stage_table
from bbquic.runtime.accounting import Loop
from bbquic.runtime.telemetry import ClusterStatistics, HopStatistics, NodeStatistics, StageStatistics
from bbquic.runtime.timing import Hop, Parts
from bbquic.units import Bytes, BytesPerSecond, Seconds

PARTS = Parts(*map(Seconds, (0.001, 0.002, 0.003, 0.05, 0.004, 0.005, 0.006)))


@given(st.lists(st.floats(-1, 1e3), min_size=1, max_size=12), st.integers(0, 200))
def test_a_bar_is_as_wide_as_it_should_be_and_no_part_is_a_letter_off(
    values: list[float], width: int
) -> None:
    letters = "abcdefghijkl"
    drawn = bar(list(zip(letters, values, strict=False)), width)
    assert len(drawn) == width
    total = sum(max(0.0, value) for value in values)
    for letter, value in zip(letters, values, strict=False):
        share = max(0.0, value) / total * width if total > 0 else 0.0
        assert abs(drawn.count(letter) - share) < 1 + 1e-6


def test_a_bar_of_nothing_is_blank() -> None:
    assert bar([("C", 0.0)], 5) == "     "


def test_a_step_is_drawn_in_the_order_in_which_it_happens() -> None:
    hop = Hop(Seconds(0.01), Seconds(0.02), Seconds(0.001), Bytes(1), Bytes(1), None)
    unknown = Hop(Seconds(0.0), Seconds(5e5), Seconds(float("inf")), Bytes(1), Bytes(1), None)
    loop = Loop(Seconds(1), (PARTS,), (hop, unknown))
    letters = "".join(letter for letter, value in loop_parts(loop) if value > 0)
    assert letters == "s~rdi.Coe", "a flight that is not known is not drawn"
    assert sum(value for _, value in stage_parts(PARTS)) == pytest.approx(PARTS.total)


HOPS = [
    HopStatistics(
        "coordinator",
        "a",
        "0-9",
        Seconds(0.02),
        Bytes(1500),
        3,
        BytesPerSecond(1e4),
        link_rate=BytesPerSecond(2.5e7),
        loss=0.0123,
        raw=Bytes(3000),
        flight=Seconds(0.02),
        uncertainty=Seconds(0.001),
        busy=0.4,
        codec="REC",
        why="REC leaves 50%",
    ),
    HopStatistics("a", "coordinator", None, None, Bytes(0), 0, None),
]
STAGES = [
    StageStatistics("a", 0, 9, Seconds(0.05), Seconds(0.006), 0.93, PARTS, (0, 1, 2, 3)),
    StageStatistics("b", 10, 19, None, None, None),
]


def test_a_hop_shows_link_round_trip_loss_bytes_and_ratio() -> None:
    rows = hop_table(HOPS).rows
    assert rows[0] == (
        *("coordinator -> a", "25.0 MB/s", "20.0 ms", "1.2 %", "10.0 kB/s", "40 %", "1.5 kB", "REC"),
        *("2.00", "20.0 ±1.0 ms"),
    )
    assert rows[1] == ("a -> coordinator", "-", "-", "-", "-", "-", "0 B", "-", "-", "-")


def test_what_a_hop_does_about_compression_is_said_with_its_reason() -> None:
    assert codec_lines(HOPS) == ["coordinator -> a: REC, REC leaves 50%"]


def test_a_link_that_was_never_full_is_shown_as_at_least_so_fast() -> None:
    hop = HopStatistics("a", "b", None, None, Bytes(0), 0, None, BytesPerSecond(1.2e6), True)
    assert link_rate(hop) == ">1.2 MB/s"


def test_a_stage_shows_its_split_queues_busy_and_bubble() -> None:
    rows = stage_table(STAGES).rows
    assert rows[0] == ("a", "0-9", "71.0 ms", "di..CCCCCCCCCCCCCCCCCoee", "0 1 2 3", "93 %", "7 %")
    assert rows[1] == ("b", "10-19", "-", "-", "-", "-", "-")


@given(st.integers(1, 200))
def test_a_table_drops_columns_in_its_order_until_it_fits(width: int) -> None:
    for table in (hop_table(HOPS), stage_table(STAGES)):
        fitted = table.fitted(width)
        dropped = [name for name in table.columns if name not in fitted.columns]
        assert set(dropped) == set(table.dropped_first[: len(dropped)])
        widths = [max(map(len, column)) for column in zip(fitted.columns, *fitted.rows, strict=True)]
        assert sum(widths) + GAP * (len(widths) - 1) <= width or len(fitted.columns) == 1
        assert fitted.columns[0] == table.columns[0]


def test_a_snapshot_has_a_line_a_node_and_a_field_a_column() -> None:
    up = NodeStatistics(
        *("a", "10.0.0.1:4433", None, "cpu", "idle", Seconds(3), "0" * 16, Seconds(0.02)),
        *(Seconds(-90_000.0), Seconds(0.001), 0.0, 12.34, STAGES[0], HOPS[0]),
    )
    down = NodeStatistics("b\tx", "10.0.0.2:4433", "no\nanswer")
    lines = snapshot_lines(ClusterStatistics((up, down)))
    fields = [line.split("\t") for line in lines]
    assert [len(row) for row in fields] == [len(SNAPSHOT_COLUMNS)] * 3
    values = dict(zip(SNAPSHOT_COLUMNS, fields[1], strict=True))
    assert values["state"] == "up"
    assert values["steps/s"] == "12.3"
    assert values["busy"] == "93 %"
    assert values["link"] == "25.0 MB/s"
    assert fields[2][1].startswith("down: no")


def test_a_clock_is_shown_with_how_sure_it_is() -> None:
    def node(offset: float | None) -> NodeStatistics:
        known = None if offset is None else Seconds(offset)
        return NodeStatistics("a", "x:1", offset=known, uncertainty=Seconds(0.0004))

    assert clock(node(0.0123)) == "+12.3 ±0.4 ms"
    assert clock(node(-90_000.0)) == "-1 d 01 h ±0.4 ms"
    assert clock(node(None)) == "-"
