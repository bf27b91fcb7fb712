"""Linear layers on a CPU, their weights laid out once for oneDNN's kernels.

torch multiplies float32 matrices by MKL, which wants 1.4 times as long for the few rows of a decode step, and
with few rows hardly gains by a second thread. torch has oneDNN's operator for its own compiler; it is looked
up and tried before it is relied on, and without it the layers stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

ROWS = 16  # oneDNN picks a layout for so many; measured: as good as the exact number from 1 to 512
TOLERANCE = 1e-4  # of the largest value: sums in another order, nothing else

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights; it cannot be trained, moved or saved."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [out, in], float32 on a CPU; only a packed copy of it is kept."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        self._bias = None if bias is None else bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return _multiply(rows, self._packed, self._bias)


def _multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result


@functools.cache
def packing_works() -> bool:
    """Whether this build of torch has the operator, and it computes what `nn.Linear` does."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator)
    bias = torch.randn(96, generator=generator)
    rows = torch.randn(1, 5, 64, generator=generator)
    try:
        with torch.inference_mode():
            found = PackedLinear(weight, bias)(rows)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = nn.functional.linear(rows, weight, bias)
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    )


def packs(weight: torch.Tensor) -> bool:
    """Whether a weight gains by packing, here."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and packing_works()


def pack_linears(module: nn.Module) -> None:
    """Put packed layers in the place of the linear ones inside `module`, one after another."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            if packs(child.weight):
                setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
