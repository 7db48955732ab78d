"""Decoders such as Llama's on a CPU: all layers of a step in one native call, attention and all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Model

from batchkv.activations import kind_of
from batchkv.attention import IMPLEMENTATION, StepAttention
from batchkv.gated_mlps import fast_mlp
from batchkv.kernels import native_decoder
from batchkv.kernels.native_activation import Activation
from batchkv.kernels.native_decoder import LayerWeights, LinearWeight, NativeDecoder, NormWeight
from batchkv.linear_layers import is_native
from batchkv.rotary_embeddings import turns_like_llama
from batchkv.same_code import computes_like, has_hooks

# Decoders whose layers follow each other with nothing between them; what they differ in are masks, which a step's work
# plans are in place of.
_DECODERS = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
# Attention that turns all dims of a head, and the window that it asks for.
_ATTENTIONS: dict[type[nn.Module], Callable[[Any], int | None]] = {
    LlamaAttention: lambda _: None,
    MistralAttention: lambda attention: getattr(attention.config, "sliding_window", None),
    Qwen2Attention: lambda attention: attention.sliding_window,
    Qwen3Attention: lambda attention: attention.sliding_window,
}
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A decoder whose layers are all what native code computes.

    Attributes:
        native: what computes them.
        windows: what the attention of each layer asks for; None if it leaves that to others.
        owners, names, addresses: of each weight and bias: its module's parameters, its name there, and where it was.
    """

    native: NativeDecoder
    windows: tuple[int | None, ...]
    owners: tuple[Mapping[str, nn.Parameter | None], ...]
    names: tuple[str, ...]
    addresses: list[int]

    def are_weights_there(self) -> bool:
        """Whether all weights are where they were: what changes in place stays, `parameter.data = ...` does not."""
        found = [owner.get(name) for owner, name in zip(self.owners, self.names, strict=True)]
        return [-1 if parameter is None else parameter.data_ptr() for parameter in found] == self.addresses

    def attends_by(self, attention: StepAttention) -> bool:
        """Whether a step's attention is what native layers have, with the windows that they ask for."""
        return self.native.attends_by(attention.backend, attention.pages) and all(
            window in (None, spec.window) for window, spec in zip(self.windows, attention.specs, strict=True)
        )


def fast_decoder(decoder: nn.Module) -> Callable[..., BaseModelOutputWithPast] | None:
    """What computes a decoder, token ids [1, T] to hidden states [1, T, W], faster than its layers one after the other;
    None for all other modules.
    """
    prepared = _prepare(decoder) if any(computes_like(decoder, kind) for kind in _DECODERS) else None
    return None if prepared is None else partial(_compute, decoder, prepared)


def _prepare(decoder: nn.Module) -> _Prepared | None:
    """None if a layer is not what native code computes."""
    layers = list(cast(Any, decoder).layers)[: cast(Any, decoder).config.num_hidden_layers]
    weights = [found for number, layer in enumerate(layers) if (found := _weights_of(layer, number)) is not None]
    if not layers or len(weights) < len(layers) or not native_decoder.are_covered(weights):
        return None
    parameters = [
        (module._parameters, name, parameter.data_ptr())
        for layer in layers
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    owners, names, addresses = zip(*parameters, strict=True)
    return _Prepared(NativeDecoder(weights), tuple(map(_window_of, layers)), owners, names, list(addresses))


def _window_of(layer: Any) -> int | None:
    return next(window(layer.self_attn) for kind, window in _ATTENTIONS.items() if computes_like(layer.self_attn, kind))


def _weights_of(layer: nn.Module, number: int) -> LayerWeights | None:
    """None if a part is not what native code computes, or has hooks, which would not be called."""
    if not computes_like(layer, LlamaDecoderLayer) or any(map(has_hooks, layer.modules())):
        return None
    attention, mlp = cast(Any, layer.self_attn), cast(Any, layer.mlp)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    head_norms = [attention.q_norm, attention.k_norm] if computes_like(attention, Qwen3Attention) else []
    of_attention, of_mlp = _LINEARS
    if (
        not any(computes_like(attention, kind) for kind in _ATTENTIONS)
        or not turns_like_llama(attention)
        or attention.layer_idx != number
        or fast_mlp(mlp) is None
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
        attention.scaling,
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


def _compute(decoder: nn.Module, prepared: _Prepared, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
    computed = None if args else _hidden_states(decoder, prepared, **kwargs)
    if computed is None:
        whole: BaseModelOutputWithPast = type(decoder).forward(decoder, *args, **kwargs)
        return whole
    return BaseModelOutputWithPast(last_hidden_state=cast(Any, computed))


def _hidden_states(
    decoder: Any,
    prepared: _Prepared,
    *,
    input_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    use_cache: bool | None = None,
    step_attention: StepAttention | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """None unless this is a step of ours, with nothing else to it."""
    if (
        input_ids is None
        or position_ids is None
        or use_cache is not False
        or step_attention is None
        or any(value is not None for value in others.values())
        or decoder.config._attn_implementation != IMPLEMENTATION
        or decoder.training
        or torch.is_autocast_enabled("cpu")
        or not prepared.attends_by(step_attention)
        or not prepared.are_weights_there()
    ):
        return None
    hidden = decoder.embed_tokens(input_ids)
    cos, sin = decoder.rotary_emb(hidden, position_ids=position_ids)
    if (torch.is_grad_enabled() and hidden.requires_grad) or not prepared.native.covers(hidden, cos, sin):
        return None
    hidden = prepared.native.run(hidden, cos, sin, step_attention.pages, step_attention.plans)
    normed: torch.Tensor = decoder.norm(hidden)
    return normed
