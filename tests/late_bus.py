"""A bus between a device and host memory that are both the CPU's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bbquic.kv.offload import Arrival, Sent


class LateBus:
    """A bus between two parts of the CPU's memory that copies down as late as it may, with one buffer each
    way as on CUDA: what is in a buffer too early or for too short is wrong."""

    def __init__(self) -> None:
        self.arrives = threading.Event()  # nothing does before
        self.arrives.set()
        self._rows, self._answers = torch.empty(0), torch.empty(0)
        self.sent: list[PlainSent] = []

    def down(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._rows = room(self._rows, flat.numel())
        return LateArrival(self, flat, self._rows, [tensor.shape for tensor in tensors])

    def answers(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        self._answers = room(self._answers, sum(torch.Size(shape).numel() for shape in shapes))
        self._answers.fill_(torch.nan)
        return split(self._answers, shapes)

    def up(self, tensor: torch.Tensor) -> Sent:
        self.sent.append(PlainSent(tensor.clone()))
        return self.sent[-1]


@dataclass
class LateArrival:
    bus: LateBus
    flat: torch.Tensor
    room: torch.Tensor
    shapes: list[torch.Size]

    def wait(self) -> list[torch.Tensor]:
        self.bus.arrives.wait()
        self.room[: self.flat.numel()] = self.flat
        return split(self.room, self.shapes)


@dataclass
class PlainSent:
    tensor: torch.Tensor
    was_waited_for: bool = False

    def wait(self) -> None:
        self.was_waited_for = True


def room(buffer: torch.Tensor, values: int) -> torch.Tensor:
    return buffer if buffer.numel() >= values else torch.empty(2 * values)


def split(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    counts = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split(flat[: sum(counts)], counts)
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
