"""Whose turn it is on a busy core: threads that answer come before threads that compute.

On a machine whose cores all compute, Linux lets whoever runs finish its slice, some 3 ms, before a thread
that wakes up gets a core: more than a pack needs from one node's memory to the next one's. From 6.12 on a
thread may ask for shorter slices, and then gets its core at once: no privilege is needed, no more time given.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

SHORT = 100_000  # ns; the shortest there is
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2), as of its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_short_turns() -> bool:
    """Let the calling thread run as soon as it wakes, for short whiles. Whether the system does that."""
    return _set_slice(SHORT)


def take_usual_turns() -> bool:
    """The calling thread was made by one that takes short turns, and computes: undo it."""
    return _set_slice(0)


def _set_slice(nanoseconds: int) -> bool:
    number = SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    attributes = _Attributes(size=ctypes.sizeof(_Attributes), runtime=nanoseconds)
    attributes.nice = os.getpriority(os.PRIO_PROCESS, 0)  # as it is
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.syscall(number, 0, ctypes.byref(attributes), 0) == 0)
    except (OSError, AttributeError):
        return False
