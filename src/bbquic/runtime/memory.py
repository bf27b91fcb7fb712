"""How much memory this machine can give, and how to tell that there was none; known without loading torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from bbquic.units import Bytes

# What torch, CUDA and C++ say where there is no class for it: on a CPU all are RuntimeErrors.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
_CGROUPS = Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory that was asked for was not there, on the device or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # that one is torch's
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def host_memory_free() -> Bytes:
    """Host memory that this process can take without swapping: the kernel's estimate, within the limits of
    its cgroups and its own (RLIMIT_AS, RLIMIT_DATA)."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return Bytes(max(0, min(free, *_left_of_cgroups(), *_left_of_limits())))


def _left_of_limits() -> Iterator[int]:
    """What the process may still map of address space, and of memory it can write to."""
    fields = " ".join(_lines(Path("/proc/self/statm"))).split()
    for kind, place in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and len(fields) > place:
            yield limit - int(fields[place]) * os.sysconf("SC_PAGE_SIZE")
    yield 2**63


def _left_of_cgroups() -> Iterator[int]:
    """What each cgroup that the process is in allows, versions 1 and 2. Pages of files that were not read of
    late are given back when memory is short, so they count as free."""
    for line in ("0::/", *_lines(Path("/proc/self/cgroup"))):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = _CGROUPS / "memory" if kinds else _CGROUPS
        names = ("limit_in_bytes", "usage_in_bytes") if kinds else ("max", "current")
        place = root / path.lstrip("/")
        for group in (place, *place.parents):
            limit, used = (_lines(group / f"memory.{name}") for name in names)
            if limit and used and limit[0].isdigit():
                yield int(limit[0]) - int(used[0]) + _idle_files(group, total=bool(kinds))
            if group == root:
                break
    yield 2**63


def _idle_files(group: Path, *, total: bool) -> int:
    name = "total_inactive_file" if total else "inactive_file"
    for line in _lines(group / "memory.stat"):
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
