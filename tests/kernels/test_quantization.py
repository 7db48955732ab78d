"""Quantized vectors come back within half a step, whatever is in them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchkv.kernels.quantization import is_quantized, quantize, scale_bytes, storage_dtype

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127, FP8: 448}
vectors = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9)


def quantize_one(vector: list[float], dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    stored_KTD, scale_KT = quantize(torch.tensor(vector).reshape(1, 1, -1), dtype)
    return stored_KTD[0, 0].float(), float(scale_KT)


@given(vector=vectors)
def test_int8_is_within_half_a_step_and_keeps_the_largest(vector: list[float]) -> None:
    stored, scale = quantize_one(vector, INT8)
    error = (stored.double() * scale - torch.tensor(vector).double()).abs().max()
    assert error <= scale * (0.5 + 1e-5)  # 1e-5: scale and quotient are rounded to fp32
    if scale > 1e-30:  # else it is the smallest scale there is
        assert stored.abs().max() == 127


@given(vector=vectors)
def test_fp8_is_within_a_sixteenth_of_an_element(vector: list[float]) -> None:
    """Three bits of mantissa; below 2^-6 of a scale steps are 2^-9 of it."""
    stored, scale = quantize_one(vector, FP8)
    original = torch.tensor(vector).double()
    error = (stored.double() * scale - original).abs()
    assert (error <= torch.clamp(original.abs() / 16, min=scale * 2**-10) * (1 + 1e-5)).all()
    assert stored.abs().max() <= 448


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("vector", [[0.0, 0.0], [1e-45, -1e-44, 0.0], [1.5e-37]])
def test_vectors_of_zeros_and_of_next_to_nothing_are_finite(vector: list[float], dtype: torch.dtype) -> None:
    stored, scale = quantize_one(vector, dtype)
    assert scale > 0
    assert torch.allclose(stored * scale, torch.tensor(vector), rtol=0, atol=1e-36)
    assert stored.isfinite().all()


def test_ties_round_to_even() -> None:
    stored, scale = quantize_one([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], INT8)
    assert scale == 1
    assert stored.tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_the_scale_so(bad: float, dtype: torch.dtype) -> None:
    assert not math.isfinite(quantize_one([1.0, bad, 2.0], dtype)[1])


@pytest.mark.parametrize("dtype", LARGEST)
def test_each_head_and_token_has_its_own_scale(dtype: torch.dtype) -> None:
    vectors_KTD = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    stored_KTD, scale_KT = quantize(vectors_KTD.to(torch.bfloat16), dtype)
    assert (stored_KTD.dtype, stored_KTD.shape) == (dtype, (3, 5, 8))
    assert (scale_KT.dtype, scale_KT.shape) == (torch.float32, (3, 5))
    expected = vectors_KTD.to(torch.bfloat16).float().abs().amax(dim=2) / LARGEST[dtype]
    assert torch.equal(scale_KT, expected)


def test_auto_keeps_the_models_dtype_and_has_no_scales() -> None:
    assert storage_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert storage_dtype("int8", torch.bfloat16) == INT8
    assert storage_dtype("fp8", torch.float32) == FP8
    assert [is_quantized(dtype) for dtype in (torch.bfloat16, INT8, FP8)] == [False, True, True]
    assert [scale_bytes(dtype) for dtype in (torch.float32, INT8, FP8)] == [0, 4, 4]
