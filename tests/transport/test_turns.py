"""Short turns: asked for where the system has them, undone for threads that compute."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

import pytest

from bbquic.transport.turns import SCHED_SETATTR, SHORT, take_short_turns, take_usual_turns

GETATTR = {"x86_64": 315, "aarch64": 275}  # sched_getattr(2)


def turn() -> int:
    """Nanoseconds of the calling thread's slice, as the kernel has it; its `sched_runtime`."""
    attributes = (ctypes.c_uint8 * 48)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(GETATTR[platform.machine()], 0, ctypes.byref(attributes), 48, 0) == 0
    return int.from_bytes(bytes(attributes[24:32]), sys.byteorder)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in SCHED_SETATTR, reason="another system"
)
def test_a_thread_gets_its_slice_and_gives_it_back() -> None:
    found: list[int] = []

    def work() -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        usual = turn()
        if not take_short_turns():
            return
        found.append(turn())
        assert take_usual_turns()
        found.append(turn() - usual)
        assert os.getpriority(os.PRIO_PROCESS, 0) == nice

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not found or found[0] != SHORT:
        pytest.skip("this kernel has no slices of a thread's own")
    assert found == [SHORT, 0]


def test_a_system_without_them_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert take_short_turns() is False
