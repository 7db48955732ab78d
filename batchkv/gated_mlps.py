"""MLPs with a gate on a CPU by the native kernel: what the gate and the layer beside it make is never in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from batchkv.activations import kind_of
from batchkv.kernels import native_linear
from batchkv.kernels.native_activation import Activation
from batchkv.linear_layers import is_native
from batchkv.same_code import computes_like, has_hooks


def fast_mlp(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What computes an MLP with a gate faster than its layers one after the other; None for all other modules."""
    if not computes_like(module, LlamaMLP):
        return None
    layers = dict(module.named_children())
    if not layers.keys() >= {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, activation = layers["gate_proj"], layers["up_proj"], layers["act_fn"]
    kind = kind_of(activation)
    if kind is None or any(map(has_hooks, (gate, up, activation))) or not (is_native(gate) and is_native(up)):
        return None
    has_bias = any(layer.bias is not None for layer in (gate, up))
    is_pair = not has_bias and (gate.weight.shape, gate.weight.dtype) == (up.weight.shape, up.weight.dtype)
    return partial(_compute, module, kind, gate, up, layers["down_proj"]) if is_pair else None


def _compute(
    module: nn.Module, kind: Activation, gate: nn.Linear, up: nn.Linear, down: nn.Module, rows: torch.Tensor
) -> torch.Tensor:
    computed: torch.Tensor
    if torch.is_autocast_enabled("cpu") or rows.dtype != gate.weight.dtype:
        computed = type(module).forward(module, rows)
    else:
        computed = down(native_linear.gated_linear(rows, gate.weight, up.weight, kind))
    return computed
