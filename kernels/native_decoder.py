"""The layers of a decoder such as Llama's in one native call, attention and all.

The kernels are those of a layer's parts, and so are the bits. What is saved is the way through Python between them: a
millisecond a layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from batchkv.kernels import native_linear, native_norm
from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_activation import Activation
from batchkv.kernels.native_attention import NativeAttention, NativeKV, NativeWorkPlan
from batchkv.kernels.native_library import DTYPES, fits, instruction_set_number, native_library
from batchkv.kernels.native_linear import LinearLayer, prepare, strips_of


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


_NORMS = ("input_norm", "query_norm", "key_norm", "post_norm")
_LINEARS = ("query", "key", "value", "projection", "gated", "down")
_ROOM = ("hidden", "cos", "sin", "normed", "query", "key", "value", "attended", "inner", "strips", "inner_strips")


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *[(name, _Norm) for name in _NORMS],
        *[(name, LinearLayer) for name in _LINEARS],
        ("scale", ctypes.c_float),
        ("pages", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
    ]


class _DecoderStep(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _ROOM],
        ("num_tokens", ctypes.c_int64),
        ("query_heads", ctypes.c_int32),
        ("key_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library()
    if library is None or not fits(library, decoder_layer=_DecoderLayer, decoder_step=_DecoderStep):
        return None
    pointer = ctypes.c_void_p
    library.batchkv_decode.argtypes = [ctypes.c_int32, pointer, ctypes.c_int64, pointer]
    library.batchkv_decode.restype = None
    return library


@dataclass(frozen=True, slots=True)
class NormWeight:
    """An RMS norm such as Llama's.

    Attributes:
        weight_D: its weight.
        epsilon: what is added to the mean of squares.
    """

    weight_D: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A linear layer.

    Attributes:
        weight_NK: its weight.
        bias_N: its bias, if it has one.
    """

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A decoder layer with hidden states of W numbers, H query heads and K KV heads of D, and an MLP of N.

    Attributes:
        head_dim: D.
        scale: of scores, positive.
        activation: of the gate.
        input_norm: [W], before attention; post_norm: [W], after it.
        query: [H * D, W]; key, value: [K * D, W].
        query_norm, key_norm: [D], of heads, where there are some.
        projection: [W, H * D], of what attention gives.
        gate, up: [N, W], without biases; down: [W, N].
    """

    head_dim: int
    scale: float
    activation: Activation
    input_norm: NormWeight
    query: LinearWeight
    key: LinearWeight
    value: LinearWeight
    query_norm: NormWeight | None
    key_norm: NormWeight | None
    projection: LinearWeight
    post_norm: NormWeight
    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight

    @property
    def norms(self) -> tuple[NormWeight, ...]:
        """Those that there are."""
        return tuple(filter(None, (self.input_norm, self.post_norm, self.query_norm, self.key_norm)))

    @property
    def linears(self) -> tuple[LinearWeight, ...]:
        """All linear layers."""
        return self.query, self.key, self.value, self.projection, self.gate, self.up, self.down


def is_covered(weights: LayerWeights) -> bool:
    """Whether there are kernels for a layer: all on the CPU, of one dtype, and of shapes that go together."""
    width, dim = weights.input_norm.weight_D.numel(), weights.head_dim
    of_heads = len(weights.query.weight_NK)
    inner = len(weights.gate.weight_NK)
    shapes = [(of_heads, width), *[(len(weights.key.weight_NK), width)] * 2, (width, of_heads)]
    shapes += [(inner, width), (inner, width), (width, inner)]
    norm_widths = [width, width] + [dim] * (len(weights.norms) - 2)
    return (
        _library() is not None
        and dim % 2 == of_heads % dim == of_heads % len(weights.key.weight_NK) == len(weights.key.weight_NK) % dim == 0
        and weights.scale > 0
        and weights.gate.bias_N is None is weights.up.bias_N
        and [tuple(linear.weight_NK.shape) for linear in weights.linears] == shapes
        and all(native_linear.is_covered(linear.weight_NK, linear.bias_N) for linear in weights.linears)
        and [tuple(norm.weight_D.shape) for norm in weights.norms] == [(size,) for size in norm_widths]
        and all(native_norm.is_covered(norm.weight_D, norm.weight_D) for norm in weights.norms)
        and all(isinstance(norm.epsilon, float) for norm in weights.norms)
        and len(
            {norm.weight_D.dtype for norm in weights.norms} | {linear.weight_NK.dtype for linear in weights.linears}
        )
        == 1
    )


def are_covered(layers: Sequence[LayerWeights]) -> bool:
    """Whether layers can follow each other: each `is_covered`, and all have the same hidden states and heads."""
    return all(map(is_covered, layers)) and len(set(map(_shape, layers))) == 1


class NativeDecoder:
    """The layers of a decoder. It reads weights where they are when it is made.

    Args:
        layers: their weights, in order.
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: the layers are not such as `are_covered`.
        RuntimeError: the processor has not these instructions.
    """

    def __init__(self, layers: Sequence[LayerWeights], instruction_set: str | None = None) -> None:
        library = _library()
        if library is None or not are_covered(layers):
            raise ValueError("the native kernels do not compute these layers: ask are_covered first")
        self._library, self._instruction_set = library, instruction_set_number(instruction_set)
        self._weights = tuple(layers)  # which stay while they are read
        self._layers = (_DecoderLayer * len(layers))(*map(_layer, layers))
        self._shape = _shape(layers[0])
        self._inner = max(len(layer.gate.weight_NK) for layer in layers)

    def covers(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether it computes hidden states [1, T, W] with angles [1, T, D]."""
        shape, num_tokens = self._shape, hidden.shape[1]
        return (
            hidden.dtype == cos.dtype == sin.dtype == shape.dtype
            and hidden.device.type == cos.device.type == sin.device.type == "cpu"
            and hidden.shape == (1, num_tokens, shape.width)
            and cos.shape == sin.shape == (1, num_tokens, shape.head_dim)
            and hidden.is_contiguous()
            and cos.is_contiguous()
            and sin.is_contiguous()
        )

    def attends_by(self, backend: AttentionBackend[Any, Any], pages: Sequence[Any]) -> bool:
        """Whether its layers have this attention, with these pages of each: of the dtype that the layers compute in."""
        shape = self._shape
        wanted = (shape.key_heads, shape.head_dim, shape.head_dim)
        return (
            isinstance(backend, NativeAttention)
            and backend.instruction_set == self._instruction_set
            and len(pages) == len(self._layers)
            and all(kv.tensor_dtype == shape.dtype and kv.vectors == wanted for kv in pages)
        )

    def run(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pages: Sequence[NativeKV],
        plans: Sequence[NativeWorkPlan],
    ) -> torch.Tensor:
        """What goes out of the last layer, [1, T, W]; keys and values are in their pages then.

        Args:
            hidden, cos, sin: what it `covers`.
            pages, plans: of each layer, pages as it `attends_by`. Tokens behind those of a plan attend to nothing.

        Raises:
            ValueError: a plan is for more tokens than there are.
        """
        hidden, shape, num_tokens = hidden.clone(), self._shape, hidden.shape[1]
        layers = type(self._layers).from_buffer_copy(self._layers)  # another thread may have a step of its own
        for layer, kv, plan in zip(layers, pages, plans, strict=True):
            if plan.batch.num_tokens > num_tokens:
                raise ValueError(f"attention is planned for {plan.batch.num_tokens} tokens, there are {num_tokens}")
            layer.pages, layer.batch = ctypes.addressof(kv.pages), ctypes.addressof(plan.batch)
        of_queries, of_keys = shape.query_heads * shape.head_dim, shape.key_heads * shape.head_dim
        widths = (shape.width, of_queries, of_keys, of_keys, of_queries, self._inner)
        strips = (strips_of(num_tokens, width) for width in (max(shape.width, of_queries), self._inner))
        room = (hidden, cos, sin, *(hidden.new_empty(num_tokens, width) for width in widths), *strips)
        step = _DecoderStep(
            *(tensor.data_ptr() for tensor in room),
            num_tokens=num_tokens,
            query_heads=shape.query_heads,
            key_heads=shape.key_heads,
            head_dim=shape.head_dim,
            dtype=DTYPES[shape.dtype],
        )
        self._library.batchkv_decode(self._instruction_set, ctypes.byref(layers), len(layers), ctypes.byref(step))
        return hidden


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all layers of a decoder have in common."""

    dtype: torch.dtype
    width: int
    query_heads: int
    key_heads: int
    head_dim: int


def _shape(layer: LayerWeights) -> _Shape:
    return _Shape(
        layer.query.weight_NK.dtype,
        layer.query.weight_NK.shape[1],
        len(layer.query.weight_NK) // layer.head_dim,
        len(layer.key.weight_NK) // layer.head_dim,
        layer.head_dim,
    )


def _layer(layer: LayerWeights) -> _DecoderLayer:
    return _DecoderLayer(
        input_norm=_norm(layer.input_norm),
        query_norm=_norm(layer.query_norm),
        key_norm=_norm(layer.key_norm),
        post_norm=_norm(layer.post_norm),
        query=_linear(layer.query),
        key=_linear(layer.key),
        value=_linear(layer.value),
        projection=_linear(layer.projection),
        gated=prepare(layer.up.weight_NK, None, layer.gate.weight_NK, layer.activation),
        down=_linear(layer.down),
        scale=layer.scale,
    )


def _norm(norm: NormWeight | None) -> _Norm:
    return _Norm(None, 0) if norm is None else _Norm(norm.weight_D.data_ptr(), norm.epsilon)


def _linear(linear: LinearWeight) -> LinearLayer:
    return prepare(linear.weight_NK, linear.bias_N)
