"""Which implementation of attention a run uses."""

from __future__ import annotations

from typing import Any

import torch

from batchkv.config import Attention
from batchkv.errors import UserError
from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_attention import NativeAttention, is_covered
from batchkv.kernels.torch_cpu import TorchAttention

CPU = torch.device("cpu")


def select_attention(
    kv_dtype: torch.dtype, device: torch.device = CPU, wanted: Attention = "auto"
) -> AttentionBackend[Any, Any]:
    """The Triton kernels on a GPU. On a CPU the native kernel where it was built and covers the dtype of the KV pages,
    else the torch implementation.

    Args:
        wanted: `auto`, or the one to take.

    Raises:
        UserError: the one that is wanted does not run there.
    """
    if device.type == "cuda" or wanted == "triton":
        return _triton(kv_dtype, device, wanted)
    if wanted == "native" and not is_covered(kv_dtype):
        raise UserError(
            f"--attention native: the native kernel was not built or has no KV in {kv_dtype}: take --attention auto"
        )
    return NativeAttention() if wanted != "torch" and is_covered(kv_dtype) else TorchAttention()


def _interprets() -> bool:
    """Whether Triton runs kernels in its interpreter."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def _triton(kv_dtype: torch.dtype, device: torch.device, wanted: Attention) -> AttentionBackend[Any, Any]:
    if wanted not in ("auto", "triton"):
        raise UserError(f"--attention {wanted} runs on the CPU, and the model is on {device}: take --device cpu")
    if device.type == "cpu" and not _interprets():
        raise UserError(
            "--attention triton needs a GPU: take --attention auto, "
            "or set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, slowly"
        )
    if device.type == "cpu" and kv_dtype == torch.bfloat16:
        raise UserError("Triton's interpreter computes wrong products in bfloat16: take --dtype float32")
    try:
        from batchkv.kernels.triton_attention import TritonAttention  # Triton is not there on every system
    except ImportError:
        raise UserError(f"device {device} needs Triton, which is not installed: pip install triton") from None
    try:
        return TritonAttention(device)
    except ValueError as error:  # a GPU that there are no tiles for
        raise UserError(f"device {device}: {error}: use --device cpu") from None
