"""Sampling from the logits of a vocabulary in native code (`kernels/cpu`): weights, and the search in their CDF.

Shape suffixes: B rows, V vocabulary, N blocks of K tokens. A row's bits depend on nothing but the row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from batchkv.kernels.native_library import instruction_set_number, native_function

_F32 = torch.float32


@cache
def _weigh() -> Callable[..., None] | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return native_function("batchkv_weigh", ctypes.c_int32, pointer, number, number, *[pointer] * 3, number, number)


@cache
def _search() -> Callable[..., None] | None:
    return native_function("batchkv_search", *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3)


def is_covered(device: torch.device) -> bool:
    """Whether there are kernels for tensors that are there."""
    return device.type == "cpu" and _weigh() is not None and _search() is not None


def weigh(
    logits_BV: torch.Tensor,
    best_B: torch.Tensor,
    temperature_B: torch.Tensor,
    weights_BNK: torch.Tensor,
    instruction_set: str | None = None,
) -> None:
    """exp((logits - best) / temperature) into `weights_BNK`, with zeros behind the end of the vocabulary.

    Args:
        logits_BV: fp32, rows contiguous.
        best_B: fp32, the greatest logit of each row: no weight is above 1. Where it is not finite there is no
            distribution, and weights are anything.
        temperature_B: fp32.
        weights_BNK: fp32, contiguous, with room for all of the vocabulary; K is a multiple of 16.
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: the tensors do not belong together.
    """
    rows, blocks, size = weights_BNK.shape
    best_B, temperature_B = best_B.contiguous(), temperature_B.contiguous()
    tensors = logits_BV, best_B, temperature_B, weights_BNK
    fit = len(logits_BV) == len(best_B) == len(temperature_B) == rows and logits_BV.shape[1] <= blocks * size
    native = _weigh()
    if (
        native is None
        or not fit
        or any(tensor.dtype != _F32 or tensor.device.type != "cpu" for tensor in tensors)
        or size % 16 != 0
        or logits_BV.stride(1) != 1
        or not weights_BNK.is_contiguous()
    ):
        kinds = [f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for tensor in tensors]
        raise ValueError(f"logits, best, temperature and weights do not belong together: {', '.join(kinds)}")
    native(
        instruction_set_number(instruction_set),
        logits_BV.data_ptr(),
        logits_BV.stride(0),
        logits_BV.shape[1],
        best_B.data_ptr(),
        temperature_B.data_ptr(),
        weights_BNK.data_ptr(),
        blocks * size,
        rows,
    )


def search(weights_BNK: torch.Tensor, sums_BN: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The tokens at the given points of the CDF, int64 [B], in double precision: first the block, then the token.

    Args:
        weights_BNK: fp32.
        sums_BN: fp32, of the weights of each block.
        uniform_B: fp64, in [0, 1).

    Raises:
        ValueError: the tensors do not belong together.
    """
    rows, blocks, size = weights_BNK.shape
    tokens_B = torch.empty(rows, dtype=torch.int64)
    weights_BNK, sums_BN, uniform_B = weights_BNK.contiguous(), sums_BN.contiguous(), uniform_B.contiguous()
    dtypes = weights_BNK.dtype, sums_BN.dtype, uniform_B.dtype
    native = _search()
    if (
        native is None
        or sums_BN.shape != (rows, blocks)
        or len(uniform_B) != rows
        or dtypes != (_F32, _F32, torch.float64)
    ):
        raise ValueError(f"weights {tuple(weights_BNK.shape)}, sums {tuple(sums_BN.shape)} and uniforms do not fit")
    native(
        weights_BNK.data_ptr(),
        sums_BN.data_ptr(),
        uniform_B.data_ptr(),
        tokens_B.data_ptr(),
        rows,
        blocks,
        size,
    )
    return tokens_B
