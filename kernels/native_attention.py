"""Attention in native code (`kernels/cpu`): pages are read where they lie, shared keys once for a group of rows.

A token's result is bitwise the same whatever else is in the step: keys are taken in blocks on a grid of absolute
positions, in ascending order, with one accumulator per (query, head).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_library import DTYPES, Heads, fits, instruction_set_number, instruction_sets, native_library
from batchkv.kernels.quantization import is_quantized
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch

_DTYPES = DTYPES | {torch.int8: 2}
_LANES = 16  # value dims are padded to a multiple of this
_TILE_DEPTH = 32  # key dims that a row of a tile holds


class _Pages(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("key_scale", ctypes.c_void_p),
        ("value_scale", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("value_stride", ctypes.c_int32),
        ("layout", ctypes.c_int32),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("num_tokens", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("page_table", ctypes.c_void_p),
        ("token_row", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_copies", ctypes.c_int64),
        ("copy_src", ctypes.c_void_p),
        ("copy_dst", ctypes.c_void_p),
        ("copy_slots", ctypes.c_void_p),
        ("window", ctypes.c_int32),
    ]


class _Scoring(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("sinks", ctypes.c_void_p)]


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library()
    if library is None or not fits(library, pages=_Pages, batch=_Batch):
        return None
    pages, batch = ctypes.POINTER(_Pages), ctypes.POINTER(_Batch)
    library.batchkv_store.argtypes = [pages, batch, Heads, Heads]
    library.batchkv_attend.argtypes = [ctypes.c_int32, pages, batch, ctypes.c_int32, Heads, Heads, _Scoring]
    library.batchkv_store.restype = library.batchkv_attend.restype = None
    return library


def is_covered(dtype: torch.dtype) -> bool:
    """Whether the native kernel is there and takes keys and values of this dtype."""
    return dtype in _DTYPES and _library() is not None


@dataclass(frozen=True, slots=True)
class NativeKV:
    """Pages of one layer: key [pages, K, D, page_size], value [pages, K, page_size, value dim rounded up to 16].
    With values side by side, which is for tiles, the last two dims of both are swapped.

    If they are quantized there are scales, [pages, K, page_size] each. `pages` is how the kernel sees them: where the
    tensors lie, and their shapes.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale_PKS: torch.Tensor | None
    value_scale_PKS: torch.Tensor | None
    pages: _Pages

    @property
    def tensor_dtype(self) -> torch.dtype:
        """What queries, keys, values and results are outside the pages."""
        return torch.float32 if is_quantized(self.key.dtype) else self.key.dtype

    @property
    def vectors(self) -> tuple[int, int, int]:
        """KV heads, key dim and value dim."""
        return self.pages.kv_heads, self.pages.key_dim, self.pages.value_dim


@dataclass(frozen=True, slots=True)
class NativeWorkPlan:
    """The step as the kernel takes it, and the arrays that its pointers lead to."""

    batch: _Batch
    arrays: tuple[np.ndarray[Any, Any], ...]


class NativeAttention(AttentionBackend[NativeKV, NativeWorkPlan]):
    """The native kernel.

    Args:
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        RuntimeError: there is no kernel for it: ask `is_covered` first.
    """

    is_batch_invariant = True

    def __init__(self, instruction_set: str | None = None) -> None:
        library, self.instruction_set = _library(), instruction_set_number(instruction_set)
        if library is None:
            raise RuntimeError("the native kernels were built from other sources: install batchkv again")
        self._library = library
        name = instruction_set or instruction_sets()[0]
        self._has_tiles = name == "amx"
        self.name = f"native ({name})"

    def allocate(
        self, num_pages: int, page_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> NativeKV:
        if dtype not in _DTYPES:
            raise ValueError(f"the native kernel has no {dtype}")
        value_stride = -(-spec.value_dim // _LANES) * _LANES
        is_for_tiles = self._has_tiles and dtype == torch.bfloat16 and spec.key_dim % _TILE_DEPTH == 0
        heads = (num_pages, spec.num_kv_heads)  # not filled: a page costs memory when it is first written
        key_shape, value_shape = (spec.key_dim, page_size), (page_size, value_stride)
        if is_for_tiles:
            key_shape, value_shape = key_shape[::-1], value_shape[::-1]
        key = torch.empty(*heads, *key_shape, dtype=dtype, device=device)
        value = torch.empty(*heads, *value_shape, dtype=dtype, device=device)
        key_scale_PKS, value_scale_PKS = (
            torch.empty(*heads, page_size, dtype=torch.float32, device=device) if is_quantized(dtype) else None
            for _ in range(2)
        )
        pages = _Pages(
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_scale=_address(key_scale_PKS),
            value_scale=_address(value_scale_PKS),
            dtype=_DTYPES[dtype],
            page_size=page_size,
            kv_heads=spec.num_kv_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            value_stride=value_stride,
            layout=is_for_tiles,
        )
        return NativeKV(key, value, key_scale_PKS, value_scale_PKS, pages)

    def plan(self, batch: AttentionBatch, spec: LayerSpec) -> NativeWorkPlan:
        rows = np.arange(len(batch.kv_lens), dtype=np.int32)
        table = np.ascontiguousarray(batch.page_table, np.int32)
        token_row = np.repeat(rows, np.diff(batch.cu_seqlens_q))
        position = batch.query_positions.astype(np.int32)
        slots = np.ascontiguousarray(batch.slots, np.int64)
        copies: list[np.ndarray[Any, Any]] = [
            np.concatenate([np.zeros(0, np.int32), *(getattr(part, name) for part in batch.copies)], dtype=np.int32)
            for name in ("src", "dst", "num_slots")
        ]
        arrays: tuple[np.ndarray[Any, Any], ...] = (table, token_row, position, slots, *copies)
        native = _Batch(
            num_tokens=len(position),
            table_width=table.shape[1],
            page_table=table.ctypes.data,
            token_row=token_row.ctypes.data,
            position=position.ctypes.data,
            slots=slots.ctypes.data,
            num_copies=len(copies[0]),
            copy_src=copies[0].ctypes.data,
            copy_dst=copies[1].ctypes.data,
            copy_slots=copies[2].ctypes.data,
            window=batch.window or 0,
        )
        return NativeWorkPlan(native, arrays)

    def store(self, kv: NativeKV, plan: NativeWorkPlan, key_KTD: torch.Tensor, value_KTD: torch.Tensor) -> None:
        pages, num_tokens = kv.pages, plan.batch.num_tokens
        _check_shape("key", key_KTD, (pages.kv_heads, num_tokens, pages.key_dim))
        _check_shape("value", value_KTD, (pages.kv_heads, num_tokens, pages.value_dim))
        key_KTD, value_KTD = _readable(key_KTD, kv), _readable(value_KTD, kv)
        self._library.batchkv_store(pages, plan.batch, Heads.of(key_KTD), Heads.of(value_KTD))

    def attend(
        self,
        kv: NativeKV,
        plan: NativeWorkPlan,
        query_HTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if scale <= 0:
            raise ValueError(f"scale is {scale}: the kernel takes positive ones")
        dtype, query_HTD = query_HTD.dtype, _readable(query_HTD, kv)
        pages, num_heads, num_tokens = kv.pages, len(query_HTD), plan.batch.num_tokens
        group = max(1, num_heads // pages.kv_heads)
        _check_shape("query", query_HTD, (group * pages.kv_heads, num_tokens, pages.key_dim))
        out_THD = query_HTD.new_empty(num_tokens, num_heads, pages.value_dim)
        sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
        scoring = _Scoring(scale, softcap or 0.0, _address(sinks_H))
        self._library.batchkv_attend(
            self.instruction_set,
            pages,
            plan.batch,
            num_heads,
            Heads.of(query_HTD),
            Heads.of(out_THD.transpose(0, 1)),
            scoring,
        )
        return out_THD.to(dtype)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, int, int]) -> None:
    """The kernel reads what it is told to: a wrong shape must not get there."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, the pages and the plan are for {expected}")


def _readable(tensor_HTD: torch.Tensor, kv: NativeKV) -> torch.Tensor:
    """In the dtype that goes with the pages, with contiguous head dims."""
    tensor_HTD = tensor_HTD.to(kv.tensor_dtype)
    return tensor_HTD if tensor_HTD.stride(2) == 1 else tensor_HTD.contiguous()
