"""Packed linear layers compute what plain ones do, and stand in only where they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bbquic.model.linear import PackedLinear, pack_linears, packing_works

needs_packing = pytest.mark.skipif(not packing_works(), reason="this build of torch lacks the operator")


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 300])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_layer_gives_what_the_plain_one_does(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(72, 200, bias=has_bias)
    values = torch.randn(1, rows, 72)
    with torch.inference_mode():
        expected = plain(values)
        found = PackedLinear(plain.weight, plain.bias)(values)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_packing
def test_only_float32_layers_are_replaced_wherever_they_are() -> None:
    inner = nn.Sequential(nn.SiLU(), nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(4, 8), inner)
    pack_linears(model)
    assert [type(child) for child in model] == [PackedLinear, nn.Sequential]
    assert [type(child) for child in inner] == [nn.SiLU, nn.Linear, PackedLinear]


@needs_packing
def test_a_row_is_the_same_whatever_rows_are_beside_it() -> None:
    """Not promised by any kernel, but close enough that no batch mate changes a token."""
    torch.manual_seed(3)
    layer = PackedLinear(torch.randn(200, 72), None)
    values = torch.randn(64, 72)
    with torch.inference_mode():
        together, alone = layer(values), torch.cat([layer(values[i : i + 1]) for i in range(64)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)
