"""A native decoder layer has the bits of its parts, whatever other tokens there are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from batchkv.kernels.native_layer import LayerWeights, LinearWeight, NativeLayer, NormWeight, is_covered
from batchkv.kernels.native_linear import gated_linear, linear
from batchkv.kernels.native_norm import rms_norm
from batchkv.kernels.native_rotary import rotate
from tests.native_kernels import INSTRUCTION_SETS, needs_native

pytestmark = needs_native

WIDTH, HEADS, KV_HEADS, DIM, INNER = 37, 3, 1, 14, 50  # no multiples of what vectors and tiles hold
DTYPES = [torch.float32, torch.bfloat16]


def weights_of(dtype: torch.dtype, has_head_norms: bool = True) -> LayerWeights:
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) / 4).to(dtype)

    def norm(size: int) -> NormWeight:
        return NormWeight(1 + numbers(size), 1e-5)

    return LayerWeights(
        head_dim=DIM,
        activation="silu",
        input_norm=norm(WIDTH),
        query=LinearWeight(numbers(HEADS * DIM, WIDTH), numbers(HEADS * DIM)),
        key=LinearWeight(numbers(KV_HEADS * DIM, WIDTH)),
        value=LinearWeight(numbers(KV_HEADS * DIM, WIDTH), numbers(KV_HEADS * DIM)),
        query_norm=norm(DIM) if has_head_norms else None,
        key_norm=norm(DIM) if has_head_norms else None,
        projection=LinearWeight(numbers(WIDTH, HEADS * DIM)),
        post_norm=norm(WIDTH),
        gate=LinearWeight(numbers(INNER, WIDTH)),
        up=LinearWeight(numbers(INNER, WIDTH)),
        down=LinearWeight(numbers(WIDTH, INNER), numbers(WIDTH)),
    )


def inputs_of(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, cos, sin, and what attention gives."""
    random = torch.Generator().manual_seed(1)
    shapes = (num_tokens, WIDTH), (num_tokens, DIM), (num_tokens, DIM), (num_tokens, HEADS, DIM)
    hidden, cos, sin, attended = (torch.randn(1, *shape, generator=random).to(dtype) for shape in shapes)
    return hidden, cos, sin, attended


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 70])
@pytest.mark.parametrize("has_head_norms", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_it_has_the_bits_of_its_parts(
    instruction_set: str, dtype: torch.dtype, has_head_norms: bool, num_tokens: int
) -> None:
    weights = weights_of(dtype, has_head_norms)
    hidden, cos, sin, attended = inputs_of(num_tokens, dtype)

    def product(rows: torch.Tensor, layer: LinearWeight) -> torch.Tensor:
        return linear(rows, layer.weight_NK, layer.bias_N, instruction_set)

    def normed(rows: torch.Tensor, norm: NormWeight | None) -> torch.Tensor:
        return rms_norm(rows, norm.weight_D, norm.epsilon, instruction_set) if norm else rows

    rows = normed(hidden, weights.input_norm)
    parts = [product(rows, layer).unflatten(2, (-1, DIM)) for layer in (weights.query, weights.key, weights.value)]
    query, key = normed(parts[0], weights.query_norm), normed(parts[1], weights.key_norm)
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin, instruction_set)
    layer = NativeLayer(weights, instruction_set)
    assert layer.covers(hidden, cos, sin)
    for found, expected in zip(layer.start(hidden, cos, sin), (query, key, parts[2].transpose(1, 2)), strict=True):
        assert torch.equal(found, expected)

    sums = hidden + product(attended.flatten(2), weights.projection)
    rows = normed(sums, weights.post_norm)
    inner = gated_linear(rows, weights.gate.weight_NK, weights.up.weight_NK, "silu", instruction_set)
    assert torch.equal(layer.end(hidden, attended), sums + product(inner, weights.down))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_token_has_the_same_bits_in_any_company(instruction_set: str, dtype: torch.dtype) -> None:
    layer, inputs = NativeLayer(weights_of(dtype), instruction_set), inputs_of(70, dtype)
    inputs[0][0, 33, 36] = 1e-39  # denormal, and in some companies behind the last whole vector
    hidden, cos, sin, attended = inputs
    heads, out = layer.start(hidden, cos, sin), layer.end(hidden, attended)
    for some in (slice(33, 34), slice(30, 34), slice(17, 60)):
        hidden, cos, sin, attended = (tensor[:, some] for tensor in inputs)
        for found, expected in zip(layer.start(hidden, cos, sin), heads, strict=True):
            assert torch.equal(found, expected[:, :, some])
        assert torch.equal(layer.end(hidden, attended), out[:, some])


def test_layers_whose_parts_do_not_go_together_are_not_covered() -> None:
    weights = weights_of(torch.float32)
    assert is_covered(weights)
    strided = NormWeight(torch.ones(2 * WIDTH)[::2], 1e-5)
    changes = [
        {"head_dim": 7},
        {"input_norm": strided},
        {"post_norm": NormWeight(torch.ones(WIDTH), torch.tensor(1e-5))},
        {"query_norm": NormWeight(torch.ones(1), 1e-5)},
        {"key": LinearWeight(torch.zeros(KV_HEADS * DIM, WIDTH + 1))},
        {"value": LinearWeight(torch.zeros(2 * KV_HEADS * DIM, WIDTH))},
        {"projection": LinearWeight(torch.zeros(WIDTH, DIM))},
        {"gate": LinearWeight(torch.zeros(INNER, WIDTH), torch.zeros(INNER))},
        {"down": LinearWeight(torch.zeros(WIDTH, INNER, dtype=torch.bfloat16))},
    ]
    for change in changes:
        other = dataclasses.replace(weights, **change)
        assert not is_covered(other), change
        with pytest.raises(ValueError, match="ask is_covered first"):
            NativeLayer(other)


def test_what_is_not_its_input_is_not_covered_or_refused() -> None:
    layer = NativeLayer(weights_of(torch.float32))
    hidden, cos, sin, attended = inputs_of(5, torch.float32)
    assert layer.covers(hidden, cos, sin)
    assert not layer.covers(hidden.bfloat16(), cos, sin)
    assert not layer.covers(hidden.expand(2, -1, -1), cos, sin)
    assert not layer.covers(hidden[..., :36], cos, sin)
    assert not layer.covers(hidden, cos[..., :8], sin[..., :8])
    assert not layer.covers(hidden, cos[:, ::2], sin[:, ::2])
    for wrong in (attended.double(), attended[:, :4], attended.transpose(1, 2)):
        with pytest.raises(ValueError, match="attention gave"):
            layer.end(hidden, wrong)
