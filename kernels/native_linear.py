"""Linear layers in native code (`kernels/cpu`), whose weights are read where they lie.

A row's result is bitwise the same whatever other rows there are: it is summed over the input features in ascending
order, in float32, and rounded once.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from batchkv.kernels.native_library import instruction_set_number, instruction_sets, open_library

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Linear(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = open_library(linear=_Linear)
    if library is not None:
        library.batchkv_linear.argtypes, library.batchkv_linear.restype = [ctypes.c_int32, ctypes.c_void_p], None
    return library


@cache
def is_fastest() -> bool:
    """Whether there is nothing faster for this processor: where AVX2 is its best, oneDNN's products of packed weights
    take as long in float32, and in bfloat16 there are none. With AVX-512 it was not measured."""
    return _library() is not None and instruction_sets()[0] == "avx2"


def is_covered(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernel computes a layer with this weight [N, K] and bias [N]."""
    return (
        _library() is not None
        and weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and weight.stride(1) == 1
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
    )


def linear(
    rows: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, instruction_set: str | None = None
) -> torch.Tensor:
    """`torch.nn.functional.linear` of a layer that `is_covered`, without gradients: [..., K] to [..., N].

    Args:
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: the rows are of another dtype or width than the weight.
    """
    out_features, in_features = weight_NK.shape
    if rows.dtype != weight_NK.dtype or rows.shape[-1] != in_features:
        raise ValueError(
            f"rows are {rows.dtype} {tuple(rows.shape)}, the layer takes {weight_NK.dtype} [..., {in_features}]"
        )
    library = _library()
    if library is None:
        raise RuntimeError("there are no native kernels: ask is_covered first")
    rows = rows.contiguous()
    out = rows.new_empty(*rows.shape[:-1], out_features)
    layer = _Linear(
        rows.data_ptr(),
        weight_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        out.data_ptr(),
        out.numel() // out_features,
        in_features,
        out_features,
        weight_NK.stride(0),
        _DTYPES[rows.dtype],
    )
    number = instruction_set_number(instruction_set or instruction_sets()[0])
    library.batchkv_linear(number, ctypes.byref(layer))
    return out
