"""RMS norms on a CPU by the native kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from batchkv.kernels import native_norm
from batchkv.same_code import computes_like


def fast_norm(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What computes a norm faster than its `forward`; None for all other modules.

    Most families have a copy of Llama's norm. Others scale by 1 + weight, or round later.
    """
    return partial(_compute, module) if computes_like(module, LlamaRMSNorm) else None


def _compute(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    weight, epsilon = module.weight, module.variance_epsilon
    normed: torch.Tensor
    if isinstance(weight, torch.Tensor) and isinstance(epsilon, float) and native_norm.is_covered(rows, weight):
        normed = native_norm.rms_norm(rows, weight, epsilon)
    else:
        normed = type(module).forward(module, rows)
    return normed
