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
    """A device and how much of it a node may use. `limit` caps what is reported as free memory."""

    device: torch.device
    threads: int
    limit: Bytes | None = None

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


def open_machine(device: str | None, threads: int | None, limit: Bytes | None) -> Machine:
    """The machine to use: CUDA where there is one unless told otherwise. Sets torch's thread count.

    Raises: ConfigError for a device that is not there.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name} is not a device", hint="use cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device {name} is not available here", hint="use --device cpu")
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return Machine(chosen, count, limit)
