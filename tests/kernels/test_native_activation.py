"""Native activations are torch's, and an element has the same bits wherever it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from batchkv.kernels.native_activation import Activation, activate
from tests.native_kernels import INSTRUCTION_SETS, needs_native

pytestmark = needs_native

EXACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", list(EXACT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 7, 16, 4099, 70_000])
def test_it_is_what_torch_computes(instruction_set: str, kind: Activation, dtype: torch.dtype, size: int) -> None:
    rows = (8 * torch.randn(size, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = activate(rows, kind, instruction_set)
    exact = EXACT[kind](rows.double())
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1 / 256  # half a unit of the last place, and a bit
    assert torch.allclose(found.double(), exact, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", list(EXACT))
def test_the_ends_of_floats(instruction_set: str, kind: Activation) -> None:
    rows = torch.tensor([0.0, -0.0, 90.0, -90.0, 1e30, -1e30, 3e38, -3e38, torch.inf, torch.nan, 1e-30, -1e-30])
    found = activate(rows, kind, instruction_set)
    assert torch.allclose(found, EXACT[kind](rows), rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", list(EXACT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_has_the_same_bits_wherever_it_stands(
    instruction_set: str, kind: Activation, dtype: torch.dtype
) -> None:
    rows = torch.randn(70_001, generator=torch.Generator().manual_seed(0)).to(dtype)  # enough for several threads
    expected = activate(rows, kind, instruction_set)
    for begin in range(19):
        assert torch.equal(activate(rows[begin:].clone(), kind, instruction_set), expected[begin:])
        assert torch.equal(activate(rows[: 100 + begin].clone(), kind, instruction_set), expected[: 100 + begin])


def test_rows_of_any_shape_and_order_in_memory() -> None:
    rows = torch.randn(3, 5, 70)
    assert torch.equal(activate(rows, "silu").flatten(), activate(rows.flatten(), "silu"))
    assert torch.equal(activate(rows.transpose(0, 2), "silu"), activate(rows, "silu").transpose(0, 2))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not compute silu of torch\.float16"):
        activate(torch.zeros(4, dtype=torch.float16), "silu")
