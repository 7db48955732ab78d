"""Native norms are Llama's, and a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from batchkv.kernels.native_norm import is_covered, rms_norm
from tests.native_kernels import INSTRUCTION_SETS, needs_native

pytestmark = needs_native


def layer_of(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    layer = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", [1, 7, 16, 64, 100, 576, 5000])
@torch.no_grad()
def test_it_is_what_llama_computes(instruction_set: str, width: int) -> None:
    layer, rows = layer_of(width, torch.float32), rows_of(2, 30, width)
    found = rms_norm(rows, layer.weight, layer.variance_epsilon, instruction_set)
    assert torch.allclose(found, layer(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@torch.no_grad()
def test_in_bfloat16_it_is_rounded_where_llama_rounds(instruction_set: str) -> None:
    layer, rows = layer_of(600, torch.bfloat16), rows_of(50, 600, dtype=torch.bfloat16)
    found, expected = rms_norm(rows, layer.weight, 1e-5, instruction_set), layer(rows)
    differs = found != expected  # where the scale, which is summed in another order, is at the edge of two roundings
    assert differs.float().mean() < 0.01
    assert torch.allclose(found.float(), expected.float(), rtol=1 / 64)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_company(instruction_set: str, dtype: torch.dtype) -> None:
    layer, rows = layer_of(100, dtype), rows_of(1000, 100, dtype=dtype)
    expected = rms_norm(rows, layer.weight, 1e-5, instruction_set)
    for some in ([3], [999, 0, 3], list(range(17))):
        assert torch.equal(rms_norm(rows[some], layer.weight, 1e-5, instruction_set), expected[some])


def test_other_dtypes_and_widths_are_refused() -> None:
    weight = torch.ones(8)
    assert not is_covered(torch.zeros(2, 8, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="does not compute this norm"):
        rms_norm(torch.zeros(2, 9), weight, 1e-5)
