"""Linear layers in native code (`kernels/cpu`), whose weights are read where they lie.

A row's result is bitwise the same whatever other rows there are: it is summed over the input features in one order, in
float32, and rounded once.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch

from batchkv.kernels.native_activation import ACTIVATIONS, Activation
from batchkv.kernels.native_library import DTYPES, fits, instruction_set_number, instruction_sets, native_library

_STRIP_ROWS, _STRIP_FEATURES = 48, 32  # multiples of what any instruction set takes at once


class LinearLayer(ctypes.Structure):
    """A layer as the C interface has it."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("strips", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library()
    if library is None or not fits(library, linear=LinearLayer):
        return None
    library.batchkv_linear.argtypes, library.batchkv_linear.restype = [ctypes.c_int32, ctypes.c_void_p], None
    return library


def is_fastest(dtype: torch.dtype) -> bool:
    """Whether there is nothing faster in this dtype for this processor than these layers.

    The others are oneDNN's products of packed weights. Where AVX2 is the best, they take as long in float32, and in
    bfloat16 there are none. With AVX-512 they take a fifth less time in float32. In bfloat16 with AMX they take 5 to
    15 % less from 256 rows on, 10 to 40 % more up to 16, and a copy of the weights; without AMX it was not measured.
    """
    if _library() is None or dtype not in DTYPES:
        return False
    best = instruction_sets()[0]
    return best == "avx2" or (best == "amx" and dtype == torch.bfloat16)


def is_covered(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernel computes a layer with this weight [N, K] and bias [N]."""
    return (
        _library() is not None
        and weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.ndim == 2
        and weight.numel() > 0
        and weight.stride(1) == 1
        and (bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def linear(
    rows: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, instruction_set: str | None = None
) -> torch.Tensor:
    """`torch.nn.functional.linear`, without gradients: [..., K] to [..., N].

    Args:
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: the layer is not one that `is_covered`, or the rows are of another dtype, width or device.
        RuntimeError: the processor has not these instructions.
    """
    return _compute(rows, weight_NK, bias_N, None, "silu", instruction_set)


def gated_linear(
    rows: torch.Tensor,
    gate_NK: torch.Tensor,
    weight_NK: torch.Tensor,
    activation: Activation,
    instruction_set: str | None = None,
) -> torch.Tensor:
    """`activation(rows @ gate.T) * (rows @ weight.T)`, without gradients: [..., K] to [..., N].

    Both products and the activation are rounded to the dtype, as if each was a layer of its own.

    Args:
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: gate or weight are not such as `is_covered`, or do not go together with each other or the rows.
        RuntimeError: the processor has not these instructions.
    """
    if not is_covered(gate_NK, None) or (gate_NK.dtype, gate_NK.shape) != (weight_NK.dtype, weight_NK.shape):
        found = f"{gate_NK.dtype} {tuple(gate_NK.shape)} and {weight_NK.dtype} {tuple(weight_NK.shape)}"
        raise ValueError(f"the native kernel does not compute a gate and a layer with weights {found}")
    return _compute(rows, weight_NK, None, gate_NK, activation, instruction_set)


def _compute(
    rows: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    gate_NK: torch.Tensor | None,
    activation: Activation,
    instruction_set: str | None,
) -> torch.Tensor:
    library = _library()
    if library is None or not is_covered(weight_NK, bias_N):
        raise ValueError("the native kernel does not compute this layer: ask is_covered first")
    out_features, in_features = weight_NK.shape
    if (rows.dtype, rows.shape[-1:], rows.device) != (weight_NK.dtype, weight_NK.shape[1:], weight_NK.device):
        found, wanted = f"{rows.dtype} {tuple(rows.shape)}", f"{weight_NK.dtype} [..., {in_features}]"
        raise ValueError(f"rows are {found}, the layer takes {wanted}")
    layer = prepare(weight_NK, bias_N, gate_NK, activation)
    out = rows.new_empty(*rows.shape[:-1], out_features)
    rows = rows.contiguous()
    num_rows = math.prod(rows.shape[:-1])
    strips = strips_of(num_rows, in_features)
    point(layer, rows, out, strips, num_rows)
    library.batchkv_linear(instruction_set_number(instruction_set), ctypes.byref(layer))
    return out


def prepare(
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    gate_NK: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> LinearLayer:
    """A layer that only lacks its rows and where their results go. It does not keep its weights alive."""
    return LinearLayer(
        weight=weight_NK.data_ptr(),
        bias=None if bias_N is None else bias_N.data_ptr(),
        gate=None if gate_NK is None else gate_NK.data_ptr(),
        in_features=weight_NK.shape[1],
        out_features=weight_NK.shape[0],
        weight_stride=weight_NK.stride(0),
        gate_stride=0 if gate_NK is None else gate_NK.stride(0),
        activation=ACTIVATIONS[activation],
        dtype=DTYPES[weight_NK.dtype],
    )


def point(layer: LinearLayer, rows: torch.Tensor, out: torch.Tensor, strips: torch.Tensor, num_rows: int) -> None:
    """Has a layer read these rows, of which all are contiguous, and write these results; `strips` as of `strips_of`."""
    layer.rows, layer.out, layer.strips, layer.num_rows = rows.data_ptr(), out.data_ptr(), strips.data_ptr(), num_rows


def strips_of(num_rows: int, in_features: int) -> torch.Tensor:
    """Room for the rows of a layer in the order in which the kernel reads them."""
    size = _up_to(num_rows, _STRIP_ROWS) * _up_to(in_features, _STRIP_FEATURES)
    return torch.empty(size, dtype=torch.float32, device="cpu")


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
