"""How much memory this machine can give; known without loading torch."""

from __future__ import annotations

import os
from pathlib import Path

from bbquic.units import Bytes


def host_memory_free() -> Bytes:
    """Host memory that can be taken without swapping: the kernel's estimate, within the cgroup's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _lines(Path("/sys/fs/cgroup/memory.max"))
    used = _lines(Path("/sys/fs/cgroup/memory.current"))
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return Bytes(free)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
