"""Which implementation of attention a run uses."""

from __future__ import annotations

from typing import Any

import torch

from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_cpu import NativeAttention, is_covered
from batchkv.kernels.torch_cpu import TorchAttention


def select_attention(kv_dtype: torch.dtype) -> AttentionBackend[Any, Any]:
    """The native kernel where it was built and covers the dtype of the KV pages, else the torch implementation."""
    return NativeAttention() if is_covered(kv_dtype) else TorchAttention()
