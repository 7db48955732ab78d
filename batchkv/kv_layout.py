"""What one token costs in KV cache, layer by layer. Numbers only: no torch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchkv.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The keys and values that one attention layer keeps.

    Attributes:
        num_kv_heads: key/value heads (fewer than query heads under grouped-query attention).
        key_dim: elements of one head's key.
        value_dim: elements of one head's value.
        window: tokens a query sees, itself included: position `p` sees `k` with `p - k < window`;
            None is full attention.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def elements_per_token(self) -> int:
        """Key and value elements that one token adds to this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    @property
    def scales_per_token(self) -> int:
        """Key and value vectors that one token adds to this layer: each has a scale if it is quantized."""
        return 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of a whole model.

    Layers with the same window form a *group*: they need the same positions, so they share page
    tables and lifetimes. Groups are numbered with full attention first, then by first appearance.

    Attributes:
        layers: one spec per attention layer, in the order of the model.
        element_bytes: bytes of one key or value element.
        scale_bytes: bytes of the scale that each head's key and each head's value has; 0 where they are not quantized.
    """

    layers: tuple[LayerSpec, ...]
    element_bytes: int
    scale_bytes: int = 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group; None is full attention."""
        seen = dict.fromkeys(layer.window for layer in self.layers)
        return tuple(sorted(seen, key=lambda window: window is not None))

    @property
    def layer_group(self) -> tuple[int, ...]:
        """The group of each layer: an index into `windows`."""
        group_of = {window: group for group, window in enumerate(self.windows)}
        return tuple(group_of[layer.window] for layer in self.layers)

    @property
    def group_bytes_per_token(self) -> tuple[int, ...]:
        """Bytes that one token takes in all layers of each group."""
        bytes_per_token = [0] * len(self.windows)
        for layer, group in zip(self.layers, self.layer_group, strict=True):
            bytes_per_token[group] += layer.elements_per_token * self.element_bytes
            bytes_per_token[group] += layer.scales_per_token * self.scale_bytes
        return tuple(bytes_per_token)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        return sum(self.group_bytes_per_token)


def layer_specs(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    """The KV of each layer of the decoder that `config` (a text config) describes.

    Raises:
        UserError: if a layer is of a type whose KV is not known.
    """
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return tuple(LayerSpec(num_kv_heads, head_dim, head_dim, window) for window in _layer_windows(config))


def _layer_windows(config: PretrainedConfig) -> list[int | None]:
    """The window of each layer; None is full attention.

    A config with `use_sliding_window=False` has its `sliding_window` or `layer_types` cleared by transformers.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * config.num_hidden_layers
    return [_window_of(layer_type, window, config) for layer_type in layer_types]


def _window_of(layer_type: str, window: int | None, config: PretrainedConfig) -> int | None:
    if layer_type == SLIDING_ATTENTION:
        return window
    if layer_type == FULL_ATTENTION:
        return None
    raise UserError(
        f"model type {config.model_type!r} has {layer_type!r} layers, whose KV is not known: "
        f"use a model with only {FULL_ATTENTION} and {SLIDING_ATTENTION} layers"
    )
