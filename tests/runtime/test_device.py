"""The CPU as a device: bytes are not copied on their way in or out, unless somebody else has them."""

from __future__ import annotations

import numpy as np
import torch

from bbquic.runtime.device import HostDevice
from bbquic.transport.message import Kind, Message, MessageDecoder, encode


def received(data: bytes) -> memoryview:
    """What a peer sent, as the transport hands it over."""
    decoder = MessageDecoder()
    decoder.feed_untrusted(b"".join(encode(Message(Kind.HIDDEN, b"", data))))
    body = decoder.finish_untrusted().body
    assert isinstance(body, memoryview)
    return body


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def test_a_tensor_lies_where_it_was_received() -> None:
    values = torch.arange(12, dtype=torch.float32)
    body = received(values.numpy().tobytes())
    tensor = HostDevice().bring(body, torch.float32)
    assert torch.equal(tensor, values)
    assert tensor.data_ptr() == address(body)


def test_memory_that_others_may_read_is_copied() -> None:
    data = torch.arange(4, dtype=torch.float32).numpy().tobytes()
    tensor = HostDevice().bring(data, torch.float32)
    tensor += 1
    assert data == torch.arange(4, dtype=torch.float32).numpy().tobytes()


def test_what_leaves_is_the_tensors_own_memory_and_cannot_be_written_to() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    [buffer] = HostDevice().fetch([tensor])
    assert isinstance(buffer, memoryview)
    assert buffer.readonly
    assert address(buffer) == tensor.data_ptr()
    assert bytes(buffer) == tensor.numpy().tobytes()
