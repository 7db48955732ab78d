"""RMS norms in native code (`kernels/cpu`): a row's bits depend on nothing but the row and the weight."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from batchkv.kernels.native_library import DTYPES, instruction_set_number, native_function


@cache
def _rms_norm() -> Callable[..., None] | None:
    number, pointer, size = ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64
    return native_function("batchkv_rms_norm", number, *[pointer] * 3, size, size, ctypes.c_float, number)


def is_covered(rows: torch.Tensor, weight_D: torch.Tensor) -> bool:
    """Whether there is a kernel for these rows [..., D] and this weight."""
    return (
        _rms_norm() is not None
        and rows.device.type == weight_D.device.type == "cpu"
        and rows.dtype == weight_D.dtype
        and rows.dtype in DTYPES
        and rows.shape[-1:] == weight_D.shape
        and weight_D.is_contiguous()
    )


def rms_norm(
    rows: torch.Tensor, weight_D: torch.Tensor, epsilon: float, instruction_set: str | None = None
) -> torch.Tensor:
    """`weight * (rows / sqrt(mean of squares + epsilon))` in float32; the bracket is rounded to the dtype of the rows
    before it is multiplied, as in Llama. Without gradients.

    Args:
        rows: [..., D].
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: rows and weight are not such as `is_covered`.
        RuntimeError: the processor has not these instructions.
    """
    native = _rms_norm()
    if native is None or not is_covered(rows, weight_D):
        raise ValueError("the native kernel does not compute this norm: ask is_covered first")
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    native(
        instruction_set_number(instruction_set),
        rows.data_ptr(),
        weight_D.data_ptr(),
        out.data_ptr(),
        rows.numel() // max(1, len(weight_D)),
        len(weight_D),
        epsilon,
        DTYPES[rows.dtype],
    )
    return out
