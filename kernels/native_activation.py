"""Activations in native code (`kernels/cpu`): all elements by the same instructions, so that none depends on where it
stands or on how many threads share the work.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Literal

import torch

from batchkv.kernels.native_library import DTYPES, instruction_set_number, native_library

Activation = Literal["silu", "gelu_tanh"]

_KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library()
    if library is None or not hasattr(library, "batchkv_activate"):
        return None
    number, pointer = ctypes.c_int32, ctypes.c_void_p
    library.batchkv_activate.argtypes = [number, number, pointer, pointer, ctypes.c_int64, number]
    library.batchkv_activate.restype = None
    return library


def is_covered(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for rows of a dtype that are there."""
    return device.type == "cpu" and dtype in DTYPES and _library() is not None


def activate(rows: torch.Tensor, kind: Activation, instruction_set: str | None = None) -> torch.Tensor:
    """`torch.nn.functional.silu`, or `gelu` with `approximate="tanh"`, without gradients.

    Args:
        rows: of any shape.
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: the rows are not such as `is_covered`.
        RuntimeError: the processor has not these instructions.
    """
    library = _library()
    if library is None or not is_covered(rows.device, rows.dtype):
        raise ValueError(f"the native kernel does not compute {kind} of {rows.dtype} on {rows.device}")
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    library.batchkv_activate(
        instruction_set_number(instruction_set),
        _KINDS[kind],
        rows.data_ptr(),
        out.data_ptr(),
        rows.numel(),
        DTYPES[rows.dtype],
    )
    return out
