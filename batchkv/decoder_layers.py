"""Decoder layers such as Llama's on a CPU by native code, all but their attention, which is called as ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from batchkv.activations import kind_of
from batchkv.gated_mlps import fast_mlp
from batchkv.kernels import native_layer
from batchkv.kernels.native_activation import Activation
from batchkv.kernels.native_layer import LayerWeights, LinearWeight, NativeLayer, NormWeight
from batchkv.linear_layers import is_native
from batchkv.rotary_embeddings import turns_like_llama
from batchkv.same_code import computes_like, has_hooks, original, vars_of

# Attention that turns all dims of a head, and by which name it finds its window.
_ATTENTIONS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    LlamaAttention: lambda _: {},
    MistralAttention: lambda attention: {"sliding_window": getattr(attention.config, "sliding_window", None)},
    Qwen2Attention: lambda attention: {"sliding_window": attention.sliding_window},
    Qwen3Attention: lambda attention: {"sliding_window": attention.sliding_window},
}
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A layer whose parts are all what native code computes.

    Attributes:
        native: what computes it.
        parameters: each of its weights and biases: the module that has it, its name, and where it was.
        functions: the attention functions that the layer's module knows, by name.
        keywords: what its attention passes to them besides what it is given.
    """

    native: NativeLayer
    parameters: tuple[tuple[Mapping[str, nn.Parameter | None], str, int], ...]
    functions: Mapping[str, Callable[..., Any]]
    keywords: dict[str, Any]

    def are_weights_there(self) -> bool:
        """Whether all weights are where they were: what changes in place stays, `parameter.data = ...` does not."""
        found = ((owner.get(name), address) for owner, name, address in self.parameters)
        return all(parameter is not None and parameter.data_ptr() == address for parameter, address in found)


def fast_decoder_layer(layer: nn.Module) -> Callable[..., torch.Tensor] | None:
    """What computes a decoder layer, [1, T, W] to [1, T, W], faster than its parts one after the other; None for all
    other modules.
    """
    prepared = _prepare(layer) if computes_like(layer, LlamaDecoderLayer) else None
    return None if prepared is None else partial(_compute, layer, prepared)


def _prepare(layer: nn.Module) -> _Prepared | None:
    """None if a part is not what native code computes, or has hooks, which would not be called."""
    attention: Any = layer.self_attn
    kind = next((kind for kind in _ATTENTIONS if computes_like(attention, kind)), None)
    if kind is None or not turns_like_llama(attention) or any(map(has_hooks, layer.modules())):
        return None
    weights = _weights_of(layer)
    if weights is None or not native_layer.is_covered(weights):
        return None
    return _Prepared(
        NativeLayer(weights),
        tuple(
            (module._parameters, name, parameter.data_ptr())
            for module in layer.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ),
        vars_of(original(type(attention).forward))["ALL_ATTENTION_FUNCTIONS"],
        {"dropout": 0.0, "scaling": attention.scaling, **_ATTENTIONS[kind](attention)},
    )


def _weights_of(layer: nn.Module) -> LayerWeights | None:
    attention, mlp = cast(Any, layer.self_attn), cast(Any, layer.mlp)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    head_norms = [attention.q_norm, attention.k_norm] if computes_like(attention, Qwen3Attention) else []
    of_attention, of_mlp = _LINEARS
    if (
        fast_mlp(mlp) is None
        or not all(computes_like(norm, LlamaRMSNorm) for norm in norms + head_norms)
        or not all(is_native(getattr(attention, name)) for name in of_attention)
        or not all(is_native(getattr(mlp, name)) for name in of_mlp)
    ):
        return None
    query, key, value, projection = (_linear_of(getattr(attention, name)) for name in of_attention)
    gate, up, down = (_linear_of(getattr(mlp, name)) for name in of_mlp)
    input_norm, post_norm, *of_heads = map(_norm_of, norms + head_norms)
    query_norm, key_norm = of_heads or (None, None)
    return LayerWeights(
        attention.head_dim,
        cast(Activation, kind_of(mlp.act_fn)),  # or it would not be a fast MLP
        input_norm,
        query,
        key,
        value,
        query_norm,
        key_norm,
        projection,
        post_norm,
        gate,
        up,
        down,
    )


def _norm_of(norm: Any) -> NormWeight:
    return NormWeight(norm.weight, norm.variance_epsilon)


def _linear_of(linear: Any) -> LinearWeight:
    return LinearWeight(linear.weight, linear.bias)


def _compute(
    layer: nn.Module,
    prepared: _Prepared,
    hidden_states: torch.Tensor,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    attention: Any = layer.self_attn
    attend = prepared.functions.get(attention.config._attn_implementation)
    out: torch.Tensor
    if (
        args
        or attend is None
        or position_embeddings is None
        or cache is not None
        or "past_key_values" in kwargs
        or attention.training
        or (torch.is_grad_enabled() and hidden_states.requires_grad)
        or torch.is_autocast_enabled("cpu")
        or not prepared.native.covers(hidden_states, *position_embeddings)
        or not prepared.are_weights_there()
    ):
        named = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, "cache": cache}
        given = {name: value for name, value in named.items() if value is not None}
        out = type(layer).forward(layer, hidden_states, *args, **given, **kwargs)
        return out
    query, key, value = prepared.native.start(hidden_states, *position_embeddings)
    keywords = {"position_ids": None, "use_cache": False, **kwargs, **prepared.keywords}
    attended, _ = attend(attention, query, key, value, attention_mask, **keywords)
    out = prepared.native.end(hidden_states, attended.contiguous())
    return out
