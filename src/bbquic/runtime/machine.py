"""This machine as a plan sees it: its device, its free memory, its threads."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from bbquic.errors import ConfigError
from bbquic.runtime.memory import host_memory_free
from bbquic.units import Bytes

NOTHING = Bytes(0)


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and how much of it a node may use.

    `limit` caps what is reported as free memory of the device, `host_limit` what is reported of host memory
    beside it, which is for KV of offloaded slots.
    """

    device: torch.device
    threads: int
    limit: Bytes | None = None
    host_limit: Bytes | None = None

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)} ({self.device})"
        return f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the device computes natively, the preferred first."""
        if self.device.type == "cuda":
            half = ("bfloat16",) if torch.cuda.is_bf16_supported(including_emulation=False) else ()
            return (*half, "float16", "float32")
        return ("float32", "bfloat16")

    def memory_free(self, held: Bytes = NOTHING) -> Bytes:
        """Bytes free on the device just now and the `held` ones that would be given up, within the limit."""
        on_gpu = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if on_gpu else host_memory_free()
        return Bytes(free + held if self.limit is None else min(free + held, self.limit))

    @property
    def offloads(self) -> bool:
        """Whether slots may have their KV in host memory: where that is not the device's own, or where so
        much of it is set apart."""
        return self.device.type == "cuda" or self.host_limit is not None

    def host_memory_free(self, held: Bytes = NOTHING) -> Bytes:
        """Bytes free for KV of offloaded slots, within their limit. On a CPU they are what is left beside
        `memory_free(held)`, and none where nobody set them apart."""
        if not self.offloads:
            return NOTHING
        free = host_memory_free()
        if self.device.type == "cpu":
            free = Bytes(max(0, free + held - self.memory_free(held)))
        return free if self.host_limit is None else min(free, self.host_limit)


def open_machine(
    device: str | None, threads: int | None, limit: Bytes | None, host_limit: Bytes | None = None
) -> Machine:
    """The machine to use: CUDA where there is one unless told otherwise. Sets torch's thread count.

    Raises: ConfigError for a device that is not there, or for host memory set apart beside a CPU's memory
    of which nothing is.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name} is not a device", hint="use cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device {name} is not available here", hint="use --device cpu")
    if chosen.type == "cpu" and host_limit is not None and limit is None:
        raise ConfigError(
            "--host-memory without --memory: a CPU's KV lies in host memory anyhow",
            hint="say with --memory how much is for weights and for slots that are not offloaded",
        )
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return Machine(chosen, count, limit, host_limit)
