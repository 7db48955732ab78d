"""What a decoder layer such as Llama's computes before and after its attention, in a native call each.

The kernels are those of its parts, and so are the bits. What is saved is the way through Python between them: a
millisecond a layer where a step is small.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from batchkv.kernels import native_linear, native_norm
from batchkv.kernels.native_activation import Activation
from batchkv.kernels.native_library import DTYPES, Heads, fits, instruction_set_number, native_library
from batchkv.kernels.native_linear import LinearLayer, point, prepare, strips_of
from batchkv.kernels.native_rotary import Rotary


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class _LayerStart(ctypes.Structure):
    _fields_ = [
        ("hidden", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("norm", _Norm),
        ("query_norm", _Norm),
        ("key_norm", _Norm),
        ("query", LinearLayer),
        ("key", LinearLayer),
        ("value", LinearLayer),
        ("rotary", Rotary),
    ]


class _LayerEnd(ctypes.Structure):
    _fields_ = [
        ("hidden", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("norm", _Norm),
        ("projection", LinearLayer),
        ("gated", LinearLayer),
        ("down", LinearLayer),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library()
    if library is None or not fits(library, layer_start=_LayerStart, layer_end=_LayerEnd):
        return None
    for function in (library.batchkv_layer_start, library.batchkv_layer_end):
        function.argtypes, function.restype = [ctypes.c_int32, ctypes.c_void_p], None
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
        activation: of the gate.
        input_norm: [W], before attention; post_norm: [W], after it.
        query: [H * D, W]; key, value: [K * D, W].
        query_norm, key_norm: [D], of heads, where there are some.
        projection: [W, H * D], of what attention gives.
        gate, up: [N, W], without biases; down: [W, N].
    """

    head_dim: int
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
        and dim % 2 == of_heads % dim == len(weights.key.weight_NK) % dim == 0
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


class NativeLayer:
    """A decoder layer without its attention. It reads weights where they are when it is made.

    Args:
        weights: those of the layer.
        instruction_set: one of `instruction_sets()`, by default the best.

    Raises:
        ValueError: the layer is not one that `is_covered`.
        RuntimeError: the processor has not these instructions.
    """

    def __init__(self, weights: LayerWeights, instruction_set: str | None = None) -> None:
        library = _library()
        if library is None or not is_covered(weights):
            raise ValueError("the native kernels do not compute this layer: ask is_covered first")
        self._library, self._weights = library, weights
        self._instruction_set = instruction_set_number(instruction_set)
        self._dtype = weights.gate.weight_NK.dtype
        self._width = len(weights.input_norm.weight_D)
        dtype = DTYPES[self._dtype]
        self._start = _LayerStart(
            width=self._width,
            norm=_norm(weights.input_norm),
            query_norm=_norm(weights.query_norm),
            key_norm=_norm(weights.key_norm),
            query=_linear(weights.query),
            key=_linear(weights.key),
            value=_linear(weights.value),
            rotary=Rotary(
                query_heads=len(weights.query.weight_NK) // weights.head_dim,
                key_heads=len(weights.key.weight_NK) // weights.head_dim,
                dim=weights.head_dim,
                dtype=dtype,
            ),
        )
        self._end = _LayerEnd(
            width=self._width,
            norm=_norm(weights.post_norm),
            projection=_linear(weights.projection),
            gated=prepare(weights.up.weight_NK, None, weights.gate.weight_NK, weights.activation),
            down=_linear(weights.down),
        )

    def covers(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether it computes hidden states [1, T, width] with angles [1, T, D]."""
        return (
            hidden.dtype == cos.dtype == sin.dtype == self._dtype
            and hidden.device.type == cos.device.type == sin.device.type == "cpu"
            and hidden.ndim == 3
            and len(hidden) == 1
            and hidden.shape[2] == self._width
            and cos.shape == sin.shape == (1, hidden.shape[1], self._weights.head_dim)
            and hidden.is_contiguous()
            and cos.is_contiguous()
            and sin.is_contiguous()
        )

    def start(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [1, H, T, D], turned keys and values [1, K, T, D] of hidden states that it `covers`."""
        start, num_tokens = _LayerStart.from_buffer_copy(self._start), hidden.shape[1]
        normed, strips = torch.empty_like(hidden), strips_of(num_tokens, self._width)
        heads = []
        for layer in (start.query, start.key, start.value):
            out = hidden.new_empty(1, num_tokens, layer.out_features // self._weights.head_dim, self._weights.head_dim)
            point(layer, normed, out, strips, num_tokens)
            heads.append(out.transpose(1, 2))
        query, key, value = heads
        start.hidden, start.normed, start.num_tokens = hidden.data_ptr(), normed.data_ptr(), num_tokens
        rotary = start.rotary
        rotary.query = rotary.turned_query = Heads.of(query[0])
        rotary.key = rotary.turned_key = Heads.of(key[0])
        rotary.cos, rotary.sin, rotary.num_tokens = cos.data_ptr(), sin.data_ptr(), num_tokens
        self._library.batchkv_layer_start(self._instruction_set, ctypes.byref(start))
        return query, key, value

    def end(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What goes out of the layer, as hidden states [1, T, width].

        Args:
            hidden: what came in.
            attended: [1, T, H, D], contiguous.

        Raises:
            ValueError: attention gave something else.
        """
        end, num_tokens = _LayerEnd.from_buffer_copy(self._end), hidden.shape[1]
        is_whole = attended.is_contiguous() and attended.numel() == num_tokens * end.projection.in_features
        if attended.dtype != self._dtype or attended.device != hidden.device or not is_whole:
            wanted = f"{self._dtype} for {num_tokens} tokens of {end.projection.in_features} numbers"
            raise ValueError(f"attention gave {attended.dtype} {tuple(attended.shape)}, the layer takes {wanted}")
        sums, normed, out = (torch.empty_like(hidden) for _ in range(3))
        inner = hidden.new_empty(num_tokens, end.gated.out_features)
        layers = ((end.projection, attended, out), (end.gated, normed, inner), (end.down, inner, out))
        strips = strips_of(num_tokens, max(layer.in_features for layer, *_ in layers))
        for layer, rows, results in layers:
            point(layer, rows, results, strips, num_tokens)
        end.hidden, end.sums, end.normed = hidden.data_ptr(), sums.data_ptr(), normed.data_ptr()
        end.num_tokens = num_tokens
        self._library.batchkv_layer_end(self._instruction_set, ctypes.byref(end))
        return out


def _norm(norm: NormWeight | None) -> _Norm:
    return _Norm(None, 0) if norm is None else _Norm(norm.weight_D.data_ptr(), norm.epsilon)


def _linear(linear: LinearWeight) -> LinearLayer:
    return prepare(linear.weight_NK, linear.bias_N)
