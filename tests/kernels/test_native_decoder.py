"""The layers of a native decoder have the bits of their parts, whatever other tokens there are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from batchkv.kernels.attention import AttentionBackend
from batchkv.kernels.native_attention import NativeAttention, NativeKV, NativeWorkPlan
from batchkv.kernels.native_decoder import (
    LayerWeights,
    LinearWeight,
    NativeDecoder,
    NormWeight,
    are_covered,
    is_covered,
)
from batchkv.kernels.native_linear import gated_linear, linear
from batchkv.kernels.native_norm import rms_norm
from batchkv.kernels.native_rotary import rotate
from batchkv.kernels.torch_cpu import TorchAttention
from batchkv.kv_layout import LayerSpec
from batchkv.step import AttentionBatch
from tests.native_kernels import INSTRUCTION_SETS, needs_native

pytestmark = needs_native

WIDTH, HEADS, KV_HEADS, DIM, INNER = 37, 6, 2, 14, 50  # no multiples of what vectors and tiles hold
DTYPES = [torch.float32, torch.bfloat16]
SPEC = LayerSpec(HEADS, KV_HEADS, DIM, DIM, None)
WINDOWED = dataclasses.replace(SPEC, window=9)
PAGE_SIZE, PAGES = 4, 32


def weights_of(dtype: torch.dtype, seed: int = 0, has_head_norms: bool = True, inner: int = INNER) -> LayerWeights:
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) / 4).to(dtype)

    def norm(size: int) -> NormWeight:
        return NormWeight(1 + numbers(size), 1e-5)

    return LayerWeights(
        head_dim=DIM,
        scale=0.3,
        activation="silu",
        input_norm=norm(WIDTH),
        query=LinearWeight(numbers(HEADS * DIM, WIDTH), numbers(HEADS * DIM)),
        key=LinearWeight(numbers(KV_HEADS * DIM, WIDTH)),
        value=LinearWeight(numbers(KV_HEADS * DIM, WIDTH), numbers(KV_HEADS * DIM)),
        query_norm=norm(DIM) if has_head_norms else None,
        key_norm=norm(DIM) if has_head_norms else None,
        projection=LinearWeight(numbers(WIDTH, HEADS * DIM)),
        post_norm=norm(WIDTH),
        gate=LinearWeight(numbers(inner, WIDTH)),
        up=LinearWeight(numbers(inner, WIDTH)),
        down=LinearWeight(numbers(WIDTH, inner), numbers(WIDTH)),
    )


def layers_of(dtype: torch.dtype) -> list[LayerWeights]:
    """Two of them, which differ in what they may differ in."""
    return [weights_of(dtype), weights_of(dtype, seed=1, has_head_norms=False, inner=64)]


def inputs_of(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, cos and sin."""
    random = torch.Generator().manual_seed(1)
    shapes = (num_tokens, WIDTH), (num_tokens, DIM), (num_tokens, DIM)
    hidden, cos, sin = (torch.randn(1, *shape, generator=random).to(dtype) for shape in shapes)
    return hidden, cos, sin


def rows_of(*rows: tuple[int, int], window: int | None) -> AttentionBatch:
    """Each row as the position of its first token and how many tokens it has; a row's pages follow each other."""
    each = PAGES // len(rows)
    table = np.arange(PAGES, dtype=np.int32)[: each * len(rows)].reshape(len(rows), each)
    slots = [
        int(table[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
        for row, (first, count) in enumerate(rows)
        for position in range(first, first + count)
    ]
    counts = np.array([count for _, count in rows], np.int64)
    ends = np.array([sum(row) for row in rows], np.int64)
    return AttentionBatch(PAGE_SIZE, window, table, ends, np.append(0, counts.cumsum()), np.array(slots, np.int64))


def pages_of(backend: NativeAttention, dtype: torch.dtype) -> list[NativeKV]:
    """Of two layers, of which the second one has a window."""
    found = [backend.allocate(PAGES, PAGE_SIZE, spec, dtype, torch.device("cpu")) for spec in (SPEC, WINDOWED)]
    for kv in found:
        kv.key.zero_(), kv.value.zero_()
    return found


def plans_of(backend: NativeAttention, *rows: tuple[int, int]) -> list[NativeWorkPlan]:
    return [backend.plan(rows_of(*rows, window=spec.window), spec) for spec in (SPEC, WINDOWED)]


def run_parts(
    weights: LayerWeights,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    backend: NativeAttention,
    kv: NativeKV,
    plan: NativeWorkPlan,
    instruction_set: str,
) -> torch.Tensor:
    """A layer, part by part; tokens behind those of the plan attend to nothing."""
    hidden, cos, sin = inputs
    num_tokens = plan.batch.num_tokens

    def product(rows: torch.Tensor, layer: LinearWeight) -> torch.Tensor:
        return linear(rows, layer.weight_NK, layer.bias_N, instruction_set)

    def normed(rows: torch.Tensor, norm: NormWeight | None) -> torch.Tensor:
        return rms_norm(rows, norm.weight_D, norm.epsilon, instruction_set) if norm else rows

    rows = normed(hidden, weights.input_norm)
    parts = [product(rows, layer).unflatten(2, (-1, DIM)) for layer in (weights.query, weights.key, weights.value)]
    query, key = normed(parts[0], weights.query_norm), normed(parts[1], weights.key_norm)
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin, instruction_set)
    backend.store(kv, plan, key[0, :, :num_tokens], parts[2].transpose(1, 2)[0, :, :num_tokens])
    attended = torch.zeros(1, hidden.shape[1], HEADS, DIM, dtype=hidden.dtype)
    attended[0, :num_tokens] = backend.attend(kv, plan, query[0, :, :num_tokens], scale=weights.scale)
    sums = hidden + product(attended.flatten(2), weights.projection)
    rows = normed(sums, weights.post_norm)
    inner = gated_linear(rows, weights.gate.weight_NK, weights.up.weight_NK, "silu", instruction_set)
    return sums + product(inner, weights.down)


@pytest.mark.parametrize("rows", [((0, 1),), ((0, 5),), ((0, 30), (0, 41))])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_it_has_the_bits_of_its_parts(
    instruction_set: str, dtype: torch.dtype, rows: tuple[tuple[int, int], ...]
) -> None:
    layers, backend = layers_of(dtype), NativeAttention(instruction_set)
    hidden, cos, sin = inputs_of(sum(count for _, count in rows) + 3, dtype)  # three more fill the step
    pages, plans = pages_of(backend, dtype), plans_of(backend, *rows)
    decoder = NativeDecoder(layers, instruction_set)
    assert decoder.covers(hidden, cos, sin)
    assert decoder.attends_by(backend, pages)
    before = hidden.clone()
    found = decoder.run(hidden, cos, sin, pages, plans)
    assert torch.equal(hidden, before)

    expected, of_parts = hidden, pages_of(backend, dtype)
    for layer, kv, plan in zip(layers, of_parts, plans, strict=True):
        expected = run_parts(layer, (expected, cos, sin), backend, kv, plan, instruction_set)
    assert torch.equal(found, expected)
    for kv, other in zip(pages, of_parts, strict=True):
        assert torch.equal(kv.key, other.key)
        assert torch.equal(kv.value, other.value)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_keys_and_values_are_quantized_as_by_its_parts(instruction_set: str) -> None:
    layers, backend = layers_of(torch.float32), NativeAttention(instruction_set)
    hidden, cos, sin = inputs_of(20, torch.float32)
    pages, of_parts = pages_of(backend, torch.int8), pages_of(backend, torch.int8)
    plans = plans_of(backend, (0, 20))
    decoder = NativeDecoder(layers, instruction_set)
    assert decoder.attends_by(backend, pages)
    found, expected = decoder.run(hidden, cos, sin, pages, plans), hidden
    for layer, kv, plan in zip(layers, of_parts, plans, strict=True):
        expected = run_parts(layer, (expected, cos, sin), backend, kv, plan, instruction_set)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_token_has_the_same_bits_in_any_company(instruction_set: str, dtype: torch.dtype) -> None:
    layers, backend = layers_of(dtype), NativeAttention(instruction_set)
    decoder, (hidden, cos, sin) = NativeDecoder(layers, instruction_set), inputs_of(60, dtype)
    hidden[0, 33, 36] = 1e-39  # denormal, and in some companies behind the last whole vector
    whole = decoder.run(hidden, cos, sin, pages_of(backend, dtype), plans_of(backend, (0, 60)))
    pages = pages_of(backend, dtype)
    for begin, end in ((0, 17), (17, 33), (33, 34), (34, 60)):
        some, (of_cos, of_sin) = hidden[:, begin:end], (cos[:, begin:end], sin[:, begin:end])
        found = decoder.run(some, of_cos, of_sin, pages, plans_of(backend, (begin, end - begin)))
        assert torch.equal(found, whole[:, begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_tokens_and_one_that_attends_to_nothing_are_steps(dtype: torch.dtype) -> None:
    backend, decoder = NativeAttention(), NativeDecoder(layers_of(dtype))
    nothing = [backend.plan(rows_of((0, 0), window=spec.window), spec) for spec in (SPEC, WINDOWED)]
    for num_tokens in (0, 5):
        inputs = inputs_of(num_tokens, dtype)
        found, expected = decoder.run(*inputs, pages_of(backend, dtype), nothing), inputs[0]
        for layer in layers_of(dtype):
            rows = rms_norm(expected, layer.post_norm.weight_D, layer.post_norm.epsilon)
            inner = gated_linear(rows, layer.gate.weight_NK, layer.up.weight_NK, "silu")
            expected = expected + linear(inner, layer.down.weight_NK, layer.down.bias_N)
        assert torch.equal(found, expected)


def test_layers_whose_parts_do_not_go_together_are_not_covered() -> None:
    weights = weights_of(torch.float32)
    assert is_covered(weights)
    strided = NormWeight(torch.ones(2 * WIDTH)[::2], 1e-5)
    changes: list[dict[str, Any]] = [
        {"head_dim": 7},
        {"scale": 0.0},
        {"input_norm": strided},
        {"post_norm": NormWeight(torch.ones(WIDTH), torch.tensor(1e-5))},
        {"query_norm": NormWeight(torch.ones(1), 1e-5)},
        {"key": LinearWeight(torch.zeros(KV_HEADS * DIM, WIDTH + 1))},
        {"value": LinearWeight(torch.zeros(2 * KV_HEADS * DIM, WIDTH))},
        {"key": LinearWeight(torch.zeros(4 * DIM, WIDTH)), "value": LinearWeight(torch.zeros(4 * DIM, WIDTH))},
        {"projection": LinearWeight(torch.zeros(WIDTH, DIM))},
        {"gate": LinearWeight(torch.zeros(INNER, WIDTH), torch.zeros(INNER))},
        {"down": LinearWeight(torch.zeros(WIDTH, INNER, dtype=torch.bfloat16))},
    ]
    for change in changes:
        other = dataclasses.replace(weights, **change)
        assert not is_covered(other), change
        with pytest.raises(ValueError, match="ask are_covered first"):
            NativeDecoder([weights, other])


def test_layers_that_cannot_follow_each_other_are_not_covered() -> None:
    weights = weights_of(torch.float32)
    fewer = {"key": LinearWeight(torch.zeros(DIM, WIDTH)), "value": LinearWeight(torch.zeros(DIM, WIDTH))}
    assert are_covered([weights, weights_of(torch.float32, seed=1)])
    assert not are_covered([])
    for other in (dataclasses.replace(weights, **fewer), weights_of(torch.bfloat16)):
        assert is_covered(other)
        assert not are_covered([weights, other])


def test_what_is_not_its_input_is_not_covered() -> None:
    decoder = NativeDecoder(layers_of(torch.float32))
    hidden, cos, sin = inputs_of(5, torch.float32)
    assert decoder.covers(hidden, cos, sin)
    assert not decoder.covers(hidden.bfloat16(), cos, sin)
    assert not decoder.covers(hidden.expand(2, -1, -1), cos, sin)
    assert not decoder.covers(hidden[..., :36], cos, sin)
    assert not decoder.covers(hidden, cos[..., :8], sin[..., :8])
    assert not decoder.covers(hidden, cos[:, ::2], sin[:, ::2])


def test_attention_that_is_not_its_own_is_not_covered() -> None:
    backend, decoder = NativeAttention(), NativeDecoder(layers_of(torch.bfloat16))
    pages = pages_of(backend, torch.bfloat16)
    assert decoder.attends_by(backend, pages)
    assert not decoder.attends_by(backend, pages[:1])
    assert not decoder.attends_by(backend, pages_of(backend, torch.float32))
    assert not decoder.attends_by(backend, pages_of(backend, torch.int8))
    others: list[AttentionBackend[Any, Any]] = [TorchAttention(), NativeAttention("portable")]
    assert not any(decoder.attends_by(other, pages) for other in others)
    narrow = LayerSpec(HEADS, KV_HEADS, DIM, DIM - 2, None)
    narrow_pages = [backend.allocate(PAGES, PAGE_SIZE, narrow, torch.bfloat16, torch.device("cpu"))] * 2
    assert not decoder.attends_by(backend, narrow_pages)


def test_a_plan_for_more_tokens_than_there_are_is_refused() -> None:
    backend, decoder = NativeAttention(), NativeDecoder(layers_of(torch.float32))
    with pytest.raises(ValueError, match="planned for 6 tokens, there are 5"):
        decoder.run(*inputs_of(5, torch.float32), pages_of(backend, torch.float32), plans_of(backend, (0, 6)))
