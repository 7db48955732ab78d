"""Whether a row's results depend, bit for bit, on what else is in the step.

Attention, linear layers and activations in native code do not let them. A library's matrix product may: it picks its
kernel, and with it the order of its sums, by the number of rows. And an activation of torch's may: it computes the ends
of each thread's share with other code than the rest, so it matters where the shares end. Both are tried here, in the
sizes that steps have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from batchkv.activations import are_native
from batchkv.fast_layers import with_fast_layers
from batchkv.kernels import native_linear
from batchkv.linear_layers import PackedLinear, Product, product_of
from batchkv.model_lock import alone_with

_MULTIPLES = (16, 32)  # filling up to more rows than this would cost time
_MOST_PRODUCT_ROWS = 128
_MOST_ACTIVATION_ROWS = 512
_WIDEST = 1 << 15
_ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    nn.functional.silu,
    lambda x: nn.functional.gelu(x, approximate="tanh"),
)


_Signature = tuple[type[nn.Module], int, int, bool, torch.dtype, Product | None]
_found: dict[tuple[frozenset[_Signature], int, bool], int | None] = {}  # by layers, threads, native activations


@torch.inference_mode()
def row_multiple(model: PreTrainedModel) -> int | None:
    """A number any multiple of which, as rows of a step, gives each row the same bits; tried on the model's weights.

    It holds for the number of threads that torch has now. Layers that are alike are tried once in a process.

    Returns:
        16 or 32; None if neither does, or if the model has products that are not those of linear layers over the rows
        of a step: layers of experts multiply as many rows as are routed to each.
    """
    if not _has_only_linears(model):
        return None
    linears = {_signature(m): m for m in model.modules() if isinstance(m, (nn.Linear, PackedLinear))}
    has_native = are_native(model, {_dtype(linear) for linear in linears.values()})
    key = frozenset(linears), torch.get_num_threads(), has_native
    if key not in _found:
        with alone_with(model):
            _found[key] = _tried_multiple(list(linears.values()), try_activations=not has_native)
    return _found[key]


def _tried_multiple(linears: list[nn.Linear | PackedLinear], *, try_activations: bool) -> int | None:
    widths = {(linear.out_features, _dtype(linear)) for linear in linears if try_activations}
    tried = [linear for linear in linears if product_of(linear) is not native_linear.linear]
    with with_fast_layers(nn.ModuleList(linears)):  # as when the model is run
        for multiple in _MULTIPLES:
            of_products = (_is_invariant(m, _rows_of(m, _MOST_PRODUCT_ROWS), multiple) for m in tried)
            if all(of_products) and all(_activations_are_invariant(*width, multiple) for width in widths):
                return multiple
    return None


def _has_only_linears(model: nn.Module) -> bool:
    """Whether all matrices are those of linear layers, which the whole step goes through, and embeddings."""
    matrices = [m for m in model.modules() if any(p.ndim >= 2 for p in m.parameters(recurse=False))]
    has_experts = any("expert" in name for name, _ in model.named_modules())
    return not has_experts and all(isinstance(m, (nn.Linear, nn.Embedding)) for m in matrices)


def _signature(linear: nn.Linear | PackedLinear) -> _Signature:
    """Layers that are alike in these run the same code."""
    has_bias = linear.bias is not None
    return type(linear), linear.in_features, linear.out_features, has_bias, _dtype(linear), product_of(linear)


def _dtype(linear: nn.Linear | PackedLinear) -> torch.dtype:
    return linear.dtype if isinstance(linear, PackedLinear) else linear.weight.dtype


def _rows_of(linear: nn.Linear | PackedLinear, count: int) -> torch.Tensor:
    return _random_rows(count, linear.in_features).to(_dtype(linear))


def _random_rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _is_invariant(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, multiple: int) -> bool:
    """Whether multiples of the first and of the last rows give what all rows give together."""
    expected = function(rows)
    return all(
        torch.equal(function(rows[part].clone()), expected[part])
        for n in range(multiple, len(rows), multiple)
        for part in (slice(n), slice(-n, None))
    )


def _activations_are_invariant(width: int, dtype: torch.dtype, multiple: int) -> bool:
    """Over a step's rows of `width`, split among the threads as torch does; nothing follows a vocabulary's width."""
    if width > _WIDEST:
        return True
    rows = _random_rows(_MOST_ACTIVATION_ROWS, width).to(dtype)
    return all(_is_invariant(activation, rows, multiple) for activation in _ACTIVATIONS)
