"""The native linear layer computes what it should, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv.kernels.native_activation import ACTIVATIONS, Activation, activate
from batchkv.kernels.native_linear import gated_linear, is_covered, linear
from tests.native_kernels import INSTRUCTION_SETS, needs_native

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the results' root mean square

# Around what vectors, strips of rows, panels of output features and parts of input features are cut into.
ROWS = st.sampled_from([0, 1, 2, 3, 5, 6, 7, 12, 13, 16, 33])
INPUTS = st.sampled_from([1, 7, 8, 17, 40, 319, 320, 321, 600, 641])
OUTPUTS = st.sampled_from([1, 15, 16, 17, 40])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=60, deadline=None)
@given(
    num_rows=ROWS,
    in_features=INPUTS,
    out_features=OUTPUTS,
    has_bias=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    seed=st.integers(0, 1 << 16),
)
def test_a_layer_is_the_product_in_float64(
    instruction_set: str,
    num_rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, in_features, generator=random).to(dtype)
    weight = torch.randn(out_features, in_features, generator=random).to(dtype)
    bias = torch.randn(out_features, generator=random).to(dtype) if has_bias else None
    found = linear(rows, weight, bias, instruction_set)
    expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.dtype == dtype
    assert found.shape == expected.shape
    error = (found.double() - expected).abs()
    assert bool((error <= TOLERANCE[dtype] * (in_features**0.5 + expected.abs())).all())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=30, deadline=None)
@given(picked=st.lists(st.integers(0, 99), min_size=1, max_size=40), in_features=INPUTS)
def test_rows_have_the_same_bits_in_any_company(
    dtype: torch.dtype, instruction_set: str, picked: list[int], in_features: int
) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(100, in_features).to(dtype), torch.randn(40, in_features).to(dtype)
    together = linear(rows, weight, None, instruction_set)
    assert torch.equal(linear(rows[picked], weight, None, instruction_set), together[picked])


@needs_native
def test_rows_may_have_any_shape_and_lie_anywhere() -> None:
    rows, weight = torch.randn(3, 20, 5).transpose(1, 2), torch.randn(8, 20)
    assert torch.allclose(linear(rows, weight), rows @ weight.T, atol=1e-5)
    assert linear(torch.randn(0, 7, 20), weight).shape == (0, 7, 8)


@needs_native
def test_a_weight_may_be_a_part_of_a_larger_one() -> None:
    weight = torch.randn(8, 60)[:, 20:40]
    rows = torch.randn(3, 20)
    assert is_covered(weight, None)
    assert torch.allclose(linear(rows, weight), rows @ weight.T, atol=1e-5)


@needs_native
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_spoils_no_other(bad: float) -> None:
    for dtype in TOLERANCE:
        rows, weight = torch.ones(7, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype)
        rows[3] = bad
        found = linear(rows, weight).float()
        assert found[3].isfinite().logical_not().all()
        assert bool((found[[0, 1, 2, 4, 5, 6]] == 16).all())


def test_what_the_kernel_does_not_compute_is_not_covered() -> None:
    assert not is_covered(torch.zeros(4, 4, dtype=torch.float16), None)
    assert not is_covered(torch.zeros(4, 4, device="meta"), None)
    assert not is_covered(torch.zeros(4, 4).T[:, ::2], None)
    assert not is_covered(torch.zeros(4, 4), torch.zeros(8)[::2])
    assert not is_covered(torch.zeros(4, 4), torch.zeros(4, dtype=torch.bfloat16))
    assert not is_covered(torch.zeros(4, 4), torch.zeros(1))
    assert not is_covered(torch.zeros(4), None)
    assert not is_covered(torch.zeros(4, 0), None)
    assert not is_covered(torch.zeros(0, 4), None)
    with pytest.raises(ValueError, match="ask is_covered first"):
        linear(torch.zeros(2, 4), torch.zeros(4, 4), torch.zeros(1))


@needs_native
def test_rows_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the layer takes torch.float32 \[\.\.\., 4\]"):
        linear(torch.zeros(2, 5), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"rows are torch\.bfloat16"):
        linear(torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="the layer takes"):
        linear(torch.zeros(2, 4, device="meta"), torch.zeros(3, 4))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=30, deadline=None)
@given(
    num_rows=ROWS,
    in_features=INPUTS,
    out_features=OUTPUTS,
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    seed=st.integers(0, 1 << 16),
)
def test_a_gate_computes_the_bits_of_three_layers_one_after_the_other(
    activation: Activation,
    instruction_set: str,
    num_rows: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, in_features, generator=random).to(dtype)
    gate, weight = (torch.randn(out_features, in_features, generator=random).to(dtype) for _ in range(2))
    expected = activate(linear(rows, gate, None, instruction_set), activation, instruction_set)
    expected *= linear(rows, weight, None, instruction_set)
    assert torch.equal(gated_linear(rows, gate, weight, activation, instruction_set), expected)


@needs_native
def test_a_gate_and_its_layer_may_be_parts_of_one_weight() -> None:
    both, rows = torch.randn(16, 20), torch.randn(3, 20)
    gate, weight = both[::2], both[1:, :][::2]
    expected = activate(linear(rows, gate.contiguous()), "silu") * linear(rows, weight.contiguous())
    assert torch.equal(gated_linear(rows, gate, weight, "silu"), expected)


@needs_native
def test_a_gate_of_another_shape_or_dtype_is_refused() -> None:
    weight = torch.zeros(4, 8)
    for gate in (torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, 16)[:, ::2]):
        with pytest.raises(ValueError, match="a gate and a layer with weights"):
            gated_linear(torch.zeros(2, 8), gate, weight, "silu")
