"""Sampling from the logits of a vocabulary in native code (`kernels/cpu`): weights, and the search in their CDF.

Shape suffixes: B rows, V vocabulary, N blocks of K tokens. A row's bits depend on nothing but the row.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from batchkv.kernels.native_library import DTYPES, fits, instruction_set_number, native_library

_F32 = torch.float32


class _Weighing(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("logits", "temperature", "weights", "best", "likeliest")],
        *[(name, ctypes.c_int64) for name in ("logits_stride", "size", "num_rows", "padded_size")],
        ("dtype", ctypes.c_int32),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library()
    if library is None or not fits(library, weighing=_Weighing):
        return None
    library.batchkv_weigh.argtypes = [ctypes.c_int32, ctypes.c_void_p]
    library.batchkv_search.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
    library.batchkv_weigh.restype = library.batchkv_search.restype = None
    return library


def is_covered(device: torch.device) -> bool:
    """Whether there are kernels for tensors that are there."""
    return device.type == "cpu" and _library() is not None


def reads(dtype: torch.dtype) -> bool:
    """Whether logits are read in this dtype."""
    return dtype in DTYPES


def weigh(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    weights_BNK: torch.Tensor,
    instruction_set: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp((logits - best) / temperature) into `weights_BNK`, with zeros behind the end of the vocabulary.

    Args:
        logits_BV: of a dtype that it `reads`, rows contiguous.
        temperature_B: fp32.
        weights_BNK: fp32, contiguous, with room for all of the vocabulary; K is a multiple of 16.
        instruction_set: one of `instruction_sets()`, by default the best.

    Returns:
        `best`, the greatest logits (fp32 [B]; NaN where a row has one), and the first tokens that have them (int64
        [B]). Where `best` is not finite there is no distribution, and all else is anything.

    Raises:
        ValueError: the tensors do not belong together.
    """
    rows, blocks, size = weights_BNK.shape
    temperature_B = temperature_B.contiguous()
    tensors = logits_BV, temperature_B, weights_BNK
    library = _library()
    if (
        library is None
        or any(tensor.device.type != "cpu" for tensor in tensors)
        or not reads(logits_BV.dtype)
        or not temperature_B.dtype == weights_BNK.dtype == _F32
        or not len(logits_BV) == len(temperature_B) == rows
        or logits_BV.shape[1] > blocks * size
        or size % 16 != 0
        or logits_BV.stride(1) != 1
        or not weights_BNK.is_contiguous()
    ):
        kinds = [f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for tensor in tensors]
        raise ValueError(f"logits, temperature and weights do not belong together: {', '.join(kinds)}")
    best_B, likeliest_B = (torch.empty(rows, dtype=dtype, device="cpu") for dtype in (_F32, torch.int64))
    pointed = (logits_BV, temperature_B, weights_BNK, best_B, likeliest_B)
    weighing = _Weighing(
        *(tensor.data_ptr() for tensor in pointed),
        logits_stride=logits_BV.stride(0),
        size=logits_BV.shape[1],
        num_rows=rows,
        padded_size=blocks * size,
        dtype=DTYPES[logits_BV.dtype],
    )
    library.batchkv_weigh(instruction_set_number(instruction_set), ctypes.byref(weighing))
    return best_B, likeliest_B


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
    tokens_B = torch.empty(rows, dtype=torch.int64, device="cpu")
    weights_BNK, sums_BN, uniform_B = weights_BNK.contiguous(), sums_BN.contiguous(), uniform_B.contiguous()
    dtypes = weights_BNK.dtype, sums_BN.dtype, uniform_B.dtype
    library = _library()
    if (
        library is None
        or sums_BN.shape != (rows, blocks)
        or len(uniform_B) != rows
        or dtypes != (_F32, _F32, torch.float64)
    ):
        raise ValueError(f"weights {tuple(weights_BNK.shape)}, sums {tuple(sums_BN.shape)} and uniforms do not fit")
    library.batchkv_search(
        weights_BNK.data_ptr(),
        sums_BN.data_ptr(),
        uniform_B.data_ptr(),
        tokens_B.data_ptr(),
        rows,
        blocks,
        size,
    )
    return tokens_B
