"""The bridge from a transformers model to our kernels: an attention function that reads and writes paged KV.

What a step attends to travels as a keyword argument of the model's forward, through its layers, to here; never as a
global. Keys and values arrive after the rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from batchkv.errors import UserError
from batchkv.kernels.attention import AttentionBackend
from batchkv.kv_layout import LayerSpec

IMPLEMENTATION = "batchkv"


@dataclass(frozen=True, slots=True)
class StepAttention:
    """All that the layers of a model need in one step.

    Attributes:
        backend: the kernels.
        specs: what each layer is expected to be.
        pages: the KV of each layer.
        plans: the work plan of each layer; layers of a group share one.
        num_tokens: tokens of the step. Those after them fill up the forward pass: they attend to nothing.
    """

    backend: AttentionBackend[Any, Any]
    specs: tuple[LayerSpec, ...]
    pages: tuple[Any, ...]
    plans: tuple[Any, ...]
    num_tokens: int


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step_attention: StepAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers' `AttentionInterface` wants it.

    Args:
        query: [1, H, T, D]; key, value: [1, K, T, D], of the step's tokens only.
        attention_mask: None, since causality and windows are in the work plan.
        scaling: factor of the scores.
        step_attention: what the runner passed to the model's forward.
        sliding_window, softcap, s_aux: as the model's layer asks for them.

    Returns:
        [1, T, H, D] and no weights.

    Raises:
        UserError: the layer is not what the KV layout was made for.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    spec = step_attention.specs[layer]
    _check_layer(layer, spec, key, value, sliding_window)
    pages, plan = step_attention.pages[layer], step_attention.plans[layer]
    real = slice(step_attention.num_tokens)
    backend = step_attention.backend
    backend.store(pages, plan, key[0, :, real], value[0, :, real])
    out_THD = backend.attend(pages, plan, query[0, :, real], scale=scaling, softcap=softcap, sinks_H=s_aux)
    filling = query.shape[2] - len(out_THD)
    if filling:
        out_THD = nn.functional.pad(out_THD, (0, 0, 0, 0, 0, filling))
    return out_THD.unsqueeze(0), None


def _check_layer(
    layer: int, spec: LayerSpec, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None
) -> None:
    found = (key.shape[1], key.shape[3], value.shape[3])
    if found != (spec.num_kv_heads, spec.key_dim, spec.value_dim):
        raise UserError(
            f"attention layer {layer} has (KV heads, key dim, value dim) {found}, "
            f"the config says {(spec.num_kv_heads, spec.key_dim, spec.value_dim)}: this architecture is not supported"
        )
    if sliding_window is not None and sliding_window != spec.window:
        raise UserError(
            f"attention layer {layer} has a window of {sliding_window} tokens, the config says {spec.window}: "
            "this architecture is not supported"
        )


AttentionInterface.register(IMPLEMENTATION, paged_attention)
