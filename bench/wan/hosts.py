"""Hosts as network namespaces, each with one TUN device: made, filled with processes, removed.

A namespace's name begins with the process id of its owner and the time at which that began, so that one
whose owner is dead is known for what it is, and one of another program is never touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from bench.wan.errors import WanError, WanUnavailable

DEVICE = "wan0"
TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
QUEUE_PACKETS = 10_000  # between a host's kernel and the relay, which empties it at once
NAMESPACES = Path("/run/netns")
OWNED = re.compile(r"bbwan-(\d+)-(\d+)-[0-9a-f]{6}-[a-z0-9]+")
ALSO_IN = "/usr/sbin:/sbin"  # where `ip` is, for a root whose PATH lacks them
IP_SECONDS = 30.0  # a call of `ip` takes milliseconds


def check_available() -> None:
    """Raises: WanUnavailable with what this machine lacks."""
    if sys.platform != "linux":
        raise WanUnavailable("network namespaces need Linux")
    if os.geteuid() != 0:
        raise WanUnavailable("making network namespaces needs root")
    _ip_command()
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        raise WanUnavailable(f"cannot open {TUN}: {error.strerror}") from error


def owner_prefix() -> str:
    """For the names of this process's namespaces; each call gives another."""
    pid = os.getpid()
    return f"bbwan-{pid}-{_began(pid)}-{secrets.token_hex(3)}-"


def add(namespace: str) -> None:
    """Raises: WanUnavailable where the kernel lets this process make none."""
    try:
        _ip("netns", "add", namespace)
    except WanError as error:
        raise WanUnavailable(f"cannot make a network namespace: {error}") from error


def add_device(namespace: str, address: str, mtu: int) -> int:
    """Give the namespace its only way out, and return the end at which its packets are read and written.

    address: with its prefix length. Raises: WanError, WanUnavailable.
    """
    name = f"bbw{secrets.token_hex(5)}"  # until it is in the namespace
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        _ip("link", "set", name, "netns", namespace, "name", DEVICE)
        commands = (
            "link set lo up",
            f"addr add {address} dev {DEVICE}",
            f"link set {DEVICE} mtu {mtu} txqueuelen {QUEUE_PACKETS} up",
        )
        _ip("-n", namespace, "-batch", "-", text="\n".join(commands))
    except OSError as error:
        os.close(fd)
        raise WanUnavailable(f"cannot make a TUN device: {error.strerror}") from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def inside(namespace: str, argv: list[str]) -> list[str]:
    """A command line that runs another in the namespace, as the same process."""
    return [_ip_command(), "netns", "exec", namespace, *argv]


def remove(namespace: str) -> None:
    """End every process in the namespace, and the namespace. No error where there is none."""
    if not (NAMESPACES / namespace).exists():
        return
    with suppress(WanError):  # somebody else has just removed it
        for pid in _ip("netns", "pids", namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", namespace)


def remove_stale() -> list[str]:
    """Remove the namespaces whose owner is dead, and return their names."""
    stale = [name for name in existing() if not _owner_lives(name)]
    for namespace in stale:
        remove(namespace)
    return stale


def existing() -> list[str]:
    """The namespaces of this module, whoever owns them."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(entry.name for entry in NAMESPACES.iterdir() if OWNED.fullmatch(entry.name))


def _owner_lives(namespace: str) -> bool:
    match = OWNED.fullmatch(namespace)
    return match is not None and _began(int(match[1])) == match[2]


def _began(pid: int) -> str | None:
    """When a process began, in clock ticks since the machine did; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[19]  # field 22; the name in parentheses may hold anything


def _ip_command() -> str:
    found = shutil.which("ip") or shutil.which("ip", path=ALSO_IN)
    if found is None:
        raise WanUnavailable("there is no `ip` command: install iproute2")
    return found


def _ip(*arguments: str, text: str | None = None) -> str:
    """Raises: WanError with what `ip` says."""
    command = [_ip_command(), *arguments]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=IP_SECONDS, check=False
    )
    if done.returncode != 0:
        raise WanError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
