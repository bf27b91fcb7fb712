"""Where a stage computes, and how tensors get there and back.

On CUDA there is a stream that computes and one for each direction of copies; they wait for one another by
events, and only the outbound lane's thread waits for the device. On the CPU the same calls are plain copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from bbquic.runtime.pool import BufferPool
from bbquic.units import Bytes, Seconds

Buffer = bytes | memoryview

NOTHING_ELSE = nullcontext()
ALIGNMENT = 64  # bytes; where a tensor begins in a buffer that holds several
REBASE = 5.0  # s; events are timed in float32 milliseconds, which are microseconds for so long


class Moment(Protocol):
    """When a lane had done all it was asked before."""

    def seconds(self) -> Seconds:
        """On `time.monotonic()`; to be asked only once it is known to have passed."""


@dataclass(frozen=True, slots=True)
class HostMoment:
    """A moment that has passed."""

    at: Seconds

    def seconds(self) -> Seconds:
        return self.at


def now() -> HostMoment:
    return HostMoment(Seconds(time.monotonic()))


class Device(Protocol):
    """A lane's calls stand inside its context, in its own thread."""

    torch_device: torch.device
    overlaps: bool  # whether copies and computing go on at once, so that each lane needs its thread

    def inbound(self) -> AbstractContextManager[None]: ...

    def computing(self, after: Moment) -> AbstractContextManager[None]: ...

    def outbound(self, after: Moment) -> AbstractContextManager[None]: ...

    def moment(self) -> Moment:
        """When all that was asked so far of the lane whose context this is will have been done."""

    def bring(self, data: bytes | memoryview, dtype: torch.dtype) -> torch.Tensor:
        """Inbound: bytes as a tensor [n] on the device, copied once on the host."""

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """In a lane's context: it uses these, which another lane made, so their memory stays theirs."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
        """Outbound: tensors as bytes on the host, once they are computed; each is copied once there at most.

        They may be the tensors' own memory, which nobody may write to afterwards."""


class HostDevice:
    """The CPU, and memory that is the host's already."""

    overlaps = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def inbound(self) -> AbstractContextManager[None]:
        return NOTHING_ELSE

    def computing(self, after: Moment) -> AbstractContextManager[None]:
        return NOTHING_ELSE

    def outbound(self, after: Moment) -> AbstractContextManager[None]:
        return NOTHING_ELSE

    def moment(self) -> Moment:
        return now()

    def bring(self, data: bytes | memoryview, dtype: torch.dtype) -> torch.Tensor:
        is_ours = isinstance(data, memoryview) and not data.readonly  # as it was received, or decoded
        return torch.frombuffer(data if is_ours else bytearray(data), dtype=dtype)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
        return [_flat(tensor).numpy().data.toreadonly() for tensor in tensors]


@dataclass(frozen=True, slots=True)
class _Base:
    """An event whose time on the host is known."""

    event: torch.cuda.Event
    at: float


@dataclass(frozen=True, slots=True)
class _CudaMoment:
    event: torch.cuda.Event
    base: _Base  # recorded before the event

    def seconds(self) -> Seconds:
        return Seconds(self.base.at + self.base.event.elapsed_time(self.event) / 1e3)


class CudaDevice:
    """A GPU. What was queued on its default stream before, weights and arena, is waited for here."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._in, self._compute, self._out = (_stream(device) for _ in range(3))
        self.pinned_in: BufferPool[torch.Tensor] = BufferPool(_pinned)  # the inbound thread's
        self.pinned_out: BufferPool[torch.Tensor] = BufferPool(_pinned)  # the outbound thread's
        torch.cuda.synchronize(device)
        with torch.cuda.stream(self._out):
            self._base = _base()

    def inbound(self) -> AbstractContextManager[None]:
        return _on(self._in, None)

    def computing(self, after: Moment) -> AbstractContextManager[None]:
        return _on(self._compute, after)

    def outbound(self, after: Moment) -> AbstractContextManager[None]:
        return _on(self._out, after)

    def moment(self) -> Moment:
        return _CudaMoment(_event(is_timed=True), self._base)

    def bring(self, data: bytes | memoryview, dtype: torch.dtype) -> torch.Tensor:
        size = len(data)
        tensor = torch.empty(
            size, dtype=torch.uint8, device=self.torch_device
        )  # before what is to be given back
        lease = self.pinned_in.take(size)
        staging = lease.buffer[:size]
        staging.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        tensor.copy_(staging, non_blocking=True)
        copied = _event()
        self.pinned_in.give_back(lease, copied)
        return tensor.view(dtype)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.torch_device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
        self.hold(tensors)
        flat = [_flat(tensor) for tensor in tensors]
        places, end = [], 0
        for one in flat:
            places.append(slice(end, end + len(one)))
            end += -(-len(one) // ALIGNMENT) * ALIGNMENT
        lease = self.pinned_out.take(end)
        try:
            for one, place in zip(flat, places, strict=True):
                lease.buffer[place].copy_(one, non_blocking=True)
            _event().synchronize()
            taken: list[Buffer] = [lease.buffer[place].numpy().tobytes() for place in places]
        finally:
            self.pinned_out.give_back(lease)
        if time.monotonic() - self._base.at > REBASE:
            self._base = _base()
        return taken


def device_for(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes [n]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _pinned(size: Bytes) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not say


def _event(*, is_timed: bool = False) -> torch.cuda.Event:
    """Recorded on the current stream. A thread that waits for it sleeps in place of spinning."""
    event = torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _base() -> _Base:
    """A base of now, on the current stream, for which the thread waits some microseconds."""
    event = _event(is_timed=True)
    event.synchronize()
    return _Base(event, time.monotonic())


@contextmanager
def _on(stream: torch.cuda.Stream, after: Moment | None) -> Iterator[None]:
    with torch.cuda.stream(stream):
        if isinstance(after, _CudaMoment):
            stream.wait_event(after.event)
        yield
