"""Sampling from the logits of a vocabulary in native code (`kernels/cpu`): weights, and the search in their CDF.

Shape suffixes: B rows, V vocabulary, N blocks of K tokens. A row's bits depend on nothing but the row.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from batchkv.kernels.native_library import instruction_set_number, instruction_sets, open_library

_F32 = torch.float32


class _Vocabulary(ctypes.Structure):
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("uniform", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("logits_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int32),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = open_library(vocabulary=_Vocabulary)
    if library is not None:
        library.batchkv_weigh.argtypes = [ctypes.c_int32, ctypes.c_void_p]
        library.batchkv_search.argtypes = [ctypes.c_void_p]
        library.batchkv_weigh.restype = library.batchkv_search.restype = None
    return library


def is_covered(device: torch.device) -> bool:
    """Whether there are kernels for tensors that are there."""
    return device.type == "cpu" and _library() is not None


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
        best_B: fp32, the greatest logit of each row: no weight is above 1.
        temperature_B: fp32.
        weights_BNK: fp32, contiguous, with room for all of the vocabulary; K is a multiple of 16.
        instruction_set: one of `instruction_sets()`, by default the best.
    """
    rows, blocks, size = weights_BNK.shape
    best_B, temperature_B = best_B.contiguous(), temperature_B.contiguous()
    _check(logits_BV, best_B, temperature_B, weights_BNK)
    vocabulary = _Vocabulary(
        logits=logits_BV.data_ptr(),
        best=best_B.data_ptr(),
        temperature=temperature_B.data_ptr(),
        weights=weights_BNK.data_ptr(),
        num_rows=rows,
        logits_stride=logits_BV.stride(0),
        size=logits_BV.shape[1],
        num_blocks=blocks,
        block_size=size,
    )
    number = instruction_set_number(instruction_set or instruction_sets()[0])
    _there().batchkv_weigh(number, ctypes.byref(vocabulary))


def search(weights_BNK: torch.Tensor, sums_BN: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The tokens at the given points of the CDF, int64 [B], in double precision: first the block, then the token.

    Args:
        weights_BNK: fp32.
        sums_BN: fp32, of the weights of each block.
        uniform_B: fp64, in [0, 1).
    """
    rows, blocks, size = weights_BNK.shape
    tokens_B = torch.empty(rows, dtype=torch.int64)
    weights_BNK, sums_BN, uniform_B = weights_BNK.contiguous(), sums_BN.contiguous(), uniform_B.contiguous()
    dtypes = weights_BNK.dtype, sums_BN.dtype, uniform_B.dtype
    if sums_BN.shape != (rows, blocks) or len(uniform_B) != rows or dtypes != (_F32, _F32, torch.float64):
        raise ValueError(f"weights {tuple(weights_BNK.shape)}, sums {tuple(sums_BN.shape)} and uniforms do not fit")
    vocabulary = _Vocabulary(
        weights=weights_BNK.data_ptr(),
        sums=sums_BN.data_ptr(),
        uniform=uniform_B.data_ptr(),
        tokens=tokens_B.data_ptr(),
        num_rows=rows,
        num_blocks=blocks,
        block_size=size,
    )
    _there().batchkv_search(ctypes.byref(vocabulary))
    return tokens_B


def _there() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("there are no native kernels: ask is_covered first")
    return library


def _check(
    logits_BV: torch.Tensor, best_B: torch.Tensor, temperature_B: torch.Tensor, weights_BNK: torch.Tensor
) -> None:
    """The kernel reads and writes what it is told to: a wrong shape must not get there."""
    rows, blocks, size = weights_BNK.shape
    fits = len(logits_BV) == len(best_B) == len(temperature_B) == rows and logits_BV.shape[1] <= blocks * size
    is_float = all(t.dtype == _F32 for t in (logits_BV, best_B, temperature_B, weights_BNK))
    if not (fits and is_float and size % 16 == 0 and logits_BV.stride(1) == 1 and weights_BNK.is_contiguous()):
        shapes = [f"{str(t.dtype)[6:]} {tuple(t.shape)}" for t in (logits_BV, best_B, temperature_B, weights_BNK)]
        raise ValueError(f"logits, best, temperature and weights do not belong together: {', '.join(shapes)}")
