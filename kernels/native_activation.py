"""Activations in native code (`kernels/cpu`): all elements by the same instructions, so that none depends on where it
stands or on how many threads share the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch

from batchkv.kernels.native_library import DTYPES, instruction_set_number, native_function

Activation = Literal["silu", "gelu_tanh"]

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}  # as the C interface numbers them


@cache
def _activate() -> Callable[..., None] | None:
    number, pointer = ctypes.c_int32, ctypes.c_void_p
    return native_function("batchkv_activate", number, number, pointer, pointer, ctypes.c_int64, number)


def is_covered(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for rows of a dtype that are there."""
    return device.type == "cpu" and dtype in DTYPES and _activate() is not None


def activate(rows: torch.Tensor, kind: Activation, instruction_set: str | None = None) -> torch.Tensor:
    """`torch.nn.functional.silu`, or `gelu` with `approximate="tanh"`, without gradients.

    Args:
        rows: of any shape.
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: the rows are not such as `is_covered`.
        RuntimeError: the processor has not these instructions.
    """
    native = _activate()
    if native is None or not is_covered(rows.device, rows.dtype):
        raise ValueError(f"the native kernel does not compute {kind} of {rows.dtype} on {rows.device}")
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    native(
        instruction_set_number(instruction_set),
        ACTIVATIONS[kind],
        rows.data_ptr(),
        out.data_ptr(),
        rows.numel(),
        DTYPES[rows.dtype],
    )
    return out
