"""Rotary embeddings in native code (`kernels/cpu`): each element for itself."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from batchkv.kernels.native_library import DTYPES, Heads, fits, instruction_set_number, native_library


class Rotary(ctypes.Structure):
    """Queries and keys, as the C interface has them."""

    _fields_ = [
        ("query", Heads),
        ("key", Heads),
        ("turned_query", Heads),
        ("turned_key", Heads),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("query_heads", ctypes.c_int32),
        ("key_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library()
    if library is None or not fits(library, rotary=Rotary):
        return None
    library.batchkv_rotate.argtypes, library.batchkv_rotate.restype = [ctypes.c_int32, ctypes.c_void_p], None
    return library


def is_covered(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel turns these queries [1, H, T, D] and keys [1, K, T, D] by cos and sin [1, T, D]."""
    wanted = (1, *query.shape[2:])
    return (
        _library() is not None
        and query.dtype in DTYPES
        and all(tensor.device.type == "cpu" and tensor.dtype == query.dtype for tensor in (query, key, cos, sin))
        and query.ndim == key.ndim == 4
        and query.shape[-1] % 2 == 0
        and (len(query), len(key)) == (1, 1)
        and key.shape[2:] == query.shape[2:]
        and cos.shape == sin.shape == wanted
        and query.stride(-1) == key.stride(-1) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    instruction_set: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama's rotary embedding, `x * cos + rotate_half(x) * sin`, rounded where Llama rounds; without gradients.

    Args:
        query: [1, H, T, D]; key: [1, K, T, D]; cos, sin: [1, T, D].
        instruction_set: one of `instruction_sets()`, by default the best.

    Returns:
        New tensors that lie in memory as query and key do.

    Raises:
        ValueError: they are not such as `is_covered`.
        RuntimeError: the processor has not these instructions.
    """
    library = _library()
    if library is None or not is_covered(query, key, cos, sin):
        raise ValueError("the native kernel does not turn these queries and keys: ask is_covered first")
    turned_query, turned_key = torch.empty_like(query), torch.empty_like(key)
    rotary = Rotary(
        query=Heads.of(query[0]),
        key=Heads.of(key[0]),
        turned_query=Heads.of(turned_query[0]),
        turned_key=Heads.of(turned_key[0]),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        num_tokens=query.shape[2],
        query_heads=query.shape[1],
        key_heads=key.shape[1],
        dim=query.shape[3],
        dtype=DTYPES[query.dtype],
    )
    library.batchkv_rotate(instruction_set_number(instruction_set), ctypes.byref(rotary))
    return turned_query, turned_key
