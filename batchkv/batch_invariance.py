"""Whether a row's results depend on what else is in the step.

Attention in native code does not let them. A matrix product may: a library picks its kernel, and with it the order of
its sums, by the number of rows. From some number of rows on it mostly does not; smaller steps are then filled up.
"""

from __future__ import annotations

import torch
from torch import nn

from batchkv.packed_linear import PackedLinear

_COUNTS = (*range(1, 18), 24, 33, 64, 100, 128)  # rows that are tried
_MULTIPLES = (16, 32)  # filling up to more rows than this would cost time


def row_multiple(model: nn.Module) -> int | None:
    """Any multiple of how many rows gives each row of the model's products the same bits, tried on its own weights.

    Returns:
        16 or 32; None if neither does, or if the rows of a product are not the step's: layers of experts multiply as
        many as are routed to each.
    """
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        return None
    linears = {_signature(m): m for m in model.modules() if isinstance(m, (nn.Linear, PackedLinear))}
    least = max((_least_rows_of(linear) for linear in linears.values()), default=1)
    return next((multiple for multiple in _MULTIPLES if least <= multiple), None)


def _signature(linear: nn.Linear | PackedLinear) -> tuple[type[nn.Module], int, int, bool, torch.dtype]:
    """Layers that are alike in these run the same code."""
    return type(linear), linear.in_features, linear.out_features, linear.bias is not None, _dtype(linear)


def _dtype(linear: nn.Linear | PackedLinear) -> torch.dtype:
    return linear.dtype if isinstance(linear, PackedLinear) else linear.weight.dtype


@torch.inference_mode()
def _least_rows_of(linear: nn.Linear | PackedLinear) -> int:
    """One more than the largest number of rows whose results differ from those of the largest tried."""
    rows = torch.randn(_COUNTS[-1], linear.in_features, generator=torch.Generator().manual_seed(0))
    rows = rows.to(_dtype(linear))
    expected = linear(rows)
    different = [n for n in _COUNTS[:-1] if not torch.equal(linear(rows[:n].clone()), expected[:n])]
    return 1 + max(different, default=0)
