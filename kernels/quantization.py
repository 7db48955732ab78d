"""Quantized keys and values: small numbers with one fp32 scale for each vector, that is for each token and KV head.

    scale = max |x| / largest,    stored = round(x / scale),    x is about stored * scale

over the elements x of a key or of a value; `largest` is 127 for int8 and 448 for fp8 (e4m3). Ties round to even. Keys
and values have scales of their own. Nothing else enters, so a stored vector does not depend on what is stored with it.

A scale belongs to a whole vector, so no kernel has to multiply vectors by it: that of a key multiplies the score, that
of a value multiplies the weight of the softmax.
"""

from __future__ import annotations

import torch

from batchkv.config import KVDtype

_STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# Vectors of zeros need a scale that is not 0, and below this one division would lose the bits that it rounds to.
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


def storage_dtype(kv_dtype: KVDtype, model_dtype: torch.dtype) -> torch.dtype:
    """What keys and values are stored in under `--kv-dtype`."""
    return _STORED.get(kv_dtype, model_dtype)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether keys and values that are stored in this dtype have scales."""
    return dtype in _LARGEST


def largest_stored(dtype: torch.dtype) -> float:
    """What the largest element of a vector is stored as; 0 where there are no scales."""
    return _LARGEST.get(dtype, 0.0)


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of the scale of a key or value that is stored in this dtype; 0 if it has none."""
    return torch.float32.itemsize if is_quantized(dtype) else 0


def quantize(vectors_KTD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors as they are stored, and their scales [K, T] in fp32.

    A vector with an element that is not finite gets a scale that is not, so that it shows in every result.
    """
    vectors_KTD, largest = vectors_KTD.float(), _LARGEST[dtype]
    scale_KT = (vectors_KTD.abs().amax(dim=2) / largest).clamp_(min=SMALLEST_SCALE)
    stored_KTD = vectors_KTD / scale_KT.unsqueeze(2)
    return (stored_KTD if dtype.is_floating_point else stored_KTD.round_()).to(dtype), scale_KT


def as_stored(
    pool: torch.Tensor, scales: torch.Tensor | None, new_KTD: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is to be written to which tensor of a pool: vectors in its dtype, and their scales if it has some."""
    if scales is None:
        return [(pool, new_KTD.to(pool.dtype))]
    stored_KTD, scale_KT = quantize(new_KTD, pool.dtype)
    return [(pool, stored_KTD), (scales, scale_KT)]
