"""The log of strangers cannot be filled by them."""

from __future__ import annotations

import pytest

from bbquic.transport.identity import make_identity
from bbquic.transport.strangers import LINES_A_WINDOW, REMEMBERED, SAME_AGAIN, WINDOW, StrangerLog

KEY = make_identity("stranger").fingerprint


def test_a_stranger_who_knocks_on_is_logged_once_in_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    strangers = StrangerLog()
    for second in range(int(SAME_AGAIN)):
        strangers.refused(("192.0.2.1", second), KEY, float(second))
    assert len(caplog.messages) == 1
    strangers.refused(("192.0.2.1", 1), KEY, SAME_AGAIN)
    assert len(caplog.messages) == 2


def test_a_line_has_address_fingerprint_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    StrangerLog().refused(("192.0.2.1", 4433), KEY, 0.0)
    assert caplog.messages == [f"cut off 192.0.2.1 port 4433: its key {KEY} is not pinned in peers.toml"]


def test_a_stranger_without_a_key_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    StrangerLog().refused(("192.0.2.1", 4433), None, 0.0)
    assert "its key (it showed none) is not pinned in peers.toml" in caplog.text


def test_a_flood_from_everywhere_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    strangers = StrangerLog()
    for number in range(1000):
        strangers.refused((f"192.0.2.{number}", 1), None, number / 1000)
    assert len(caplog.messages) == LINES_A_WINDOW
    strangers.refused(("198.51.100.1", 1), None, WINDOW)
    assert caplog.messages[-1].endswith(f"({1000 - LINES_A_WINDOW} more were not logged)")


def test_strangers_are_remembered_in_bounded_memory() -> None:
    strangers = StrangerLog()
    for number in range(3 * REMEMBERED):
        strangers.refused((f"host-{number}", 1), None, number * WINDOW)
    assert len(strangers._seen) == REMEMBERED
