"""Decoder layers such as Llama's on a CPU by native code, all but their attention, which is called as ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from batchkv.activations import kind_of
from batchkv.gated_mlps import fast_mlp
from batchkv.kernels import native_layer, native_linear
from batchkv.kernels.native_layer import LayerWeights, LinearWeight, NativeLayer, NormWeight
from batchkv.linear_layers import product_of
from batchkv.rotary_embeddings import turns_like_llama
from batchkv.same_code import computes_like

_WITH_HEAD_NORMS = Qwen3Attention
_ATTENTIONS = (LlamaAttention, MistralAttention, Qwen2Attention, _WITH_HEAD_NORMS)  # turn all dims of a head


def fast_decoder_layer(layer: nn.Module) -> Callable[..., torch.Tensor] | None:
    """What computes a decoder layer faster than its parts one after the other; None for all other modules."""
    if not computes_like(layer, LlamaDecoderLayer) or not native_layer.is_there():
        return None
    weights = _weights_of(layer)
    return None if weights is None else partial(_compute, layer, NativeLayer(weights))


def _weights_of(layer: nn.Module) -> LayerWeights | None:
    """None if a part is not what native code computes, or has hooks, which would not be called."""
    parts: dict[str, Any] = dict(layer.named_modules(remove_duplicate=False))
    attention, mlp = parts["self_attn"], parts["mlp"]
    has_head_norms = computes_like(attention, _WITH_HEAD_NORMS)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if has_head_norms else []
    linears = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"]
    is_known = (
        not any(module._forward_hooks or module._forward_pre_hooks for module in parts.values())
        and any(computes_like(attention, kind) for kind in _ATTENTIONS)
        and turns_like_llama(attention)
        and fast_mlp(mlp) is not None
        and all(computes_like(parts[name], LlamaRMSNorm) for name in norms)
        and all(product_of(parts[name]) is native_linear.linear for name in linears)
        and len({(parameter.dtype, parameter.device) for parameter in layer.parameters()}) == 1
    )
    activation = kind_of(parts["mlp.act_fn"]) if is_known else None
    if activation is None:
        return None
    norm, linear = partial(_norm_of, parts), partial(_linear_of, parts)
    return LayerWeights(
        head_dim=attention.head_dim,
        activation=activation,
        input_norm=norm("input_layernorm"),
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj"),
        value=linear("self_attn.v_proj"),
        query_norm=norm("self_attn.q_norm") if has_head_norms else None,
        key_norm=norm("self_attn.k_norm") if has_head_norms else None,
        projection=linear("self_attn.o_proj"),
        post_norm=norm("post_attention_layernorm"),
        gate_NK=linear("mlp.gate_proj").weight_NK,
        up_NK=linear("mlp.up_proj").weight_NK,
        down=linear("mlp.down_proj"),
    )


def _norm_of(parts: dict[str, Any], name: str) -> NormWeight:
    return NormWeight(parts[name].weight, parts[name].variance_epsilon)


def _linear_of(parts: dict[str, Any], name: str) -> LinearWeight:
    return LinearWeight(parts[name].weight, parts[name].bias)


def _compute(
    layer: nn.Module,
    native: NativeLayer,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    attention: Any = layer.self_attn
    attend = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
    if (
        attend is None
        or position_embeddings is None
        or any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        or torch.is_autocast_enabled("cpu")
        or not native.covers(hidden_states, *position_embeddings)
    ):
        forward: Callable[..., torch.Tensor] = unwrap(type(layer).forward)
        return forward(layer, hidden_states, attention_mask, position_embeddings=position_embeddings, **kwargs)
    query, key, value = native.start(hidden_states, *position_embeddings)
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    kwargs |= {"dropout": 0.0, "scaling": attention.scaling, "sliding_window": window}
    attended, _ = attend(attention, query, key, value, attention_mask, **kwargs)
    out: torch.Tensor = native.end(hidden_states, attended.contiguous())
    return out
